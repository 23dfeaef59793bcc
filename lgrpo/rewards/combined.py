"""Several rewards as one, and a function as a reward."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import final

from lgrpo.rewards.base import BatchReward, Reward, checked_rewards
from lgrpo.types import Completion, Prompt


@final
class WeightedSum(BatchReward):
    """A sum of rewards, each with a weight, each logged by its name (``reward/NAME``, ``reward/NAME_std``)."""

    def __init__(self, rewards: dict[str, BatchReward], weights: dict[str, float] | None = None) -> None:
        """
        Args:
            rewards: By name.
            weights: Of each name; 1 where it is not among them.
        """
        if not rewards:
            raise ValueError("WeightedSum has no rewards to add up")
        if unknown := sorted(set(weights or {}) - set(rewards)):
            raise ValueError(f"there are weights for {unknown}, but the rewards are {sorted(rewards)}")
        self.rewards = rewards
        self.weights = {name: (weights or {}).get(name, 1.0) for name in rewards}
        self._seen: dict[str, list[float]] = {name: [] for name in rewards}

    def required_fields(self) -> set[str]:
        return set().union(*(reward.required_fields() for reward in self.rewards.values()))

    def report(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name, values in self._seen.items():
            figures |= self.rewards[name].report()
            if values:
                figures[f"reward/{name}"] = statistics.fmean(values)
                figures[f"reward/{name}_std"] = statistics.pstdev(values)
        self._seen = {name: [] for name in self.rewards}
        return figures

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        total = [0.0] * len(completions)
        for name, reward in self.rewards.items():
            values = checked_rewards(reward, prompts, completions)
            self._seen[name] += values
            total = [so_far + self.weights[name] * value for so_far, value in zip(total, values, strict=True)]
        return total


@final
class FunctionReward(Reward):
    """A Python function of (text of the completion, row of the data), by its import path."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: ``package.module.function``.
        """
        self.path = path
        self._function = import_function(path)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return self._function(completion.text, prompt.row)


def import_function(path: str) -> Callable[..., float]:
    """The function an import path names.

    >>> import_function("math.hypot")(3, 4)
    5.0
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no function {path}: {error}") from error
    if not callable(function):
        raise ValueError(f"{path} is no function")
    return function
