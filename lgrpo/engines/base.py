"""The interface of engines: where completions come from, and which weights they are sampled from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.completions import Generation, OnGroup, Sampling
from lgrpo.engines.manifest import SyncRecord, WeightManifest
from lgrpo.engines.recovery import EngineError, Faults, NoWeightsError
from lgrpo.environments import Environment
from lgrpo.run.resume import ResumeSettings
from lgrpo.types import Completion, Prompt
from lgrpo.weights import PolicyWeights

BORROWED = -1
"""Version of weights that an engine holds only inside ``holding``."""


@dataclass(kw_only=True, slots=True)
class EngineState:
    """Which weights an engine holds, and every sync so far. Only the engine writes it; others read it."""

    step: int | None = None
    """Optimizer step of the weights; None if the engine holds none."""
    version: int | None = None
    """Number of the sync that brought them; ``BORROWED`` inside ``holding``; None if the engine holds none."""
    num_rollouts: int | None = None
    """Rollouts sampled from these weights in the whole cycle; None if that is not known beforehand."""
    exhausted: bool = False
    """Whether every rollout of the cycle is sampled, so that the weights are no longer needed."""
    config: PretrainedConfig | None = None
    """Architecture of the model; None before the first sync."""
    adapter_rank: int | None = None
    """Rank of the adapters, if the engine was given only these; None if it holds whole weights."""
    ledger: list[SyncRecord] = field(default_factory=list)
    """One record per sync, in order."""


class RolloutEngine(ABC):
    """Samples completions from the weights it was last given.

    Life cycle: ``check_installed``, and ``prepare`` before a fit. Then, for each sync cycle, ``load_weights``; for each
    rollout ``generate``, then ``sleep``, with ``finish_cycle`` before the last ``sleep``. ``close`` ends it. Before the
    first ``load_weights`` and after ``finish_cycle`` or ``close`` it has no weights to sample from, and ``generate``
    raises.

    An engine may ``adopt`` the processes of another before its first ``load_weights``.

    Each completion draws from a random stream keyed by (seed, position of its prompt in the run, index among its
    siblings), so neither batch, rollout nor rank changes what is sampled.
    """

    can_overlap = False
    """Whether ``generate`` may run in another thread while the trainer updates (``data.overlap``)."""
    can_continue = False
    """Whether ``generate_part`` can leave completions unfinished and continue them from their tokens later."""
    returns_kept: Literal["no", "with top_k", "yes"] = "no"
    """Whether completions come with the tokens that could have been drawn if ``sampling.returns_kept``."""
    has_own_device = False
    """Whether it samples on devices that the trainer does not use, so that overlap costs no memory."""
    replays = False
    """Whether some of its completions are recorded: sampled by no policy of this run."""
    follows_precision = False
    """Whether it holds weights in the trainer's compute precision if ``dtype`` is None."""
    verify = True
    """Whether ``load_weights`` compares the engine's checksums with the policy's."""
    dtype: torch.dtype | None = None
    """Precision of its weights; None: the policy's, or the trainer's if ``follows_precision``."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion together; None: the model's limit."""
    max_contexts: int = 1
    """Largest number of contexts of a completion, which training reads one after another. Valid after ``prepare``."""
    kv_cache_gib: float | None = None
    """Size of the key-value cache in GiB; None: derived from the free memory."""

    def __init__(self) -> None:
        self.on_step: Callable[[], None] | None = None
        """Function to call between decoding steps, for what cannot wait until the end of a generation."""
        self._generation: Generation | None = None  # the current partial one
        self._state = EngineState()
        self._suspended: dict[str, Any] | None = None
        """State dict of the weights that ``holding`` has replaced, until they are restored."""

    @property
    def state(self) -> EngineState:
        """The weights it holds, and the syncs so far."""
        return self._state

    @property
    def faults(self) -> Faults:
        """Failures it recovered from."""
        return Faults()

    @property
    def num_without_logprobs(self) -> int:
        """Number of its completions without known log-probabilities. Valid after ``prepare``."""
        return 0

    def check_installed(self) -> None:  # noqa: B027
        """Raise an ``EngineError`` if a package it needs is not installed. Called before anything is loaded."""

    def import_packages(self) -> None:  # noqa: B027
        """Import what takes long, in a process that has nothing else to do yet. Errors come with the first use."""

    def prepare(  # noqa: B027
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        """Check before a fit that the engine can do what the run will ask for.

        Args:
            tokenizer: Tokenizer of the policy.
            prompts: Prompts of the run, at most one pass over all, as far as they are known beforehand.
            group_size: Completions of each prompt.
            sampling: How completions are drawn.
        """

    def set_environment(self, environment: Environment) -> bool:
        """Let the environment of a task answer each turn; return False if the engine samples single turns."""
        return False

    @property
    def has_turns(self) -> bool:
        """Whether its completions are episodes of several turns."""
        return False

    @property
    def environment_seconds(self) -> float:
        """Total time in which it sampled nothing, because all live episodes waited for their environments."""
        return 0.0

    def resume_settings(self) -> ResumeSettings:
        """Return settings that a resumed run should share with its checkpoint."""
        return {}

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools that prompts offer; none by default."""
        return []

    def adopt(self, other: RolloutEngine) -> bool:
        """Take the processes and memory of an idle engine, so that nothing has to be started; return whether it can.

        Called before the first ``load_weights`` with an engine of equal settings, which served a policy of the same
        architecture. Weights, ledger and faults are not taken. Afterwards ``other`` has nothing left to close. If the
        result is False, nothing has changed.
        """
        return False

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        """Replace the weights, and verify that the engine's own checksums equal the policy's.

        If that fails, the engine holds no weights.

        Args:
            weights: Weights of the policy.
            step: Optimizer step of the policy.
            num_rollouts: Rollouts that will be sampled until the next sync, if known.
        """
        state = self.state
        version = state.ledger[-1].version + 1 if state.ledger else 0
        self.wake()
        start = time.perf_counter()
        try:
            manifest = self.replace_weights(weights, step, version)
            checksum = manifest.compare(self.held_checksums(manifest) if self.verify else manifest.checksums)
        except BaseException:
            self.drop_weights()  # so that no checkpoint written now contains unverified weights
            raise
        self.state.num_rollouts, self._suspended = num_rollouts, None
        seconds, num_bytes = time.perf_counter() - start, manifest.num_bytes
        record = SyncRecord(version=version, step=step, checksum=checksum, num_bytes=num_bytes, seconds=seconds)
        self.state.ledger.append(record)
        return record

    @contextmanager
    def holding(self, weights: PolicyWeights, step: int) -> Iterator[None]:
        """Hold other weights inside the context, and restore the previous ones afterwards. Not in the ledger."""
        outer, self._suspended = self._suspended, None
        before = self.state_dict()
        self._suspended = outer or before
        try:
            self.replace_weights(weights, step, BORROWED)
            yield
        finally:
            self.load_state_dict(before, weights)
            self._suspended = outer

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` and, if they are still needed, the weights, in plain containers.

        Inside ``holding``, this is the state that will be restored.
        """
        if self._suspended is not None:
            return self._suspended
        state = self.state
        needed = state.step is not None and not state.exhausted
        return {
            "step": state.step,
            "version": state.version,
            "num_rollouts": state.num_rollouts,
            "exhausted": state.exhausted,
            "ledger": [record.as_dict() for record in state.ledger],
            "config": self.held_config().to_dict() if needed else None,
            "weights": self.held_weights() if needed else None,
            "adapter_rank": state.adapter_rank if needed else None,
        }

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        """Restore a state, so that the engine samples as it would have.

        Args:
            state: Return value of ``state_dict``.
            policy: Weights of the policy, which has the base weights if ``state`` holds only adapters.
        """
        self.state.ledger = [SyncRecord(**record) for record in state["ledger"]]
        self.state.num_rollouts = state["num_rollouts"]
        self.drop_weights()
        if state["weights"] is None:
            own = self.state
            own.step, own.version, own.exhausted = state["step"], state["version"], state["exhausted"]
            self._suspended = None
            return
        adapter = None
        if (rank := state.get("adapter_rank")) is not None:
            if policy is None or policy.adapter is None:
                raise EngineError("the engine's state holds adapters, and the policy has none: set policy.lora")
            adapter = replace(policy.adapter, rank=rank)
        weights = PolicyWeights.of(AutoConfig.for_model(**state["config"]), state["weights"], adapter)
        if policy is not None:
            weights.compute_dtype = policy.compute_dtype
        self.replace_weights(weights, state["step"], state["version"])
        self._suspended = None

    def replace_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        """Replace the weights without verifying them. Meanwhile, and if it fails, the engine holds none."""
        self.drop_weights()
        self.state.config = weights.config
        manifest = self.receive_weights(weights, step, version)
        manifest.check_finite()
        self.state.step, self.state.version = step, version
        return manifest

    def drop_weights(self) -> None:
        """Forget which weights the engine holds: ``generate`` raises until the next ``load_weights``."""
        self.state.step, self.state.version, self.state.exhausted = None, None, False

    def held_config(self) -> PretrainedConfig:
        """Return the architecture of the model it holds."""
        if self.state.config is None:
            raise NoWeightsError
        return self.state.config

    def finish_cycle(self) -> None:
        """Declare that every rollout of the cycle is sampled, so that the weights are no longer needed."""
        self.state.exhausted = True

    @contextmanager
    def kept(self, needed: bool) -> Iterator[None]:
        """Include the weights in a state dict inside the context, if ``needed`` although the cycle is exhausted."""
        exhausted = self.state.exhausted
        self.state.exhausted = exhausted and not needed
        try:
            yield
        finally:
            self.state.exhausted = exhausted

    def require_weights(self) -> tuple[int, int]:
        """Return step and version of the weights, or raise if there are none to sample from."""
        if self.state.exhausted:
            raise EngineError("every rollout of this cycle is sampled: the engine waits for the next sync")
        if self.state.step is None or self.state.version is None:
            raise NoWeightsError
        return self.state.step, self.state.version

    def wake(self) -> None:  # noqa: B027
        """Take memory for the weights before a sync. Not part of the sync's time."""

    def sleep(self) -> None:  # noqa: B027
        """Release as much memory as possible until the next call, because the trainer is about to update."""

    @abstractmethod
    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        """Copy the tensors in, one at a time, through ``WeightManifest.stream``."""

    @abstractmethod
    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        """Return checksums of the engine's own weights, under the policy's names."""

    @abstractmethod
    def held_weights(self) -> dict[str, Tensor]:
        """Return a copy of the engine's own weights, under the policy's names."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Return ``num_samples`` completions of each prompt, in the order of the prompts.

        ``on_group`` is called once for each prompt as soon as all its completions are sampled, from any thread and in
        any order, so that they can be scored while others are still being sampled.
        """
        generation = Generation(prompts, num_samples, sampling, seed, tokenizer, on_group, *self.require_weights())
        self.sample(generation)
        return [generation.groups[index] for index in range(len(prompts))]

    def generate_part(self, generation: Generation) -> None:
        """Sample until enough groups of a partial generation are whole; the others are then in its ``unfinished``.

        Tokens of a completion that was begun before are kept, with the weights they were sampled from.
        """
        if not self.can_continue:
            raise EngineError(f"{type(self).__name__} cannot continue completions from their tokens")
        self._generation = generation
        try:
            self.sample(generation)
        finally:
            self._generation = None
        for index in generation.unanswered:
            generation.leave(index)

    def stop(self) -> None:
        """End the current partial generation soon, from any thread; what is not whole is unfinished."""
        if (generation := self._generation) is not None:
            generation.is_stopped = True

    @abstractmethod
    def sample(self, generation: Generation) -> None:
        """Pass the completions of every prompt to ``generation.keep``, as soon as all of that prompt are sampled.

        ``generation.max_tokens_of`` limits the length of a prompt's completions. An engine that ``can_continue`` begins
        with ``generation.begun_of``, ends when ``generation.is_enough``, and passes what is unfinished then to
        ``generation.leave``.
        """

    def end_episodes(self) -> None:  # noqa: B027
        """End the episodes of an environment that are live, and its processes, because a fit has ended."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and processes. The engine can be given weights again afterwards."""
