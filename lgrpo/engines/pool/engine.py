"""The engine that runs several engines on one device, each in its own process."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Literal, TypeVar, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from lgrpo.checks import check_count
from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation
from lgrpo.engines.manifest import WeightManifest, sync_errors
from lgrpo.engines.pool.worker_process import WorkerProcess
from lgrpo.engines.pool.workers import Workers
from lgrpo.engines.processes import has_other_ranks
from lgrpo.engines.recovery import RESUME_ADVICE, EngineError, EngineFailure, FailureBudget, Faults, Timeouts
from lgrpo.engines.vllm.cache_size import with_cache_size
from lgrpo.engines.vllm.engine import VLLMEngine
from lgrpo.engines.vllm.runtime import check_context_length
from lgrpo.engines.wrapper import WrapperEngine
from lgrpo.weights import PolicyWeights

Result = TypeVar("Result")


@final
class EnginePool(RolloutEngine):
    """Several engines on the trainer's device, each in its own process, which share the prompts.

    vLLM schedules the tokens of all its completions in one Python thread. For models of up to a few billion parameters
    generation is bound by that thread, not by the GPU; with two processes each thread has half the work.

    Processes are started at the first sync. One that exits or hangs is replaced by a new process with the weights that
    the others hold, and its prompts are sampled again. Of a LoRA policy, the merged weights are sent.

    With ``data.overlap`` it samples while the trainer updates. Then its processes do not sleep.
    """

    can_overlap = True

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        num_processes: int = 2,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        max_failures: int = 3,
    ) -> None:
        """
        Args:
            engine: Engine of each process, with its settings; by default VLLMEngine. The processes share the device:
                ``gpu_memory_utilization`` applies to each, and must be at most 1 / num_processes of vLLM's share.
            num_processes: Number of processes.
            timeouts: Time limits; ``start`` includes the first weights of a process.
            max_failures: Failed processes that a generation or a sync replaces; the next one stops the run.
        """
        super().__init__()
        self.engine: RolloutEngine = VLLMEngine() if engine is None else engine
        if self.engine.has_own_device or isinstance(self.engine, EnginePool | WrapperEngine):
            raise ValueError(
                f"a {type(self.engine).__name__} in an EnginePool: only an engine that samples in its own process can "
                "be in several, such as VLLMEngine"
            )
        check_count("num_processes", num_processes, at_least=1)
        self.num_processes = num_processes
        self.dtype = self.engine.dtype
        self.timeouts = timeouts
        self.budget = FailureBudget(max_failures)
        self._workers = Workers(self.engine, num_processes)
        self._manifest = WeightManifest()
        """The weights of the last sync."""
        self._sent_dtype: torch.dtype | None = None
        """Precision in which weights are sent; None: the policy's."""
        self._is_asleep = True
        """Whether the processes must take memory, which the trainer has cached, before they sample."""
        self._is_closed = False
        self._generation_number = 0
        self._reading = threading.Lock()
        """Held while the weights are read from a worker: by the trainer for a checkpoint, or to restart a worker."""

    @property
    def faults(self) -> Faults:
        return self.budget.faults

    @property
    def can_continue(self) -> bool:  # type: ignore[override]
        """Whether the engine of its processes can."""
        return self.engine.can_continue

    @property
    def returns_kept(self) -> Literal["no", "with top_k", "yes"]:  # type: ignore[override]
        """Whether the engine of its processes does."""
        return self.engine.returns_kept

    def check_installed(self) -> None:
        self.engine.check_installed()

    def adopt(self, other: RolloutEngine) -> bool:
        if not isinstance(other, EnginePool) or not other._workers.is_complete:
            return False
        self._workers, other._workers = other._workers, self._workers
        self._sent_dtype = other._sent_dtype
        other.close()
        atexit.register(self.close)
        return True

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        self.budget.reset()
        self._is_closed = False
        self._take_memory()
        if not self._workers.running:
            atexit.register(self.close)  # however the run ends, it leaves no processes and no files
        try:
            with sync_errors():
                while not self._send_to_all(weights, step, version):
                    if has_other_ranks():  # they would not send again
                        raise EngineError(
                            f"every process of the pool failed in a sync of several ranks: {RESUME_ADVICE}"
                        )
                    self.budget.count_restarts(self.num_processes)
                self._with_all_workers(lambda: None, step, version)
        except BaseException:
            self.close()  # some workers may hold only a part of the weights
            raise
        return self._manifest

    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        reports = self._with_all_workers(self._checksums, *self.require_weights())
        for report in reports[1:]:
            manifest.compare(report)
        return reports[0]

    def held_weights(self) -> dict[str, Tensor]:
        self._take_memory()
        reason = ""
        with self._reading:
            for worker in list(self._workers.running):
                path = worker.folder / "held.safetensors"
                try:
                    # an engine that does not call on_step answers when its generation ends
                    worker.call_urgently("write_weights", path, timeout=self.timeouts.generate)
                    return load_file(path)
                except EngineFailure as failure:
                    reason = f" ({failure})"
                finally:
                    path.unlink(missing_ok=True)
        raise EngineError(f"no process with the behaviour policy is left{reason}: {RESUME_ADVICE}")

    def sample(self, generation: Generation) -> None:
        if self.engine.max_model_len is not None:
            check_context_length(generation, self.engine.max_model_len)
        self.budget.reset()
        self._take_memory()
        self._is_asleep = False
        self._with_all_workers(lambda: self._answer(generation), generation.step, generation.version)

    def stop(self) -> None:
        super().stop()
        for worker in list(self._workers.running):
            worker.stop_generation(self._generation_number)

    def wake(self) -> None:
        self._take_memory()
        self._workers.call_all("wake", send_timeout=self.timeouts.generate, answer_timeout=self.timeouts.sync)

    def sleep(self) -> None:
        self._is_asleep = True
        request = "sleep", self.state.exhausted
        self._workers.call_all(*request, send_timeout=self.timeouts.generate, answer_timeout=self.timeouts.sync)

    def close(self) -> None:
        self._is_closed = self._is_asleep = True
        self.drop_weights()
        self._workers.close()
        atexit.unregister(self.close)

    # Weights

    def _send_to_all(self, weights: PolicyWeights, step: int, version: int) -> bool:
        """Send weights to all workers, which are started if there are none; return whether one has received them."""
        workers, is_first = self._workers, not self._workers.running
        if is_first:
            self._sent_dtype = self.engine.dtype or (weights.compute_dtype if self.engine.follows_precision else None)
            if isinstance(self.engine, VLLMEngine) and torch.cuda.is_available():
                total = torch.cuda.mem_get_info()[1]
                workers.engine = with_cache_size(self.engine, weights, self._sent_dtype, total)
            for _ in range(self.num_processes):
                workers.running.append(workers.start())
        rounds, timeout = [list(workers.running)], self.timeouts.start if is_first else self.timeouts.sync
        if is_first and torch.cuda.is_available() and workers.engine.kv_cache_gib is None:
            rounds = [[worker] for worker in workers.running]  # vLLM measures the free memory while it starts
        failures: list[EngineFailure] = []
        for some in rounds:
            self._manifest = WeightManifest(dtype=self._sent_dtype)
            failures += workers.send_weights(some, weights, self._manifest, step, version, timeout)
        for failure in failures:  # after all rounds, in which other ranks take part
            self.budget.count_failure(failure)
        return bool(workers.running)

    def _checksums(self) -> list[dict[str, int]]:
        for worker in self._workers.running:
            worker.request("checksums", timeout=self.timeouts.sync)
        return [worker.answer(self.timeouts.sync) for worker in self._workers.running]

    # Completions

    def _answer(self, generation: Generation) -> None:
        """Deal prompts to the workers, and keep the groups as they arrive; finally raise if a worker failed."""
        workers, unanswered = self._workers.running, [] if generation.is_enough else generation.unanswered
        failure: EngineFailure | None = None
        self._generation_number += 1
        busy: dict[Connection, WorkerProcess] = {}
        for number, worker in enumerate(workers[: len(unanswered)]):
            indices = unanswered[number :: len(workers)]
            prompts = [replace(generation.prompts[index], row={}) for index in indices]  # rows may not be picklable
            settings = generation.num_samples, generation.sampling, generation.seed, generation.version
            begun = [generation.begun_of(index) for index in indices] if generation.is_partial else None
            try:
                worker.set_tokenizer(generation.tokenizer, self.timeouts.sync)
                request = prompts, indices, *settings, begun, self._generation_number
                worker.request("generate", *request, timeout=self.timeouts.generate)
                busy[worker.connection] = worker
            except EngineFailure as error:
                failure = error
        deadline = time.monotonic() + self.timeouts.generate  # a worker that read its request late does not shorten it
        try:
            while busy:
                ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
                if not ready:
                    for worker in busy.values():
                        worker.kill()
                    limit = f"{self.timeouts.generate:g} s"
                    raise EngineFailure(f"{len(busy)} processes of the pool were not done after {limit}")
                for connection in ready:
                    worker = busy[connection]  # type: ignore[index]
                    try:
                        kind, content = worker.receive(self.timeouts.generate)
                    except EngineFailure as error:
                        failure = error
                        del busy[worker.connection]
                        continue
                    if kind == "group":
                        generation.keep(*content)
                        if generation.is_enough:
                            for other in busy.values():
                                other.stop_generation(self._generation_number)
                    elif kind == "unfinished":
                        generation.leave(*content)
                    elif kind == "answer":
                        self.budget.add(content)
                        del busy[worker.connection]
        except BaseException:
            for worker in busy.values():
                worker.interrupt()  # so that the next request, such as for a checkpoint, does not wait
            raise
        if failure is not None:
            raise failure

    # Recovery

    def _with_all_workers(self, action: Callable[[], Result], step: int, version: int) -> Result:
        """Call a function when all workers run; if one fails, replace it and call again."""
        while True:
            try:
                if not self._workers.is_complete:
                    self._restart_missing(step, version)
                return action()
            except EngineFailure as failure:
                self._check_open()
                self.budget.count_failure(failure)
                self._workers.remove_dead()
            except Exception:
                self._check_open()
                raise

    def _check_open(self) -> None:
        """Raise if another thread has closed the engine, so that no process is started after that."""
        if self._is_closed:
            raise EngineError("the engine was closed during a generation")

    def _restart_missing(self, step: int, version: int) -> None:
        """Replace the workers that are gone by new ones with the weights that the others hold."""
        with self.budget.timed():
            free_cached_memory()
            weights = PolicyWeights.of(self.held_config(), self.held_weights())
            while not self._workers.is_complete:
                worker, manifest = self._workers.start(), WeightManifest(dtype=self._sent_dtype)
                try:
                    for failure in self._workers.send_weights(
                        [worker], weights, manifest, step, version, self.timeouts.start
                    ):
                        raise failure
                    self._manifest.compare(worker.call("checksums", timeout=self.timeouts.sync))
                    self._check_open()
                except BaseException:
                    self._workers.end(worker)
                    raise
                self._workers.running.append(worker)
                self.budget.count_restarts()

    def _take_memory(self) -> None:
        """Release the GPU memory that the trainer caches for its next update, if the engines need it now."""
        if self._is_asleep:
            free_cached_memory()


def free_cached_memory() -> None:
    """Release the GPU memory that this process caches."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
