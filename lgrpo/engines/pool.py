"""Several engines of one kind beside the trainer, each in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file
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
from lgrpo.engines.children import visible_devices
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.engines.pool_member import bare
from lgrpo.engines.pool_parcels import Trays
from lgrpo.engines.pool_process import MemberProcess, hand_over
from lgrpo.engines.vllm import VLLMEngine
from lgrpo.engines.vllm_process import check_lengths
from lgrpo.types import Completion, PolicyWeights, Prompt

OF_THE_TRAINER = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
)
"""How variables begin that tell a process which of the trainer's ranks it is."""
_ROOM = 4 * 2**30


@final
class EnginePool(RolloutEngine):
    """Several engines on the trainer's device, each in a process of its own, which share the prompts out among them.

    vLLM schedules the tokens of all its completions in one thread of Python. For a model of up to a few billion
    parameters that thread, not the GPU, is what generation waits for; two of them have half as much to do each.

    A process that ends or hangs is started again with the weights the others hold, and its prompts are asked again. Of
    a policy with LoRA, the merged weights travel.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        num_processes: int = 2,
        start_timeout: float = 600.0,
        sync_timeout: float = 300.0,
        timeout: float = 1800.0,
        max_failures: int = 3,
    ) -> None:
        """
        Args:
            engine: What each process runs, with its settings; by default VLLMEngine. They share the device: of vLLM, at
                most 1 / num_processes of the memory there is for it can be each one's ``gpu_memory_utilization``.
            num_processes: How many.
            start_timeout: Seconds until a process must hold its first weights.
            sync_timeout: Seconds each step of a later sync may take.
            timeout: Seconds a generation may take, from the last failure on.
            max_failures: Processes that fail in a generation, or a sync, and are started again; one more stops the run.
        """
        super().__init__()
        self.engine: RolloutEngine = VLLMEngine() if engine is None else engine
        if self.engine.replays or self.engine.can_overlap or isinstance(self.engine, EnginePool):
            raise ValueError(
                f"a {type(self.engine).__name__} in an EnginePool: only an engine that samples in its own process can "
                "be in several, such as VLLMEngine"
            )
        if getattr(self.engine, "tensor_parallel_size", 1) > 1:
            raise ValueError("an engine with tensor_parallel_size above 1 in an EnginePool: each has one GPU, the same")
        if num_processes < 1:
            raise ValueError(f"num_processes is {num_processes}; at least 1 is needed")
        if max_failures < 0:
            raise ValueError(f"max_failures is {max_failures}; 0 stops at the first failure")
        self.num_processes = num_processes
        self.start_timeout = start_timeout
        self.sync_timeout = sync_timeout
        self.timeout = timeout
        self.max_failures = max_failures
        self._members: list[MemberProcess] = []
        self._trays = Trays()
        self._folder: Path | None = None
        self._config: PretrainedConfig | None = None
        self._sent = Sent()
        self._dtype: torch.dtype | None = None
        """What weights are sent in; None: as they come."""
        self._num_failures = 0

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        self._num_failures = 0
        make_room()
        try:
            sent, failures = self._hand_over_to_all(weights, version)
            for failure in failures:
                self._count(failure)
            self._config, self._sent = weights.config, sent
            if failures and not self._members:
                sent = self._sent = self._begin_again(weights, version)
            elif failures:
                self._mend_at_last(version)
        except BaseException as error:
            self.close()  # half of the weights may have gone: nothing may be sampled from them
            if isinstance(error, WeightSyncError) or not isinstance(error, EngineError):
                raise
            raise WeightSyncError(f"the sync failed: {error}") from error
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        version = 0 if self.version is None else self.version
        while True:
            try:
                for member in self._members:
                    member.ask("checksums", timeout=self.sync_timeout)
                reports = [member.answer(self.sync_timeout) for member in self._members]
                break
            except EngineFailure as failure:
                self._count(failure)
                self._mend_at_last(version)
        for report in reports[1:]:
            sent.compare(report)
        return reports[0]

    def held_weights(self) -> dict[str, Tensor]:
        if self._config is None:
            raise NoWeightsError
        make_room()
        why = ""
        for member in self._members:
            path = member.folder / "held.safetensors"
            try:
                member.call("write_weights", path, timeout=self.sync_timeout)
                return load_file(path)
            except EngineFailure as failure:
                why = f" ({failure})"
            finally:
                path.unlink(missing_ok=True)
        raise EngineError(f"no process that holds the behaviour policy is left{why}: {GO_ON}")

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
        held = self.holds()
        if longest := getattr(self.engine, "max_model_len", None):
            check_lengths(prompts, sampling, longest)
        groups: dict[int, list[Completion]] = {}
        self._num_failures = 0
        make_room()

        def keep(place: int, group: list[Completion]) -> None:
            groups[place] = group
            if on_group is not None:
                on_group(place, group)

        while left := [place for place in range(len(prompts)) if place not in groups]:
            try:
                if len(self._members) < self.num_processes:
                    self._mend(held[1])
                asked = [(place, prompts[place]) for place in left]
                self._share_out(asked, keep, tokenizer, num_samples, sampling, seed)
            except EngineFailure as failure:
                self._count(failure)
                self._drop_dead()
        return [groups[place] for place in range(len(prompts))]

    def wake(self) -> None:
        make_room()
        self._tell_all("wake")

    def rest(self) -> None:
        self._tell_all("rest", self.spent)

    def _tell_all(self, *order: Any) -> None:
        """An order to every member at once. Who fails now is missed, and replaced, when next it is needed."""
        asked = []
        for member in self._members:
            with contextlib.suppress(EngineFailure):
                member.ask(*order, timeout=self.timeout)
                asked.append(member)
        for member in asked:
            with contextlib.suppress(EngineFailure):
                member.answer(self.sync_timeout)

    def close(self) -> None:
        self.forget()
        self._config = None
        self._close_members()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.close)

    def _close_members(self) -> None:
        members, self._members = self._members, []
        for member in members:
            self._end(member)
        self._trays.clear()

    def _end(self, member: MemberProcess) -> None:
        if not member.close():
            self._trays.lose()

    # Weights

    def _hand_over_to_all(self, weights: PolicyWeights, version: int) -> tuple[Sent, list[EngineFailure]]:
        if self._members:
            return self._hand_over(self._members, weights, version, self.sync_timeout)
        followed = weights.computed_in if self.engine.follows_precision else None
        self._dtype = getattr(self.engine, "dtype", None) or followed
        for _ in range(self.num_processes):
            self._members.append(self._start())
        if not torch.cuda.is_available() or getattr(self.engine, "kv_cache_gib", None) is not None:
            return self._hand_over(self._members, weights, version, self.start_timeout)
        failures: list[EngineFailure] = []
        for member in list(self._members):  # vLLM looks how much memory is free, and no other may take some meanwhile
            sent, failed = self._hand_over([member], weights, version, self.start_timeout)
            failures += failed
        return sent, failures

    def _hand_over(
        self, members: Sequence[MemberProcess], weights: PolicyWeights, version: int, timeout: float
    ) -> tuple[Sent, list[EngineFailure]]:
        """The same weights for several members. Who fails is dropped."""
        assert self._folder is not None
        sent = Sent(dtype=self._dtype)
        failures = hand_over(members, weights, sent, version, self._trays, self._folder, timeout)
        for member in failures:
            self._end(member)
            if member in self._members:
                self._members.remove(member)
        return sent, list(failures.values())

    def _begin_again(self, weights: PolicyWeights, version: int) -> Sent:
        """All members failed in a sync: others, where that concerns no other rank."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise EngineError(f"every process of the pool failed in a sync of several ranks: {GO_ON}")
        while True:
            self.faults["restarts"] += self.num_processes
            sent, failures = self._hand_over_to_all(weights, version)
            if not failures:
                return sent
            for failure in failures:
                self._count(failure)
            self._close_members()

    def _start(self) -> MemberProcess:
        if self._folder is None:
            has_room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > _ROOM
            self._folder = Path(tempfile.mkdtemp(prefix="lgrpo-pool-", dir="/dev/shm" if has_room else None))
            atexit.register(self.close)  # whatever ends the run ends its processes, and leaves no files
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_TRAINER)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if not torch.cuda.is_available():
            environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // self.num_processes))
        else:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices()[torch.cuda.current_device()]
        return MemberProcess(self.engine, Path(tempfile.mkdtemp(dir=self._folder)), environment)

    # Completions

    def _share_out(
        self,
        asked: list[tuple[int, Prompt]],
        keep: Callable[[int, list[Completion]], None],
        tokenizer: PreTrainedTokenizerBase,
        num_samples: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """All prompts to all members, and their answers as they come. At the end, an error if a member failed."""
        if not self._members:
            raise EngineError(f"no process that holds the behaviour policy is left: {GO_ON}")
        failure: EngineFailure | None = None
        busy: dict[Connection, MemberProcess] = {}
        for number, member in enumerate(self._members):
            if not (share := asked[number :: len(self._members)]):
                continue
            places, own = [place for place, _ in share], [bare(prompt) for _, prompt in share]
            try:
                member.learn(tokenizer, self.sync_timeout)
                member.ask("generate", own, places, num_samples, sampling, seed, self.holds(), timeout=self.timeout)
                busy[member.connection] = member
            except EngineFailure as error:
                failure = error
        deadline = time.monotonic() + self.timeout  # from now on: who did not read its order took its time alone
        try:
            while busy:
                ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
                if not ready:
                    for member in busy.values():
                        member.kill()
                    raise EngineFailure(f"{len(busy)} processes of the pool were not done after {self.timeout:g} s")
                for connection in ready:
                    member = busy[connection]  # type: ignore[index]
                    try:
                        word, what = member.hear(self.timeout)
                    except EngineFailure as error:
                        failure = error
                        del busy[member.connection]
                        continue
                    if word == "group":
                        keep(*what)
                    elif word == "answer":
                        self.recovery_seconds += what.pop("seconds")
                        self.faults.update(what)
                        del busy[member.connection]
        except BaseException:
            for member in busy.values():
                member.interrupt()  # else whoever asks it next, for a checkpoint say, would wait for all of this
            raise
        if failure is not None:
            raise failure

    # When a process fails

    def _count(self, failure: EngineFailure) -> None:
        """Notes a failure. An error where it is one too many."""
        self.faults["failures"] += 1
        self._num_failures += 1
        bear(failure, self._num_failures, self.max_failures)

    def _drop_dead(self) -> None:
        for member in [member for member in self._members if not member.is_alive]:
            self._end(member)
            self._members.remove(member)

    def _mend_at_last(self, version: int) -> None:
        """``_mend``, again where a process fails that was to take another's place."""
        while True:
            try:
                return self._mend(version)
            except EngineFailure as failure:
                self._count(failure)

    def _mend(self, version: int) -> None:
        """Processes in the place of those that are gone, with the weights the others hold."""
        start = time.perf_counter()
        self._drop_dead()
        if len(self._members) == self.num_processes:
            return
        held = self.held_weights()
        weights = PolicyWeights(config=self.held_config(), tensors=lambda: iter(held.items()))
        while len(self._members) < self.num_processes:
            member = self._start()
            try:
                _, failures = self._hand_over([member], weights, version, self.start_timeout)
                for failure in failures:
                    raise failure
                self._sent.compare(member.call("checksums", timeout=self.sync_timeout))
            except BaseException:
                self._end(member)
                raise
            self._members.append(member)
            self.faults["restarts"] += 1
        self.recovery_seconds += time.perf_counter() - start


def make_room() -> None:
    """What the trainer keeps of the GPU's memory for its next update, the engines need now."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
