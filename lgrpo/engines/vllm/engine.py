"""The engine that samples with vLLM in the training process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any, Literal, final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.manifest import WeightManifest, WeightSyncError
from lgrpo.engines.processes import has_other_ranks
from lgrpo.engines.recovery import RESUME_ADVICE, EngineError, EngineFailure, FailureBudget, Faults, Timeouts
from lgrpo.engines.vllm.adapter import adapter_flags
from lgrpo.engines.vllm.embedded import EmbeddedLLM
from lgrpo.engines.vllm.kept import MAX_LOGPROBS
from lgrpo.engines.vllm.layout import checksums, engine_layout
from lgrpo.engines.vllm.loaders import AdapterLoader, WeightLoader, WholeLoader
from lgrpo.engines.vllm.requests import Requests
from lgrpo.engines.vllm.runtime import (
    BATCH_INVARIANT,
    WHOLE_PROMPTS,
    answer_all,
    check_batch_invariance,
    check_context_length,
    check_vllm_installed,
    first_line,
    import_vllm,
    isolated,
    set_environment,
)
from lgrpo.functional import named_checksums
from lgrpo.types import Prompt
from lgrpo.weights import Adapter, PolicyWeights


@final
class VLLMEngine(RolloutEngine):
    """vLLM in the training process, on its one device. On a GPU it sleeps while the trainer updates.

    vLLM is built at the first sync. If it fails while it generates, by an error or because it runs out of memory, it is
    rebuilt with the weights it held, and continues with the unanswered prompts.
    """

    follows_precision = True
    can_continue = True
    returns_kept = "with top_k"

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gib: float | None = None,
        enforce_eager: bool | None = None,
        sleep_mode: bool | None = None,
        seeded: bool | None = None,
        batch_invariant: bool = False,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        max_failures: int = 3,
        adapters: bool = True,
        verify: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            dtype: Precision of vLLM's weights; by default the trainer's compute precision (bfloat16 on a GPU with
                bf16-mixed), otherwise the policy's.
            max_model_len: Most tokens of prompt and completion together; by default the model's limit.
            max_num_seqs: Completions decoded at a time.
            gpu_memory_utilization: Share of the GPU's memory that vLLM may use while awake.
            kv_cache_gib: Size of the key-value cache; by default the rest of gpu_memory_utilization, on a CPU 0.25.
            enforce_eager: Whether to run without CUDA graphs. By default on CPUs only.
            sleep_mode: Whether to release memory while the trainer updates. By default on GPUs.
            seeded: Whether each request has its own seed, so that runs are reproducible; on a GPU this disables vLLM's
                fast sampler. By default on CPUs, and with batch_invariant.
            batch_invariant: Whether vLLM uses kernels whose results do not depend on what else is in a batch, so that
                tokens do not either. On GPUs, in an EnginePool: vLLM replaces the kernels of its whole process.
            timeouts: Time limits; only ``generate`` applies.
            max_failures: Failures of vLLM that a generation recovers from; the next one stops the run.
            adapters: Whether a sync of a LoRA policy sends only the adapters, which vLLM applies; otherwise the merged
                weights.
            verify: Whether to compare vLLM's checksums with the policy's after every sync.
            options: Further arguments of ``vllm.LLM``.
        """
        super().__init__()
        if sharded := [
            name for name, value in (options or {}).items() if name.endswith("parallel_size") and value != 1
        ]:
            raise ValueError(
                f"VLLMEngine has options {', '.join(sharded)}: it samples in each training process, which has its own "
                "prompts, so it cannot be sharded over GPUs. Use lgrpo.engines.VLLMServerEngine, which can"
            )
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.enforce_eager = enforce_eager
        self.sleep_mode = sleep_mode
        self.seeded = seeded
        self.batch_invariant = batch_invariant
        self.timeouts = timeouts
        self.adapters = adapters
        self.verify = verify
        self.options = options or {}
        self.budget = FailureBudget(max_failures)
        self._loader: WeightLoader | None = None
        """vLLM, and how weights get into it; None before the first sync and after a failure."""
        self._llm_dtype: torch.dtype | None = None
        """Precision of the last vLLM, which a rebuilt one must have too."""
        self._adapter: Adapter | None = None
        """The first adapter, whose base weights all others share, if only adapters are synced."""
        self._rescued: dict[str, Tensor] = {}
        """Weights read from a failed vLLM, until the next one has loaded them."""
        self._on_cpu = False
        self._is_seeded = False

    @property
    def faults(self) -> Faults:
        return self.budget.faults

    def check_installed(self) -> None:
        check_vllm_installed()

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        if self.batch_invariant:  # a pool does not prepare the engines of its processes
            raise ValueError(
                "VLLMEngine.batch_invariant replaces the kernels of a whole process, and this engine shares the "
                "trainer's: use an EnginePool of it, with num_processes 1 or more, or VLLMServerEngine"
            )

    def import_packages(self) -> None:
        set_environment()
        if self.batch_invariant:
            os.environ |= BATCH_INVARIANT
        with contextlib.suppress(Exception):
            import_vllm()

    def adopt(self, other: RolloutEngine) -> bool:
        if not isinstance(other, VLLMEngine) or other._loader is None:
            return False
        if other._adapter is not None:  # it has the base weights of another run's policy, which are never sent again
            return False
        self._loader, other._loader = other._loader, None
        self._llm_dtype, self._on_cpu, self._is_seeded = other._llm_dtype, other._on_cpu, other._is_seeded
        self._loader.llm.unfreeze()
        other.close()
        return True

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        if self._loader is None:
            self._loader = self._start(weights)
        llm = self._loader.llm
        llm.wake("weights")
        try:
            manifest = self._loader.load(weights)
        except BaseException as error:
            self.close()  # vLLM may have lost its old weights
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"vLLM did not load the weights: {first_line(error)}") from error
        if not llm.llm.reset_prefix_cache():
            raise WeightSyncError("vLLM's prefix cache is in use, so it would answer from the weights before this sync")
        return manifest

    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        assert self._loader is not None
        try:
            return self._loader.checksums()
        except LookupError as error:
            model_type = self.held_config().model_type
            raise WeightSyncError(f"{error}: lgrpo does not know vLLM's weight layout of {model_type}") from error

    def held_weights(self) -> dict[str, Tensor]:
        if self._loader is None:
            if not self._rescued:
                raise EngineError(f"vLLM failed, and with it the behaviour policy it held: {RESUME_ADVICE}")
            return dict(self._rescued)
        self._loader.llm.wake("weights")
        return self._loader.copies()

    def sample(self, generation: Generation) -> None:
        if self._loader is None:
            raise EngineError(f"vLLM failed, and could not be rebuilt: {RESUME_ADVICE}")
        check_context_length(generation, self._loader.llm.llm.llm_engine.model_config.max_model_len)
        self.budget.reset()
        while (unanswered := generation.unanswered) and not generation.is_enough:
            try:
                requests = Requests(generation, unanswered, self.held_config(), self._is_seeded)
                self._answer(requests, requests.seed)
            except EngineFailure as failure:
                self.budget.count_failure(failure)
            else:
                break
            with self.budget.timed():  # not in the handler: the traceback would keep the failed vLLM's memory
                self._rebuild(generation.step, generation.version)
            self.budget.count_restarts()

    def wake(self) -> None:
        if self._loader is not None:
            self._loader.llm.wake("weights")

    def sleep(self) -> None:
        """Release vLLM's memory; the weights are kept in host memory if they will be needed again."""
        if self._loader is not None and self._sleeps:
            is_needed = not self.state.exhausted or self._adapter is not None  # base weights are sent only once
            self._loader.llm.sleep(keep_weights=is_needed)

    def close(self) -> None:
        self.drop_weights()
        self._rescued = {}
        if self._loader is not None:
            llm, self._loader = self._loader.llm, None  # the loader has views of vLLM's memory
            llm.close()

    # Private

    @property
    def _sleeps(self) -> bool:
        return (not self._on_cpu) if self.sleep_mode is None else self.sleep_mode

    def _start(self, weights: PolicyWeights) -> WeightLoader:
        """Build vLLM, for whole weights or for adapters on top of the base weights."""
        adapter = weights.adapter if self.adapters else None
        if adapter is not None:
            self._adapter, self.state.adapter_rank = adapter, adapter.rank
        precision = self.dtype or self._llm_dtype or weights.compute_dtype
        self._llm_dtype = precision or next(iter(weights) if adapter is None else adapter.base())[1].dtype
        llm = self._build(weights.config, self._llm_dtype, adapter)
        return WholeLoader(llm) if adapter is None else AdapterLoader(llm)

    def _build(self, config: PretrainedConfig, dtype: torch.dtype, adapter: Adapter | None) -> EmbeddedLLM:
        set_environment()
        if has_other_ranks():
            self.options.setdefault("distributed_executor_backend", "external_launcher")
        self._on_cpu = import_vllm().platforms.current_platform.is_cpu()
        if self.batch_invariant:
            check_batch_invariance(self._on_cpu)
        self._is_seeded = (self._on_cpu or self.batch_invariant) if self.seeded is None else self.seeded
        cache = self.kv_cache_gib if self.kv_cache_gib is not None else (0.25 if self._on_cpu else None)
        arguments = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
            "enforce_eager": self._on_cpu if self.enforce_eager is None else self.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": MAX_LOGPROBS,
            "enable_sleep_mode": self._sleeps and not self._on_cpu,
            "disable_log_stats": True,
        }
        if self._on_cpu and self._is_seeded:
            arguments |= WHOLE_PROMPTS
        if adapter is None:
            return EmbeddedLLM(config, dtype, arguments | self.options)
        arguments |= {"load_format": "safetensors", "use_tqdm_on_load": False} | adapter_flags(adapter.rank)
        llm = EmbeddedLLM(config, dtype, arguments | self.options, adapter.base)
        if self.verify:
            layout = engine_layout(llm.manifest.shapes)
            llm.manifest.compare(llm.on_model(lambda model: checksums(model, layout)))
        return llm

    def _answer(self, requests: Requests, seed: int) -> None:
        """Have vLLM answer requests; raise an ``EngineFailure`` if it fails."""
        assert self._loader is not None
        self._loader.llm.wake("weights", "kv_cache")
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else contextlib.nullcontext()
        with isolated(), stance:
            answer_all(self._loader.llm.llm, requests, seed, self.timeouts.generate, self._loader.request, self.on_step)

    def _rebuild(self, step: int, version: int) -> None:
        """Replace a failed vLLM by one with the same weights, read from the failed one and verified."""
        assert self._loader is not None
        if self._loader.llm.shares_process_groups:
            raise EngineError(
                "vLLM failed, and cannot be rebuilt because its process groups are also the trainer's: "
                f"{RESUME_ADVICE}, or use lgrpo.engines.VLLMServerEngine"
            )
        manifest = self._loader.manifest
        try:
            weights = {name: tensor.cpu() for name, tensor in self.held_weights().items()}
            if self.verify:
                manifest.compare(named_checksums(weights.items()))
        except Exception as error:
            with contextlib.suppress(Exception):
                self.close()
            self.state.step, self.state.version = step, version  # so that a checkpoint requires the weights, and fails
            raise EngineError(
                f"vLLM failed, and with it the behaviour policy it held ({first_line(error)}): {RESUME_ADVICE}"
            ) from error
        self.close()
        self._rescued = weights
        try:
            held = PolicyWeights.of(self.held_config(), weights, self._adapter)
            rebuilt = self.replace_weights(held, step, version)
            if self.verify:
                manifest.compare(self.held_checksums(rebuilt))  # with the sync's manifest, not with what was rescued
        except BaseException:
            self.state.step, self.state.version = step, version  # a checkpoint can still contain the rescued weights
            raise
        self._rescued = {}
