"""Base class of advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Scores:
    """Scored completions of a whole rollout, of all ranks, with the G siblings of a prompt in adjacent rows."""

    rewards: Tensor
    """Rewards [B]."""
    lengths: Tensor
    """Number of tokens of each completion [B]."""
    draws: Tensor
    """Uniform random number in [0, 1) of each completion [B], for advantages that choose at random."""
    group_size: int
    log_ratios: Tensor | None = None
    """log π_k/π_α of each completion [B], for advantages that set ``needs_log_ratios``."""
    parts: Tensor | None = None
    """Each reward of a weighted sum, and its weight [B, 2, K], for advantages that set ``needs_parts``."""
    turn_rewards: Tensor | None = None
    """Environment's reward of each turn, with its weight in the reward [B, N], NaN for turns that an episode does not
    have, for advantages that set ``needs_turns``. The rest of the reward belongs to no turn in particular."""


class Advantage(ABC):
    """Value of each completion, or of each of its turns, relative to others of its rollout."""

    needs_parts = False
    """Whether it reads each reward of a sum."""
    needs_log_ratios = False
    """Whether it reads log π_k/π_α, which costs one more pass without gradient for each rollout."""

    needs_turns = False
    """Whether it reads the rewards of turns, and returns an advantage for each turn. Requires an environment."""

    uses_zero_variance = False
    """Whether completions of a group whose rewards are all equal may have an advantage."""

    @abstractmethod
    def __call__(self, scores: Scores) -> Tensor:
        """Return advantages [B], or, with ``needs_turns``, those of the turns [B, N]."""
