"""vLLM in the training process."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import (
    GO_ON,
    EngineError,
    EngineFailure,
    NoWeightsError,
    OnGroup,
    RolloutEngine,
    Sampling,
    bear,
)
from lgrpo.engines.completions import completion_from, eos_ids
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.engines.vllm_adapter import adapter_checksums, adapter_flags, adapter_weights, write_adapter
from lgrpo.engines.vllm_layout import Layout, Places, checksums, engine_layout, read_parts
from lgrpo.engines.vllm_process import (
    WHOLE_PROMPTS,
    answer_all,
    check_lengths,
    explain,
    first_line,
    import_vllm,
    isolated,
)
from lgrpo.engines.vllm_transfer import folder_in_memory, write_folder
from lgrpo.functional import named_checksums, stream_seed
from lgrpo.types import Adapter, Completion, NamedTensors, PolicyWeights, Prompt


@final
class VLLMEngine(RolloutEngine):
    """vLLM beside the trainer, on the same device. On a GPU it sleeps while the trainer updates.

    Where it fails, by an error of its own or for want of memory, it is built anew with the weights it held, and goes on
    with the prompts it left unanswered.
    """

    follows_precision = True

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
        max_failures: int = 3,
        adapters: bool = True,
        verify: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            dtype: Of vLLM's weights; by default what the trainer computes in, bfloat16 on a GPU where its precision is
                bf16-mixed; else the policy's.
            max_model_len: Most tokens of prompt and completion together; by default the model's.
            max_num_seqs: Completions decoded at a time.
            gpu_memory_utilization: Share of the GPU's memory vLLM may take while it is awake.
            kv_cache_gib: Size of the key-value cache; by default what gpu_memory_utilization leaves, on a CPU 0.25.
            tensor_parallel_size: GPUs a model is spread over.
            enforce_eager: No CUDA graphs. By default on CPUs only.
            sleep: Give the memory back while the trainer updates. By default on GPUs.
            seeded: Each request has a seed of its own, so that runs repeat; on a GPU this costs vLLM's fast sampler. By
                default on CPUs only.
            timeout: Seconds a generation may take, from the last failure on.
            max_failures: Failures of vLLM a generation recovers from; the next one stops the run.
            adapters: Of a policy with LoRA, only the adapters travel at a sync, and vLLM applies them. Without it, the
                merged weights travel.
            verify: Compare vLLM's own checksums with the policy's after every sync.
            options: Any other argument of ``vllm.LLM``.
        """
        super().__init__()
        if max_failures < 0:
            raise ValueError(f"max_failures is {max_failures}; 0 stops at the first failure")
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
        self.max_failures = max_failures
        self.adapters = adapters
        self.verify = verify
        self.options = options or {}
        self._llm: Any = None
        self._llm_dtype: torch.dtype | None = None
        self._config: PretrainedConfig | None = None
        self._layout: Layout = {}
        self._places: Places | None = None
        """Where in vLLM the policy's tensors lie, where they lie as they come."""
        self._sent = Sent()
        self._kept: dict[str, Tensor] = {}
        """The weights while they are in no engine."""
        self._asleep: set[str] = set()
        self._is_settled = False
        self._base: NamedTensors | None = None
        """The weights below the adapters, where only adapters travel."""
        self._request: Any = None
        """How vLLM is asked for a completion with the adapter."""

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        if weights.adapter is not None and self.adapters:
            return self._receive_adapter(weights, weights.adapter)
        if self._llm is None:
            dtype = self._precision(weights) or next(iter(weights))[1].dtype
            self._llm = self._build(weights.config, dtype)
            self._layout, self._places = {}, None
        if self._places is not None and not self._places.are_current():
            self._layout, self._places = {}, None  # to be found again
        self._wake("weights")
        sent = Sent(dtype=self._llm_dtype)
        try:
            with isolated(), torch.no_grad():
                if self._places is not None:  # else vLLM takes its layers apart
                    self._places.fill(sent.through(weights, copy=False))
                else:
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent.through(weights)})
        except BaseException as error:
            self.close()  # its tensors are left without storage: nothing may be sampled from it
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"vLLM did not take the weights: {first_line(error)}") from error
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM's prefix cache is in use, so it would answer from the weights before this sync")
        self._config = weights.config
        if not self._layout or sent.shapes != self._sent.shapes:
            layout = self._layout = engine_layout(sent.shapes)
            model = self._llm.llm_engine.model_config
            is_plain = model.quantization is None and not model.use_mla  # else it keeps more than it is given
            self._places = self._on_model(lambda model: Places.found(model, layout)) if is_plain else None
        self._sent = sent
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        if not self.verify:
            return sent.checksums
        try:
            if self.adapter_rank is not None:
                return self._on_worker(adapter_checksums, sent.shapes)
            if self._places is not None and self._places.are_current():
                return self._places.checksums()
            return self._on_model(lambda model: checksums(model, self._layout))
        except LookupError as error:
            raise WeightSyncError(
                f"{error}. Is {self._config and self._config.model_type} laid out otherwise?"
            ) from error

    def held_weights(self) -> dict[str, Tensor]:
        if self._llm is None:
            if not self._kept:
                raise EngineError(f"vLLM failed, and with it the behaviour policy it held: {GO_ON}")
            return dict(self._kept)
        self._wake("weights")
        if self.adapter_rank is not None:
            return self._on_worker(adapter_weights, self._sent.shapes)
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
        if self._llm is None:
            raise EngineError(f"vLLM failed, and could not be built anew: {GO_ON}")
        check_lengths(prompts, sampling, self._llm.llm_engine.model_config.max_model_len)
        from vllm import SamplingParams

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
                flat_logprobs=True,  # else an object for each token
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
                    answer.logprobs.logprobs,
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

        num_failures = 0
        while left := [place for place in range(len(prompts)) if place not in groups]:
            try:
                self._wake("weights", "kv_cache")
                noise = stream_seed(seed, prompts[left[0]].position)
                asked = {place: (requests[place], parameters[place]) for place in left}
                eager = torch.compiler.set_stance("force_eager") if self._on_cpu else contextlib.nullcontext()
                with isolated(), eager:
                    answer_all(self._llm, asked, keep, noise, self.timeout, self._request)
            except EngineFailure as failure:
                num_failures, self.faults["failures"] = num_failures + 1, self.faults["failures"] + 1
                bear(failure, num_failures, self.max_failures)
            else:
                break
            self._rebuild(step, version)  # here, where the failure's traceback has let go of the broken engine's memory
        return [groups[place] for place in range(len(prompts))]

    def wake(self) -> None:
        if self._llm is not None:
            self._wake("weights")

    def rest(self) -> None:
        """Sleeps: with its weights in host memory, or without them where they will not be sampled from again."""
        if self._llm is not None and self._sleeps and len(self._asleep) < 2:
            self._wake("weights", "kv_cache")  # vLLM sleeps as a whole
            if not self._is_settled:
                gc.collect()
                gc.freeze()  # what is there by now stays: to search through it takes a third of a second at every sleep
                self._is_settled = True
            with isolated():
                self._llm.sleep(level=2 if self.spent and self._base is None else 1)  # a base travels once only
            self._asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        self.forget()
        self._kept = {}
        self._request = None
        if self._llm is not None:
            llm, self._llm, self._asleep = self._llm, None, set()
            self._places = None  # it holds on to tensors of vLLM's
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.unfreeze()
            gc.collect()
            self._is_settled = False

    # Inside

    def _receive_adapter(self, weights: PolicyWeights, adapter: Adapter) -> Sent:
        """The adapter alone; before the first one, the weights below it."""
        if self._llm is None:
            self._base = adapter.base
            dtype = self._precision(weights) or next(adapter.base())[1].dtype
            self._llm = self._build(weights.config, dtype, adapter)
        from vllm.lora.request import LoRARequest

        self._wake("weights")
        sent, number = Sent(dtype=self._llm_dtype), 1 + (self._request.lora_int_id if self._request else 0)
        with folder_in_memory() as folder, isolated():
            write_adapter(folder, adapter.rank, sent.through(adapter.tensors()))
            self._request = LoRARequest(f"{number}", number, str(folder))
            try:
                if not self._llm.llm_engine.add_lora(self._request):
                    raise WeightSyncError("vLLM did not take the adapter")
            except Exception as error:
                self.close()  # which of two adapters it holds is not known
                if isinstance(error, WeightSyncError):
                    raise
                raise WeightSyncError(f"vLLM did not take the adapter: {first_line(error)}") from error
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM's prefix cache is in use, so it would answer from the weights before this sync")
        self._config, self._sent, self.adapter_rank = weights.config, sent, adapter.rank
        return sent

    def _precision(self, weights: PolicyWeights) -> torch.dtype | None:
        """What vLLM is to hold them in; once it has started, that of before, where it starts again."""
        return self.dtype or self._llm_dtype or weights.computed_in

    def _build(self, config: PretrainedConfig, dtype: torch.dtype, adapter: Adapter | None = None) -> Any:
        """An engine of that architecture, with no weights yet, or with those below an adapter."""
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
        sent = Sent(dtype=dtype)
        if adapter is not None:
            arguments |= {"load_format": "safetensors", "use_tqdm_on_load": False} | adapter_flags(adapter.rank)
        arguments |= self.options
        initialised = self._shares_processes = torch.distributed.is_initialized()
        num_bytes = sum(t.numel() for _, t in adapter.base()) * dtype.itemsize if adapter else 0
        with folder_in_memory(num_bytes) as folder, isolated():
            config.save_pretrained(folder)
            if adapter is not None:
                write_folder(folder, sent.through(adapter.base()))
            if initialised:
                os.environ["RANK"] = str(torch.distributed.get_rank())  # Lightning does not set it, vLLM wants it
            try:
                llm = vllm.LLM(model=str(folder), **arguments)
            except Exception as error:
                if not initialised:  # it leaves process groups behind, which the next start would trip over
                    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                    cleanup_dist_env_and_memory()
                raise EngineError(explain(error, config)) from error
            finally:
                gc.unfreeze()  # vLLM freezes what it finds, the trainer's garbage too
        if adapter is not None and self.verify:
            layout = engine_layout(sent.shapes)
            sent.compare(llm.apply_model(lambda model: checksums(model, layout))[0])
        return llm

    def _on_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._llm.collective_rpc(function, args=arguments)[0]

    def _on_model(self, function: Any) -> Any:
        return self._llm.apply_model(function)[0]

    def _wake(self, *tags: str) -> None:
        if tired := [tag for tag in tags if tag in self._asleep]:
            torch.cuda.empty_cache()  # what the trainer keeps for its next update, vLLM needs now
            with isolated():
                self._llm.wake_up(tags=tired)
            self._asleep -= set(tired)

    def _rebuild(self, step: int, version: int) -> None:
        """Another vLLM with the same weights, read out of the broken one."""
        start = time.perf_counter()
        if self._shares_processes:
            raise EngineError(
                "vLLM failed, and cannot be built anew among the process groups of the trainer, which end with it: "
                f"{GO_ON}, or use lgrpo.engines.VLLMServerEngine"
            )
        sent, config = self._sent, self.held_config()
        try:
            weights = {name: tensor.cpu() for name, tensor in self.held_weights().items()}
            if self.verify:
                sent.compare(named_checksums(weights.items()))
        except Exception as error:
            with contextlib.suppress(Exception):
                self.close()
            self.step, self.version = step, version  # so that a checkpoint asks for it, and is refused
            raise EngineError(
                f"vLLM failed, and with it the behaviour policy it held ({first_line(error)}): {GO_ON}"
            ) from error
        self.close()
        self._kept = weights
        try:
            self._replace(self._again(config, weights), step, version)
            if self.verify:
                sent.compare(self.held_checksums(self._sent))  # with what was sent at the sync, not with what was kept
        except BaseException:
            self.step, self.version = step, version  # a checkpoint may still take it from here
            raise
        self._kept = {}
        self.faults["restarts"] += 1
        self.recovery_seconds += time.perf_counter() - start

    def _again(self, config: PretrainedConfig, held: dict[str, Tensor]) -> PolicyWeights:
        """What was held, to be given once more."""
        if self.adapter_rank is None:
            return PolicyWeights(config=config, tensors=lambda: iter(held.items()))
        assert self._base is not None
        adapter = Adapter(rank=self.adapter_rank, base=self._base, tensors=lambda: iter(held.items()))
        return PolicyWeights.adapted(config, adapter)
