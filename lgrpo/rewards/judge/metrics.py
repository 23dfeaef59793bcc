"""Metrics of the verdicts in a rollout."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping
from typing import Any

from lgrpo.rewards.judge.verdicts import readable_scores


class JudgeMetrics:
    """Collects verdicts, as the notes of scores have them, and reports metrics of them. Thread-safe."""

    def __init__(self, *names: str) -> None:
        """
        Args:
            names: Names of the metrics to report, without ``judge/``.
        """
        self.names = names
        self._values: dict[str, list[float]] = {name: [] for name in names}
        self._lock = threading.Lock()

    def add(self, verdict: Mapping[str, Any]) -> None:
        """Add the notes about a verdict."""
        scores = readable_scores(verdict)
        several = scores if len(scores) > 1 else None
        found: dict[str, list[float]] = {
            "unreadable_fraction": [score is None for score in verdict["scores"]],
            "unanimous_fraction": [len(set(several)) == 1] if several else [],
            "vote_std": [statistics.pstdev(several)] if several else [],
            "order_change_fraction": [not agree for agree in verdict.get("orders_agree", []) if agree is not None],
            "cached_fraction": [verdict["is_cached"]],
            "seconds": [] if verdict["is_cached"] else [verdict["seconds"]],
        }
        with self._lock:
            for name in self.names:
                self._values[name] += found[name]

    def report(self) -> dict[str, float]:
        """Return and reset the metrics, means over what was added; NaN where that is nothing."""
        with self._lock:
            values, self._values = self._values, {name: [] for name in self.names}
        return {f"judge/{name}": statistics.fmean(own) if own else float("nan") for name, own in values.items()}

    def __reduce__(self) -> tuple[type[JudgeMetrics], tuple[str, ...]]:
        """Pickle without the verdicts, which belong to this process."""
        return JudgeMetrics, self.names
