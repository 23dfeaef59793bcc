"""Log-probabilities and entropies of tokens, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / T) at the targets, and the entropy of that distribution. Both float32, shape of targets.

    >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    >>> logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    >>> logprobs.exp(), entropy
    (tensor([0.2500]), tensor([1.0397]))
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def chunked_token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """``token_logprobs(head(hidden), targets)`` for hidden [N, H], holding logits of ``chunk_size`` tokens at a time.

    The backward pass computes each chunk's logits again, so the peak is one chunk there too; a single one is
    kept. The entropy carries a gradient only where it is asked for.

    >>> hidden, head = torch.eye(3), torch.nn.Linear(3, 3, bias=False)
    >>> whole = token_logprobs(head(hidden), torch.tensor([0, 1, 2]))[0]
    >>> torch.equal(whole, chunked_token_logprobs(hidden, head, torch.tensor([0, 1, 2]), chunk_size=2)[0])
    True
    """

    def chunk(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(h), t, temperature, entropy_gradient)

    pieces, is_one = [], len(hidden) <= chunk_size
    for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        if torch.is_grad_enabled() and not is_one:
            pieces.append(checkpoint(chunk, h, t, use_reentrant=False))
        else:
            pieces.append(chunk(h, t))
    if not pieces:  # no tokens: still part of the graph
        return hidden.sum(-1).float(), hidden.new_zeros(0, dtype=torch.float32)
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
