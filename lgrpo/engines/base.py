"""What an engine is: the place completions come from, holding the behaviour policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lgrpo.types import Completion, PolicyWeights, Prompt


@dataclass(kw_only=True)
class Sampling:
    """How completions are drawn."""

    temperature: float = 1.0
    """Of the softmax, above 0. Every log-probability of the run is taken at it."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0: from all. For validation: a truncated draw has no honest ratio."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this mass; 1: from all. For validation, like top_k."""
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
        if self.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens is {self.max_tokens}; a completion has at least 1 token")
        if any(not s for s in self.stop or []):
            raise ValueError("sampling.stop has an empty string, which would end every completion at once")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1


class NoWeightsError(RuntimeError):
    """An engine was asked for completions before it was given a policy."""

    def __init__(self) -> None:
        super().__init__(
            "the engine holds no weights, so there is no behaviour policy to sample from: give the Trainer a "
            "WeightSync callback (lgrpo.WeightSync(period=v)), which hands it the policy before the first rollout"
        )


class RolloutEngine(ABC):
    """Samples completions from the weights it was last given.

    It holds none until the first ``load_weights``. Each completion draws from a random stream keyed by (seed, position
    of its prompt in the run, index among its siblings), so neither batch, rollout nor rank decides what is sampled.
    """

    @property
    @abstractmethod
    def step(self) -> int | None:
        """Optimizer step of the weights it holds; None before the first ``load_weights``."""

    @abstractmethod
    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int = 1) -> None:
        """Takes over a policy's weights. ``num_rollouts``: how many rollouts will be sampled before the next time."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[list[Completion]]:
        """``num_samples`` completions of each prompt, in the order of the prompts."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The weights it holds and their step, in plain containers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse: afterwards it samples as it would have."""

    @contextmanager
    def holding(self, weights: PolicyWeights, step: int) -> Iterator[None]:
        """Other weights for the time being; afterwards exactly those from before."""
        before = self.state_dict()
        try:
            self.load_weights(weights, step)
            yield
        finally:
            self.load_state_dict(before)

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and processes. It can be given weights again afterwards."""
