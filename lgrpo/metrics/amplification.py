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

    def update(self, correct: Tensor, answers: Tensor | None = None, reference_correct: Tensor | None = None) -> None:
        """Adds problems: which samples were right, and which of them end in the same answer, [problems, samples]."""
        self.policy.update(correct, answers)
        if reference_correct is not None:
            self.reference.update(reference_correct)

    def compute(self, step: int) -> dict[str, float]:
        """pass@k and maj@k, and pass@1_over_reference where the reference is known; then it starts anew."""
        figures = {name: float(value) for name, value in self.policy.compute().items()}
        self._policy_score = (step, figures["pass@1"])
        if self.reference.update_called:
            self._reference_score = float(self.reference.compute()["pass@1"])
        self.policy.reset()
        self.reference.reset()
        if self._reference_score is not None:
            figures["pass@1_over_reference"] = figures["pass@1"] - self._reference_score
        return figures

    def scores(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"policy": self._policy_score, "reference": self._reference_score}

    def load_scores(self, scores: dict[str, Any]) -> None:
        policy = scores["policy"]
        self._policy_score = None if policy is None else (policy[0], policy[1])
        self._reference_score = scores["reference"]


class Amplifications(nn.Module):
    """One ``Amplification`` for each task a run is validated on, by the task's name."""

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, Amplification] = {}

    def __getitem__(self, name: str) -> Amplification:
        return self._by_name.setdefault(name, Amplification())

    def forget(self) -> None:
        """No score is known."""
        self._by_name.clear()

    def reference_moved(self, step: int, copied: bool) -> None:
        """The reference was refreshed at a step: a copy of the policy, or a mixture."""
        for amplification in self._by_name.values():
            amplification.reference_moved(step, copied)

    def compute(self, step: int) -> dict[str, float]:
        """The figures of every task that was updated: ``pass@1`` of the nameless one, ``NAME/pass@1`` of the others."""
        return {
            f"{name}/{figure}" if name else figure: value
            for name, amplification in self._by_name.items()
            if amplification.policy.update_called
            for figure, value in amplification.compute(step).items()
        }

    def scores(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: amplification.scores() for name, amplification in self._by_name.items()}

    def load_scores(self, scores: dict[str, Any]) -> None:
        for name, own in scores.items():
            self[name].load_scores(own)
