"""Log-probabilities over the tokens that truncated sampling kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KeptSets(NamedTuple):
    """The tokens that could have been drawn at each of N positions of a text, one set after another."""

    token_ids: Tensor
    """[M] integers: the sets."""
    counts: Tensor
    """[N] integers: number of tokens in each set; 0 means all tokens of the vocabulary."""

    @classmethod
    def of(cls, token_ids: Tensor, counts: Tensor, mask: Tensor) -> KeptSets:
        """Return the sets of the tokens in ``mask`` [B, T], row after row.

        Args:
            token_ids: [B, K]: sets of a row, then padding.
            counts: [B, T]: number of tokens in the set of each token; 0 outside the mask.
            mask: [B, T] bool.
        """
        column = torch.arange(token_ids.shape[1], device=token_ids.device)
        return cls(token_ids[column < counts.sum(1, keepdim=True)].long(), counts[mask].long())

    def split(self, sizes: Sequence[int]) -> list[KeptSets]:
        """Return the sets of consecutive parts of the text, by their numbers of positions."""
        counts = self.counts.split(list(sizes))
        totals = torch.stack([part.sum() for part in counts]).tolist()
        return [KeptSets(*part) for part in zip(self.token_ids.split(totals), counts, strict=True)]


def kept_token_logprobs(
    logits: Tensor, targets: Tensor, kept: KeptSets, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log π(target) renormalised over each set, and the entropy of that distribution; float32, shape [N].

    log π(y) = x_y / T - log Σ_k exp(x_k / T), with the sum over the set of y, from logits x [N, V]. Only logits in the
    sets have a gradient. Where a set is empty, both are 0.

    >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    >>> kept = KeptSets(token_ids=torch.tensor([0, 1]), counts=torch.tensor([2]))
    >>> kept_token_logprobs(logits, torch.tensor([1]), kept)[0].exp()
    tensor([0.3333])
    """
    token_ids, counts = kept
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(token_ids))
    chosen = logits[rows, token_ids].float() / temperature

    def per_set(values: Tensor, reduce: str = "sum", empty: float = 0.0) -> Tensor:
        return torch.where(counts > 0, torch.segment_reduce(values, reduce, lengths=counts, unsafe=True), empty)

    shifted = chosen - per_set(chosen.detach(), "max")[rows]
    weights = shifted.exp()
    total = per_set(weights, empty=1.0)
    entropy = total.log() - per_set(weights * shifted) / total
    return per_set(torch.where(token_ids == targets[rows], shifted, 0.0)) - total.log(), entropy
