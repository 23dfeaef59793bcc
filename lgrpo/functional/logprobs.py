"""Log-probabilities and entropies of tokens, without keeping all logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lgrpo.functional.kept import KeptSets, kept_token_logprobs
from lgrpo.functional.teacher import TeacherDivergence


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    compile: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-softmax(logits / T) at the targets, and the entropy of the distribution; float32, shape of targets.

    The entropy has a gradient only with ``entropy_gradient``. With ``compile`` a pass over the logits is one kernel.
    With ``kept`` both are of the distribution over each token's set, where that is not empty.

    >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    >>> logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    >>> logprobs.exp(), entropy
    (tensor([0.2500]), tensor([1.0397]))
    """
    if kept is not None:
        return _over_sets(logits, targets, temperature, entropy_gradient, compile, kept)
    if not entropy_gradient:
        return _TokenLogprobs.apply(logits, targets, temperature, compile)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _over_sets(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool, compile: bool, kept: KeptSets
) -> tuple[Tensor, Tensor]:
    """Return ``token_logprobs`` with sets, of which some may be empty."""
    logprobs, entropy = kept_token_logprobs(logits, targets, kept, temperature)
    is_whole = kept.counts == 0
    if bool(is_whole.any()):
        whole = token_logprobs(logits[is_whole], targets[is_whole], temperature, entropy_gradient, compile)
        logprobs, entropy = logprobs.masked_scatter(is_whole, whole[0]), entropy.masked_scatter(is_whole, whole[1])
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits in their precision and reads them once in each direction."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, compile: bool) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normaliser = (_compiled(_read) if compile else _read)(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.temperature, ctx.compile = temperature, compile
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        function = _compiled(_gradient) if ctx.compile else _gradient_in_place
        return function(logits, targets, normaliser, gradient, ctx.temperature), None, None, None


def _read(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and the normalisers of the logits."""
    scaled = _scaled(logits, temperature)
    largest = scaled.amax(-1)
    weights = (scaled - largest.unsqueeze(-1)).exp_()  # in place: with new memory it takes twice as long
    total = weights.sum(-1)
    normaliser = largest + total.log()
    entropy = normaliser - weights.mul_(scaled).sum(-1) / total  # in the same pass as the other sum
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser, entropy, normaliser


def _gradient(logits: Tensor, targets: Tensor, normaliser: Tensor, gradient: Tensor, temperature: float) -> Tensor:
    """Return the gradient with respect to the logits, written so that it compiles to one kernel."""
    probabilities = (_scaled(logits, temperature) - normaliser.unsqueeze(-1)).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    result = (is_target.float() - probabilities) * (gradient / temperature).unsqueeze(-1)
    return result.to(logits.dtype)


def _gradient_in_place(
    logits: Tensor, targets: Tensor, normaliser: Tensor, gradient: Tensor, temperature: float
) -> Tensor:
    """Return the same as ``_gradient``, in the memory of one tensor."""
    scaled, normaliser = _scaled(logits, temperature), normaliser.unsqueeze(-1)
    result = (scaled - normaliser if scaled is logits else scaled.sub_(normaliser)).exp_()
    index = targets.unsqueeze(-1)
    result.scatter_add_(-1, index, result.new_full((), -1.0).expand(index.shape))
    return result.mul_((gradient / -temperature).unsqueeze(-1)).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / T in float32; the logits themselves if nothing changes."""
    return logits.float() if temperature == 1 else logits.float() / temperature


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function: one graph for the length of the first chunk, one for all others, both for one vocabulary."""
    return torch.compile(function)


def chunked_token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_gradient: bool = False,
    compile: bool = False,
    divergence: TeacherDivergence | None = None,
    kept: KeptSets | None = None,
) -> tuple[Tensor, ...]:
    """Return ``token_logprobs(head(hidden), targets)`` for hidden [N, H], with logits of one chunk at a time.

    With ``divergence`` a third tensor follows: the divergence from a teacher at each token.

    The last chunk's logits are kept for the backward pass, which recomputes those of the others, so its peak is one
    chunk too. The chunk with fewer than ``chunk_size`` tokens comes first.

    >>> hidden, head = torch.eye(3), torch.nn.Linear(3, 3, bias=False)
    >>> whole = token_logprobs(head(hidden), torch.tensor([0, 1, 2]))[0]
    >>> torch.equal(whole, chunked_token_logprobs(hidden, head, torch.tensor([0, 1, 2]), chunk_size=2)[0])
    True
    """

    def chunk(own: KeptSets | None, h: Tensor, t: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
        logits = head(h)
        found = token_logprobs(logits, t, temperature, entropy_gradient, compile, own)
        return found if divergence is None else (*found, divergence.of(logits, *teacher))

    whole, rest = divmod(len(hidden), chunk_size)
    if not whole + rest:  # no tokens, but still part of the graph
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return (hidden.sum(-1).float(), empty) if divergence is None else (hidden.sum(-1).float(), empty, empty)
    inputs = hidden, targets, *(() if divergence is None else divergence.teacher.tensors())
    sizes = [rest] * bool(rest) + [chunk_size] * whole
    sets = [None] * len(sizes) if kept is None else kept.split(sizes)
    *others, last = zip(sets, *(tensor.split(sizes) for tensor in inputs), strict=True)
    recomputed = partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
    pieces = [*(recomputed(*other) for other in others), chunk(*last)]
    return tuple(torch.cat(found) for found in zip(*pieces, strict=True))
