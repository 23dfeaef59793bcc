"""What a reward is, and what is accepted from one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from lgrpo.types import Completion, Prompt


class BatchReward(ABC):
    """Scores many completions at once."""

    @abstractmethod
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[float]:
        """One finite number for each completion; ``prompts[i]`` is the prompt of ``completions[i]``."""

    def required_fields(self) -> set[str]:
        """Fields of a dataset row this reward reads, checked before the run starts."""
        return set()

    def report(self) -> dict[str, float]:
        """Figures to log (``reward/…``) of what was scored since the last report."""
        return {}


class Reward(BatchReward):
    """Scores one completion at a time."""

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> float:
        """A finite number; for pass@k, 1 and more is right."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        return [self.score(p, c) for p, c in zip(prompts, completions, strict=True)]


def checked_rewards(reward: BatchReward, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
    """The reward's numbers, one for each completion and all of them finite, or an error that names the culprit."""
    name = type(reward).__name__
    values = list(reward(prompts, completions))
    if len(values) != len(completions):
        raise ValueError(f"{name} returned {len(values)} rewards for {len(completions)} completions")
    numbers = []
    for value, prompt, completion in zip(values, prompts, completions, strict=True):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) < 1e38:  # what float32 holds; false for NaN too
            raise ValueError(
                f"{name} returned {value!r}, not a finite number, for completion {completion.text[:200]!r} of prompt "
                f"{prompt.text[:200]!r}"
            )
        numbers.append(number)
    return numbers
