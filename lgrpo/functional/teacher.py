"""Divergence of a policy from a teacher, of which only the most likely tokens are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Direction: TypeAlias = Literal["forward", "reverse"]
LOWEST_LOGPROB = -100.0
"""Log-probability of what a teacher never samples: small enough for e^x to be 0, and still finite."""


@dataclass(kw_only=True, slots=True, eq=False)
class TopLogprobs:
    """The K most likely tokens at N positions of a text, and the probability of all others together."""

    token_ids: Tensor
    """[N, K] int64."""
    logprobs: Tensor
    """[N, K] float32."""
    rest: Tensor
    """[N] float32: log-probability of all other tokens together."""

    @classmethod
    def of(cls, logits: Tensor, top_k: int | None, temperature: float) -> TopLogprobs:
        """Return the most likely tokens of logits [N, V]; all tokens if ``top_k`` is None or V.

        >>> TopLogprobs.of(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), 2, 1.0).rest.exp()
        tensor([0.2000])
        """
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        top = logprobs.topk(min(top_k or logprobs.shape[-1], logprobs.shape[-1]))
        rest = logprobs.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
        return cls(
            token_ids=top.indices, logprobs=top.values.clamp(min=LOWEST_LOGPROB), rest=rest.clamp(min=LOWEST_LOGPROB)
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three tensors."""
        return self.token_ids, self.logprobs, self.rest

    def to(self, device: torch.device) -> TopLogprobs:
        """Return a copy on a device."""
        token_ids, logprobs, rest = (tensor.to(device) for tensor in self.tensors())
        return TopLogprobs(token_ids=token_ids, logprobs=logprobs, rest=rest)


class TeacherDivergence:
    """KL divergence of a policy and a teacher at each of N tokens, computed from the policy's logits.

    The tokens that the teacher does not return count as one. This is at most the divergence over all tokens, 0 if the
    distributions are equal, and exact if the teacher returns every token.
    """

    # Not a dataclass: FSDP1 would cast the tensors in one to the precision of the layers.

    def __init__(self, *, teacher: TopLogprobs, direction: Direction, temperature: float) -> None:
        """
        Args:
            teacher: Distribution of the teacher at each token.
            direction: ``forward``: KL(teacher ‖ policy); ``reverse``: KL(policy ‖ teacher).
            temperature: Temperature of both distributions.
        """
        self.teacher = teacher
        self.direction = direction
        self.temperature = temperature

    def of(self, logits: Tensor, token_ids: Tensor, logprobs: Tensor, rest: Tensor) -> Tensor:
        """Return the divergence [M] at M of the N tokens, with gradient, from logits [M, V] and the teacher's part.

        >>> policy, teacher = torch.zeros(1, 4), torch.log(torch.tensor([[0.7, 0.1, 0.1, 0.1]]))
        >>> kl = TeacherDivergence(teacher=TopLogprobs.of(teacher, 1, 1.0), direction="forward", temperature=1.0)
        >>> kl.of(policy, *kl.teacher.tensors())  # 0.7 log(0.7 / 0.25) + 0.3 log(0.3 / 0.75)
        tensor([0.4458])
        """
        own = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        chosen, given = own.gather(-1, token_ids), logprobs
        if chosen.shape[-1] < own.shape[-1]:
            others = own.scatter(-1, token_ids, -torch.inf).logsumexp(-1, keepdim=True)
            chosen, given = torch.cat([chosen, others], -1), torch.cat([given, rest[:, None]], -1)
        if self.direction == "forward":
            return (given.exp() * (given - chosen)).sum(-1)
        return (chosen.exp() * (chosen - given)).sum(-1)
