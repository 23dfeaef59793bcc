"""What the parts of a composed loss see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lgrpo.losses.base import PolicyLogprobs
from lgrpo.types import RolloutBatch


@dataclass(kw_only=True, slots=True)
class Terms:
    """A micro-batch, the log-probabilities of its tokens, and the ratio the loss works with."""

    batch: RolloutBatch
    logprobs: PolicyLogprobs
    log_ratio: Tensor
    """[B, T] log ρ, with gradient."""

    @property
    def ratio(self) -> Tensor:
        """[B, T] ρ, with gradient."""
        return self.log_ratio.exp()

    @property
    def advantages(self) -> Tensor:
        """[B, T]"""
        return self.batch.advantages

    @property
    def proximal_log_ratio(self) -> Tensor:
        """[B, T] log π_k/π_α: how far the policy was from the behaviour policy when this rollout's updates began."""
        if self.logprobs.proximal is None:
            raise ValueError("π_k/π_α needs proximal log-probabilities, but there are none")
        return self.logprobs.proximal - self.batch.behaviour_logprobs


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a word that is none of the choices: plain Python does not look at a Literal."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(choices)}")
