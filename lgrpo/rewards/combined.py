"""Rewards made of other rewards."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, get_args

from lgrpo.rewards.base import (
    BatchReward,
    FailedScore,
    Failure,
    NotYet,
    Score,
    SumScore,
    checked_rewards,
    combined,
    notes_of,
)
from lgrpo.rewards.function import as_reward
from lgrpo.types import Completion, Prompt


@final
class WeightedSum(BatchReward):
    """Weighted sum of named rewards, each of which is logged (``reward/NAME``, ``reward/NAME_std``)."""

    def __init__(self, rewards: dict[str, BatchReward], weights: dict[str, float] | None = None) -> None:
        """
        Args:
            rewards: Rewards by name. The first one reads the final answer, for maj@k.
            weights: Weights by name; the default is 1.
        """
        if not rewards:
            raise ValueError("WeightedSum has no rewards to add up")
        if taken := sorted({"failures", *get_args(Failure)} & set(rewards)):
            raise ValueError(f"a reward may not be called {taken}: reward/{taken[0]} counts failures")
        if unknown := sorted(set(weights or {}) - set(rewards)):
            raise ValueError(f"there are weights for {unknown}, but the rewards are {sorted(rewards)}")
        self.rewards = {name: as_reward(reward) for name, reward in rewards.items()}
        self.weights = {name: (weights or {}).get(name, 1.0) for name in rewards}
        self._statistics: dict[str, ScoreStatistics] = {name: ScoreStatistics() for name in rewards}

    @property
    def is_inline(self) -> bool:  # type: ignore[override]
        return all(reward.is_inline for reward in self.rewards.values())

    @property
    def can_fail(self) -> bool:
        return any(reward.can_fail for reward in self.rewards.values())

    @property
    def turn_weight(self) -> float:
        return sum(self.weights[name] * reward.turn_weight for name, reward in self.rewards.items())

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return WeightedSum({name: reward.map_leaves(change) for name, reward in self.rewards.items()}, self.weights)

    def required_fields(self) -> set[str]:
        return set().union(*(reward.required_fields() for reward in self.rewards.values()))

    def check_row(self, row: Mapping[str, Any]) -> None:
        for reward in self.rewards.values():
            reward.check_row(row)

    def final_answer(self, text: str) -> str | None:
        return next(iter(self.rewards.values())).final_answer(text)

    def report(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        reports = [reward.report() for reward in self.rewards.values()]
        for name in dict.fromkeys(name for report in reports for name in report):
            metrics[name] = statistics.fmean(report[name] for report in reports if name in report)  # of several judges
        for name in self.rewards:
            metrics |= self._statistics[name].report(f"reward/{name}")
        return metrics

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = {name: checked_rewards(reward, prompts, completions) for name, reward in self.rewards.items()}
        for name, values in scores.items():
            self._statistics[name].add(values)
        return [self._sum(dict(zip(scores, parts, strict=True))) for parts in zip(*scores.values(), strict=True)]

    def _sum(self, parts: dict[str, Score]) -> Score:
        known = {name: value for name, value in parts.items() if not isinstance(value, NotYet)}
        notes = {name: own for name, value in parts.items() if (own := notes_of(value)) is not None} or None
        weighted = tuple((float(value), self.weights[name]) for name, value in known.items())
        score = combined(sum(value * weight for value, weight in weighted), list(parts.values()))
        if isinstance(score, FailedScore):
            score.parts, score.notes = weighted, notes
        return score if isinstance(score, FailedScore | NotYet) else SumScore(score, weighted, notes)


class ScoreStatistics:
    """Mean and standard deviation of scores since the last report. Thread-safe."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._lock = threading.Lock()

    def add(self, scores: Sequence[Score]) -> None:
        with self._lock:
            self._values += [float(score) for score in scores if not isinstance(score, NotYet)]

    def report(self, name: str) -> dict[str, float]:
        """Return and reset the statistics; 0 if no score was added."""
        with self._lock:
            values, self._values = self._values or [0.0], []
        return {name: statistics.fmean(values), f"{name}_std": statistics.pstdev(values)}

    def __reduce__(self) -> tuple[type[ScoreStatistics], tuple[()]]:
        """Pickle without the scores, which belong to this process."""
        return ScoreStatistics, ()
