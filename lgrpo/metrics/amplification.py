"""pass@k of a policy, and its gain over the reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import SumMetric

from lgrpo.metrics.pass_at_k import PassAtK


class Amplification:
    """pass@k of the policy on one task, and its pass@1 minus that of the reference.

    ``update`` adds problems and ``compute`` returns the metrics at the end of a validation. Each reference is measured
    once; a policy that was measured and then becomes the reference (``on_reference_refresh``) is not measured again.
    """

    def __init__(self) -> None:
        self.policy = PassAtK()
        self.reference = PassAtK()
        self.failures = SumMetric()
        self.policy_score: tuple[int, float] | None = None
        """Optimizer step and pass@1 of the last validation."""
        self.reference_score: float | None = None
        """pass@1 of the reference; None if it has not been measured."""

    def on_reference_refresh(self, step: int, copied: bool) -> None:
        """Take over the policy's score if the reference is now its copy; forget the reference's score otherwise."""
        measured_at, score = self.policy_score or (None, None)
        self.reference_score = score if copied and measured_at == step else None

    def update(
        self,
        correct: Tensor,
        answers: Tensor | None = None,
        reference_correct: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> None:
        """Add problems, [problems, samples]: right samples, the number of each answer, failed scores."""
        self.policy.update(correct, answers)
        if reference_correct is not None:
            self.reference.update(reference_correct)
        if failed is not None:
            self.failures.to(failed.device).update(failed.sum())

    def compute(self, step: int) -> dict[str, float]:
        """Return and reset pass@k, maj@k, the number of failed scores, and pass@1_over_reference if it is known."""
        metrics = {name: float(value) for name, value in self.policy.compute().items()}
        self.policy_score = (step, metrics["pass@1"])
        if self.reference.update_called:
            self.reference_score = float(self.reference.compute()["pass@1"])
        if self.failures.update_called:
            metrics["reward_failures"] = float(self.failures.compute())
        self.failures.reset()
        self.policy.reset()
        self.reference.reset()
        if self.reference_score is not None:
            metrics["pass@1_over_reference"] = metrics["pass@1"] - self.reference_score
        return metrics


class Amplifications:
    """One ``Amplification`` for each task a run is validated on, by the task's name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Amplification] = {}

    def __getitem__(self, name: str) -> Amplification:
        return self._by_name.setdefault(name, Amplification())

    def forget(self) -> None:
        """Forget all scores."""
        self._by_name.clear()

    def on_reference_refresh(self, step: int, copied: bool) -> None:
        """Take over the policy's score if the reference is now its copy; forget the reference's score otherwise."""
        for amplification in self._by_name.values():
            amplification.on_reference_refresh(step, copied)

    def compute(self, step: int) -> dict[str, float]:
        """Return the metrics of every updated task: ``NAME/pass@1``, or ``pass@1`` of the task with an empty name."""
        return {
            f"{name}/{metric}" if name else metric: value
            for name, amplification in self._by_name.items()
            if amplification.policy.update_called
            for metric, value in amplification.compute(step).items()
        }

    def scores(self) -> dict[str, Any]:
        """Return the scores for a checkpoint."""
        return {name: {"policy": a.policy_score, "reference": a.reference_score} for name, a in self._by_name.items()}

    def load_scores(self, scores: dict[str, Any]) -> None:
        for name, of_task in scores.items():
            self[name].policy_score, self[name].reference_score = of_task["policy"], of_task["reference"]
