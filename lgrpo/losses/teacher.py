"""Divergence from a teacher as a part of the loss: distillation on the policy's own samples."""

from __future__ import annotations

from typing import Literal, final

from torch import Tensor

from lgrpo.losses.regularisers import Regulariser
from lgrpo.losses.terms import Terms, check_choice
from lgrpo.tasks.template import Template
from lgrpo.teachers import Distillation, Teacher


@final
class TeacherKL(Regulariser):
    """``coef`` times the KL divergence between policy and teacher at each sampled token.

    It is the exact divergence of the two next-token distributions, given the text before the token; only that text was
    sampled. A sampler that lags therefore changes which texts are seen, and needs no ratio here.
    """

    needs_zero_variance = True

    def __init__(
        self,
        teacher: Teacher,
        coef: float = 1.0,
        direction: Literal["forward", "reverse"] = "reverse",
        top_k: int | None = 64,
        temperature: float | None = None,
        teacher_template: Template | None = None,
    ) -> None:
        """
        Args:
            teacher: Model to learn from.
            coef: Weight of the divergence.
            direction: ``reverse``: KL(policy ‖ teacher); ``forward``: KL(teacher ‖ policy).
            top_k: Number of tokens whose probabilities the teacher returns at each position, the most likely ones; the
                others count as one token. null: all tokens, which needs memory for sampled tokens × vocabulary.
            temperature: Temperature of both distributions; by default that of sampling.
            teacher_template: Prompt that the teacher reads instead of the policy's, with further fields of the row,
                such as a hint or the solution.
        """
        super().__init__(coef)
        check_choice("TeacherKL's direction", direction, ("forward", "reverse"))
        self.distillation = Distillation(teacher, direction, top_k, temperature, teacher_template)

    def __call__(self, terms: Terms) -> Tensor:
        if terms.logprobs.teacher_kl is None:
            raise ValueError("TeacherKL needs a divergence from the teacher, but none was computed")
        return self.coef * terms.logprobs.teacher_kl
