"""pass@k of a policy, and what it has gained over its reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lgrpo.metrics.pass_at_k import PassAtK


class Amplification(nn.Module):
    """pass@k of the policy, and its pass@1 less the reference's, which is measured once for each reference.

    A policy that was just measured and then becomes the reference is not measured again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = PassAtK()
        self.reference = PassAtK()
        self.forget()

    def forget(self) -> None:
        """No score is known."""
        self._policy_score: tuple[int, float] | None = None  # (optimizer step, pass@1)
        self._reference_score: float | None = None

    @property
    def knows_reference(self) -> bool:
        """Whether the reference has been measured."""
        return self._reference_score is not None

    def reference_moved(self, step: int, copied: bool) -> None:
        """The reference was refreshed at a step: a copy of the policy, or a mixture."""
        known = copied and self._policy_score is not None and self._policy_score[0] == step
        self._reference_score = self._policy_score[1] if known and self._policy_score else None

    def update(self, correct: Tensor, reference_correct: Tensor | None = None) -> None:
        """Adds problems: which samples were right, [problems, samples] bool."""
        self.policy.update(correct)
        if reference_correct is not None:
            self.reference.update(reference_correct)

    def compute(self, step: int) -> dict[str, float]:
        """pass@k for each k, and pass@1_over_reference where the reference is known; then it starts anew."""
        scores = {k: float(value) for k, value in self.policy.compute().items()}
        self._policy_score = (step, scores[1])
        if self.reference.update_called:
            self._reference_score = float(self.reference.compute()[1])
        self.policy.reset()
        self.reference.reset()
        figures = {f"pass@{k}": score for k, score in scores.items()}
        if self._reference_score is not None:
            figures["pass@1_over_reference"] = scores[1] - self._reference_score
        return figures

    def scores(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"policy": self._policy_score, "reference": self._reference_score}

    def load_scores(self, scores: dict[str, Any]) -> None:
        policy = scores["policy"]
        self._policy_score = None if policy is None else (policy[0], policy[1])
        self._reference_score = scores["reference"]
