"""What an engine is: the place completions come from, holding the behaviour policy."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.ledger import Sent, SyncRecord
from lgrpo.types import Adapter, Completion, PolicyWeights, Prompt

_T = TypeVar("_T")

OnGroup: TypeAlias = Callable[[int, list[Completion]], None]
"""Told of a prompt, by its place among those that were asked for, and of all its completions."""

BORROWED = -1
"""Version of weights an engine holds for the time being only."""

GO_ON = "go on from the last checkpoint (lgrpo fit … --ckpt_path last)"


@dataclass(kw_only=True, frozen=True)
class Sampling:
    """How completions are drawn."""

    temperature: float = 1.0
    """Of the softmax, above 0. Every log-probability of the run is taken at it."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0: from all. For validation: a truncated draw has no honest ratio."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this mass; 1: from all. For validation, like top_k."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0: none. For validation, like top_k."""
    max_tokens: int = 256
    """Longest completion."""
    stop: list[str] | None = None
    """Strings that end a completion. Their tokens are trained on; the text that is scored ends before them."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"sampling.temperature is {self.temperature}; it must be above 0")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k is {self.top_k}; 0 turns it off, 1 and more count tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p is {self.top_p}; it is a mass above 0, at most 1")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"sampling.min_p is {self.min_p}; it is a share from 0 up to, not including, 1")
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens is {self.max_tokens}; a completion has at least 1 token")
        if any(not s for s in self.stop or []):
            raise ValueError("sampling.stop has an empty string, which would end every completion at once")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class NoWeightsError(RuntimeError):
    """An engine was asked for completions before it was given a policy."""

    def __init__(self) -> None:
        super().__init__(
            "the engine holds no weights, so there is no behaviour policy to sample from: give the Trainer a "
            "WeightSync callback (lgrpo.WeightSync(period=v)), which hands it the policy before the first rollout"
        )


class EngineError(RuntimeError):
    """An engine could not start or answer."""


class EngineFailure(EngineError):
    """An engine that ran has failed by no fault of what it was asked: started again it may answer."""


def each(those: Iterable[_T], failures: dict[_T, EngineFailure], action: Callable[[_T], Any]) -> None:
    """Does something with every one that has not failed yet, and notes who fails."""
    for one in those:
        if one not in failures:
            try:
                action(one)
            except EngineFailure as failure:
                failures[one] = failure


def bear(failure: EngineFailure, number: int, max_failures: int) -> None:
    """A warning of a failure that is recovered from. Where it is one too many: an error, with what to do."""
    if number <= max_failures:
        warnings.warn(f"recovering from failure {number} of at most {max_failures}: {failure}", stacklevel=3)
        return
    advice = "When what ails it is mended,"
    if "memory" in str(failure).lower():
        advice = "It ran out of memory: lower max_num_seqs, or kv_cache_gib and gpu_memory_utilization, then"
    times = "once" if number == 1 else f"{number} times"
    raise EngineError(
        f"vLLM failed {times} in one go (max_failures is {max_failures}). At last: {failure}\n{advice} {GO_ON}"
    ) from failure


class RolloutEngine(ABC):
    """Samples completions from the weights it was last given.

    It holds none until the first ``load_weights``. Each completion draws from a random stream keyed by (seed, position
    of its prompt in the run, index among its siblings), so neither batch, rollout nor rank decides what is sampled.
    """

    can_overlap = False
    """Whether ``generate`` may run in another thread while the trainer updates."""
    replays = False
    """Whether some of its completions are recorded: sampled by no policy of this run."""
    follows_precision = False
    """Whether, without a ``dtype`` of its own, it holds weights in what the trainer computes in."""

    def __init__(self) -> None:
        self.ledger: list[SyncRecord] = []
        self.step: int | None = None
        """Optimizer step of the weights it holds; None where it holds none."""
        self.version: int | None = None
        """Which sync brought them; ``BORROWED`` inside ``holding``."""
        self.num_rollouts: int | None = None
        """How many rollouts will be sampled from them in all; None where that is not known beforehand."""
        self.adapter_rank: int | None = None
        """Rank of the adapters it holds, where it was given these alone; None where it holds whole weights."""
        self.spent = False
        """Whether all of these are sampled, so that the weights are not needed any more."""
        self._owed: dict[str, Any] | None = None
        """Its state from before it was lent other weights, until it holds that again."""
        self.faults: Counter[str] = Counter()
        """What has happened to it so far: ``failures``, and ``restarts`` that mended them."""
        self.recovery_seconds = 0.0
        """How long it took to recover, all in all."""

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        """Takes over a policy's weights, and proves it: the engine's own checksums must equal the policy's.

        Args:
            weights: Of the policy.
            step: Its optimizer step.
            num_rollouts: How many rollouts will be sampled before the next time, where that is known.
        """
        version = self.ledger[-1].version + 1 if self.ledger else 0
        self.wake()
        start = time.perf_counter()
        try:
            sent = self._replace(weights, step, version)
            checksum = sent.compare(self.held_checksums(sent))
        except BaseException:
            self.forget()  # what is not proved is not held, in a checkpoint written now neither
            raise
        self.num_rollouts, self._owed = num_rollouts, None
        record = SyncRecord(
            version=version,
            step=step,
            checksum=checksum,
            num_bytes=sent.num_bytes,
            seconds=time.perf_counter() - start,
        )
        self.ledger.append(record)
        return record

    @contextmanager
    def holding(self, weights: PolicyWeights, step: int) -> Iterator[None]:
        """Other weights for the time being; afterwards exactly those from before. The ledger does not see it."""
        outer, self._owed = self._owed, None
        before = self.state_dict()
        self._owed = outer or before
        try:
            self._replace(weights, step, BORROWED)
            yield
        finally:
            self.load_state_dict(before, weights)
            self._owed = outer

    def state_dict(self) -> dict[str, Any]:
        """The weights it holds, if they are still needed, their step and version, and the ledger: plain containers.

        While it holds others for the time being, those it will hold again.
        """
        if self._owed is not None:
            return self._owed
        needed = self.step is not None and not self.spent
        return {
            "step": self.step,
            "version": self.version,
            "num_rollouts": self.num_rollouts,
            "spent": self.spent,
            "ledger": [record.as_dict() for record in self.ledger],
            "config": self.held_config().to_dict() if needed else None,
            "weights": self.held_weights() if needed else None,
            "adapter_rank": self.adapter_rank if needed else None,
        }

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        """The inverse: afterwards it samples as it would have.

        Args:
            state: What ``state_dict`` gave.
            policy: Where the state holds adapters alone: weights of the policy they belong to, for those below them.
        """
        self.ledger = [SyncRecord(**record) for record in state["ledger"]]
        self.num_rollouts = state["num_rollouts"]
        self.forget()
        if state["weights"] is None:
            self.step, self.version, self.spent = state["step"], state["version"], state["spent"]
            self._owed = None
            return
        config = AutoConfig.for_model(**state["config"])
        weights = PolicyWeights(config=config, tensors=lambda: iter(state["weights"].items()))
        if (rank := state.get("adapter_rank")) is not None:
            if policy is None or policy.adapter is None:
                raise EngineError("the engine's state holds adapters, and the policy has none: set policy.lora")
            weights = PolicyWeights.adapted(
                config, Adapter(rank=rank, base=policy.adapter.base, tensors=weights.tensors)
            )
        if policy is not None:
            weights.computed_in = policy.computed_in
        self._replace(weights, state["step"], state["version"])
        self._owed = None

    def forget(self) -> None:
        """Holds no weights from now on."""
        self.step, self.version, self.spent = None, None, False

    def holds(self) -> tuple[int, int]:
        """Step and version of the weights it can sample from, or an error."""
        if self.spent:
            raise EngineError("every rollout of this cycle is sampled: the engine waits for the next sync")
        if self.step is None or self.version is None:
            raise NoWeightsError
        return self.step, self.version

    def prepare(  # noqa: B027
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        """A fit is about to begin: whatever cannot work is refused now.

        Args:
            tokenizer: The policy's.
            prompts: Those the run will ask for, up to one pass over all, as far as they are known beforehand.
            group_size: Completions of each.
            sampling: How they are drawn.
        """

    @property
    def num_without_logprobs(self) -> int:
        """Completions it may give whose log-probabilities are not known. After ``prepare``."""
        return 0

    def wake(self) -> None:  # noqa: B027
        """A sync is about to come: it takes the memory for its weights back, which counts to no sync's seconds."""

    def rest(self) -> None:  # noqa: B027
        """The trainer is about to update: whatever memory can be spared is given back until the next call."""

    def _replace(self, weights: PolicyWeights, step: int, version: int) -> Sent:
        """Puts other weights in; while that lasts, and if it fails, the engine holds none."""
        self.forget()
        sent = self.receive(weights, version)
        sent.refuse_noise()
        self.step, self.version = step, version
        return sent

    @abstractmethod
    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        """Takes the tensors in, one after another, through ``Sent.through``."""

    @abstractmethod
    def held_checksums(self, sent: Sent) -> dict[str, int]:
        """Checksums of the engine's own weights, under the policy's names."""

    @abstractmethod
    def held_weights(self) -> dict[str, Tensor]:
        """The engine's own weights, under the policy's names, in memory of their own."""

    @abstractmethod
    def held_config(self) -> PretrainedConfig:
        """Architecture of the model it holds."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """``num_samples`` completions of each prompt, in the order of the prompts.

        ``on_group`` is told of each prompt's completions as soon as all of them are there, so that they can be scored
        while others are still being sampled; once for each prompt, from any thread, in any order.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and processes. It can be given weights again afterwards."""
