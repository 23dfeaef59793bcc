"""vLLM in the training process."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import EngineError, NoWeightsError, OnGroup, RolloutEngine, Sampling, completion_from, eos_ids
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.engines.vllm_weights import Layout, checksums, engine_layout, read_parts
from lgrpo.functional import stream_seed
from lgrpo.types import Completion, PolicyWeights, Prompt

WHOLE_PROMPTS: dict[str, Any] = {"enable_chunked_prefill": False}
"""On a CPU: where vLLM reads a prompt in pieces it turns a seeded request's generator back, which CPUs' cannot do."""


@final
class VLLMEngine(RolloutEngine):
    """vLLM beside the trainer, on the same device. On a GPU it sleeps while the trainer updates."""

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gib: float | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        sleep: bool | None = None,
        seeded: bool | None = None,
        timeout: float = 1800.0,
        verify: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            dtype: Of vLLM's weights; by default the policy's.
            max_model_len: Most tokens of prompt and completion together; by default the model's.
            max_num_seqs: Completions decoded at a time.
            gpu_memory_utilization: Share of the GPU's memory vLLM may take while it is awake.
            kv_cache_gib: Size of the key-value cache; by default what gpu_memory_utilization leaves, on a CPU 0.25.
            tensor_parallel_size: GPUs a model is spread over.
            enforce_eager: No CUDA graphs. By default on CPUs only.
            sleep: Give the memory back while the trainer updates. By default on GPUs.
            seeded: Each request has a seed of its own, so that runs repeat; on a GPU this costs vLLM's fast sampler. By
                default on CPUs only.
            timeout: Seconds a generation may take.
            verify: Compare vLLM's own checksums with the policy's after every sync.
            options: Any other argument of ``vllm.LLM``.
        """
        super().__init__()
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.tensor_parallel_size = tensor_parallel_size
        self.enforce_eager = enforce_eager
        self.sleep = sleep
        self.seeded = seeded
        self.timeout = timeout
        self.verify = verify
        self.options = options or {}
        self._llm: Any = None
        self._config: PretrainedConfig | None = None
        self._layout: Layout = {}
        self._asleep: set[str] = set()

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        if self._llm is None:
            dtype = self.dtype or next(iter(weights))[1].dtype
            self._llm = self._build(weights.config, dtype)
        self._wake("weights")
        sent = Sent(dtype=self._llm_dtype)
        try:
            with isolated():
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent.through(weights)})
        except BaseException as error:
            self.close()  # its tensors are left without storage: nothing may be sampled from it
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"vLLM did not take the weights: {_first_line(error)}") from error
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM's prefix cache is in use, so it would answer from the weights before this sync")
        self._config = weights.config
        self._layout = engine_layout(sent.shapes)
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        if not self.verify:
            return sent.checksums
        try:
            return self._on_model(lambda model: checksums(model, self._layout))
        except LookupError as error:
            raise WeightSyncError(
                f"{error}. Is {self._config and self._config.model_type} laid out otherwise?"
            ) from error

    def held_weights(self) -> dict[str, Tensor]:
        self._wake("weights")
        return self._on_model(lambda model: {name: part.clone() for name, part in read_parts(model, self._layout)})

    def held_config(self) -> PretrainedConfig:
        if self._config is None:
            raise NoWeightsError
        return self._config

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        step, version = self.holds()
        check_lengths(prompts, sampling, self._llm.llm_engine.model_config.max_model_len)
        from vllm import SamplingParams

        self._wake("weights", "kv_cache")
        eos = sorted(eos_ids(self.held_config(), tokenizer))
        requests = [{"prompt_token_ids": p.token_ids, "cache_salt": f"v{version}"} for p in prompts]
        parameters = [
            SamplingParams(
                n=num_samples,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                seed=stream_seed(seed, p.position) if self._is_seeded else None,
                logprobs=0,
                detokenize=False,
                stop_token_ids=eos,
            )
            for p in prompts
        ]
        groups: dict[int, list[Completion]] = {}

        def keep(place: int, output: Any) -> None:
            groups[place] = [
                completion_from(
                    list(answer.token_ids),
                    [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)],
                    answer.finish_reason,
                    sampling,
                    tokenizer,
                    step,
                    version,
                )
                for answer in output.outputs
            ]
            if on_group is not None:
                on_group(place, groups[place])

        self._run(requests, parameters, keep)
        return [groups[place] for place in range(len(prompts))]

    def rest(self) -> None:
        """Sleeps: with its weights in host memory, or without them where they will not be sampled from again."""
        if self._llm is not None and self._sleeps and len(self._asleep) < 2:
            self._wake("weights", "kv_cache")  # vLLM sleeps as a whole
            with isolated():
                self._llm.sleep(level=2 if self.spent else 1)
            self._asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        self.forget()
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm, self._asleep = None, set()
            gc.collect()

    # Inside

    def _build(self, config: PretrainedConfig, dtype: torch.dtype) -> Any:
        """An engine of that architecture, with no weights yet."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of harmless things at every sync
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self.options.setdefault("distributed_executor_backend", "external_launcher")
        vllm = import_vllm()
        self._llm_dtype = dtype
        self._on_cpu = vllm.platforms.current_platform.is_cpu()
        self._sleeps = (not self._on_cpu) if self.sleep is None else self.sleep
        self._is_seeded = self._on_cpu if self.seeded is None else self.seeded
        cache = self.kv_cache_gib if self.kv_cache_gib is not None else (0.25 if self._on_cpu else None)
        arguments = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self._on_cpu if self.enforce_eager is None else self.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._sleeps and not self._on_cpu,
            "disable_log_stats": True,
        }
        if self._on_cpu and self._is_seeded:
            arguments |= WHOLE_PROMPTS
        arguments |= self.options
        initialised = torch.distributed.is_initialized()
        with tempfile.TemporaryDirectory() as folder, isolated():
            config.save_pretrained(folder)
            try:
                return vllm.LLM(model=folder, **arguments)
            except Exception as error:
                if not initialised:  # it leaves process groups behind, which the next start would trip over
                    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                    cleanup_dist_env_and_memory()
                raise EngineError(explain(error, config)) from error

    def _on_model(self, function: Any) -> Any:
        return self._llm.apply_model(function)[0]

    def _wake(self, *tags: str) -> None:
        if tired := [tag for tag in tags if tag in self._asleep]:
            with isolated():
                self._llm.wake_up(tags=tired)
            self._asleep -= set(tired)

    def _run(self, requests: list[dict[str, Any]], parameters: list[Any], keep: Callable[[int, Any], None]) -> None:
        """Steps vLLM until all requests are answered, with a deadline. After an error none of them is left inside."""
        engine, finished = self._llm.llm_engine, 0
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else contextlib.nullcontext()
        deadline = time.monotonic() + self.timeout
        with isolated(), stance, without_collection():
            try:
                names = self._llm.enqueue(requests, parameters, use_tqdm=False)
                places = {name.split("-")[0]: place for place, name in enumerate(names)}  # behind it, a random part
                while engine.has_unfinished_requests():
                    if time.monotonic() > deadline:
                        left, total = engine.get_num_unfinished_requests(), sum(p.n for p in parameters)
                        raise EngineError(f"vLLM had {left} of {total} completions unfinished after {self.timeout:g} s")
                    for output in engine.step():
                        if output.finished:
                            keep(places[output.request_id.split("-")[0]], output)
                            finished += 1
            except BaseException:  # what is left inside would make the next generation wait for ever
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
                raise
        if finished != len(requests):
            raise EngineError(f"vLLM answered {finished} of {len(requests)} prompts")


def import_vllm() -> Any:
    """The vllm package, or an error that says how to get it."""
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise EngineError(
            f"this engine needs vLLM, which cannot be imported ({error}): pip install 'lgrpo[vllm]', or use "
            "lgrpo.engines.TransformersEngine"
        ) from error
    return vllm


def check_lengths(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    """vLLM would cut the completion of a long prompt short without a word."""
    for prompt in prompts:
        if len(prompt.token_ids) + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt.token_ids)} tokens and a completion of {sampling.max_tokens} exceed vLLM's "
                f"max_model_len of {max_model_len}: {prompt.text[:60]!r}…"
            )


def explain(error: Exception, config: PretrainedConfig) -> str:
    """What stopped vLLM from starting, in a line, with what to do about it."""
    text, architecture = str(error), (config.architectures or [config.model_type])[0]
    if "are not supported" in text or "no vLLM implementation" in text.lower() or "head_size" in text.lower():
        return f"vLLM cannot serve {architecture}: {_first_line(error)}. Use lgrpo.engines.TransformersEngine"
    if "KV cache" in text or "cache blocks" in text or "memory" in text.lower():
        return (
            f"vLLM found no memory for the KV cache: {_first_line(error)}. Lower max_model_len, or raise kv_cache_gib "
            "or gpu_memory_utilization"
        )
    return f"vLLM did not start with {architecture}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage: vLLM makes many small objects at every token, and few of them are garbage by then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """vLLM works inside; random states, thread count, exception hook and environment are the trainer's again after."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads, hook, environment = (
        torch.set_num_threads,
        torch.get_num_threads(),
        sys.excepthook,
        dict(os.environ),
    )
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        sys.excepthook = hook
        gc.unfreeze()
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "TORCHINDUCTOR_COMPILE_THREADS"):
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)
