"""Log-probabilities over the tokens that truncated sampling kept, compared with a dense computation in float64."""

from __future__ import annotations

import math

import pytest
import torch

from lgrpo import functional as F

VOCABULARY = 11


def a_case(num_tokens=9, scale=4.0, seed=0, whole=(), dtype=torch.float32):
    """Return logits, targets and random sets that contain them; the sets of ``whole`` are empty."""
    g = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, VOCABULARY, generator=g)).to(dtype)
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=g)
    mask = torch.rand(num_tokens, VOCABULARY, generator=g) < torch.rand(num_tokens, 1, generator=g)
    mask[torch.arange(num_tokens), targets] = True
    mask[list(whole)] = False
    kept = F.KeptSets(mask.nonzero()[:, 1], mask.sum(1))
    return logits, targets, kept, mask


def naive(logits, targets, mask, temperature):
    """Return log-probabilities and entropies in float64, token by token, with all other logits at -inf."""
    found = []
    for row, target, keep in zip(logits.double(), targets.tolist(), mask, strict=True):
        allowed = keep if bool(keep.any()) else torch.ones_like(keep)
        masked = (row / temperature).masked_fill(~allowed, -torch.inf)
        logprobs = masked - masked.logsumexp(0)
        own = logprobs[allowed]
        found.append((logprobs[target], -(own.exp() * own).sum()))
    return [torch.stack(values) for values in zip(*found, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("whole", [(), (0, 4, 8), tuple(range(9))])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_equals_a_dense_loop(temperature, whole, entropy_gradient):
    logits, targets, kept, mask = a_case(whole=whole)
    logits.requires_grad_(True)
    weights = torch.linspace(-1, 2, len(targets))
    found = F.token_logprobs(logits, targets, temperature, entropy_gradient, kept=kept)
    expected = naive(logits, targets, mask, temperature)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one.double(), other, atol=3e-6 if whole else 1e-6)  # of all tokens as without sets
    assert found[1].requires_grad == entropy_gradient

    def gradient(logprobs, entropy):
        loss = (weights * logprobs).sum() + (0.3 * (weights * entropy).sum() if entropy_gradient else 0)
        return torch.autograd.grad(loss, logits)[0]

    own, dense = gradient(*found), gradient(*expected)
    assert torch.allclose(own, dense, atol=1e-6)
    allowed = mask | ~mask.any(1, keepdim=True)
    assert bool((own[~allowed] == 0).all()), "dropped tokens have no gradient"
    assert bool((own[allowed] != 0).any())


def test_extreme_logits():
    """Nothing overflows or vanishes, wherever the logits are and whatever the dropped ones are."""
    logits = torch.tensor([[-300.0, -301.0, 500.0], [800.0, 799.0, -torch.inf], [-1e4, 0.0, 1e4]], requires_grad=True)
    kept = F.KeptSets(torch.tensor([0, 1, 0, 1, 0]), torch.tensor([2, 2, 1]))
    logprobs, entropy = F.token_logprobs(logits, torch.tensor([1, 1, 0]), kept=kept)
    low = -math.log(1 + math.e)
    assert torch.allclose(logprobs, torch.tensor([low, low, 0.0]), atol=1e-6)
    assert float(entropy[2]) == 0
    logprobs.sum().backward()
    assert bool(logits.grad.isfinite().all())
    assert bool((logits.grad[2] == 0).all()), "a set of one token has nothing to learn"


def test_all_tokens_kept_equals_the_ordinary_path():
    logits, targets, _, _ = a_case()
    everything = torch.arange(VOCABULARY).repeat(len(targets))
    kept = F.KeptSets(everything, torch.full((len(targets),), VOCABULARY))
    results = []
    for sets in (None, kept, F.KeptSets(everything[:0], torch.zeros(len(targets), dtype=torch.int64))):
        own = logits.clone().requires_grad_(True)
        logprobs, entropy = F.token_logprobs(own, targets, 0.8, kept=sets)
        logprobs.square().sum().backward()
        results.append((logprobs.detach(), entropy, own.grad))
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=3e-6) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 20])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("whole", [(), (2, 3)])
def test_chunks(chunk_size, entropy_gradient, whole):
    """Sets of different sizes stay with their tokens; recomputed chunks have the same gradient."""
    logits, targets, kept, mask = a_case(whole=whole)
    head = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    gradients = []
    for size in (chunk_size, 1000):
        hidden = logits.clone().requires_grad_(True)
        found = F.chunked_token_logprobs(hidden, head, targets, 0.7, size, entropy_gradient, kept=kept)
        expected = naive(head(hidden), targets, mask, 0.7)
        assert all(torch.allclose(a.double(), b, atol=3e-6) for a, b in zip(found, expected, strict=True))
        loss = found[0].square().sum() + (found[1].sum() if entropy_gradient else 0)
        gradients.append(torch.autograd.grad(loss, [hidden, head.weight]))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_no_tokens():
    head, hidden = torch.nn.Linear(3, 5), torch.zeros(0, 3, requires_grad=True)
    kept = F.KeptSets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    found = F.chunked_token_logprobs(hidden, head, torch.zeros(0, dtype=torch.int64), kept=kept)
    assert [len(values) for values in found] == [0, 0]
    assert found[0].requires_grad


def test_the_divergence_from_a_teacher_is_of_whole_distributions():
    logits, targets, kept, _ = a_case()
    teacher = F.TopLogprobs.of(torch.randn(len(targets), VOCABULARY), 4, 1.0)
    divergence = F.TeacherDivergence(teacher=teacher, direction="reverse", temperature=1.0)
    head = torch.nn.Identity()
    plain, truncated = (
        F.chunked_token_logprobs(logits, head, targets, chunk_size=4, divergence=divergence, kept=sets)
        for sets in (None, kept)
    )
    assert torch.equal(plain[2], truncated[2])
    assert not torch.equal(plain[0], truncated[0])


def test_half_precision_logits():
    """As on a GPU with mixed precision: the sums are in float32, the gradient has the precision of the logits."""
    logits, targets, kept, mask = a_case(dtype=torch.bfloat16)
    logits.requires_grad_(True)
    logprobs, _ = F.token_logprobs(logits, targets, kept=kept)
    assert torch.allclose(logprobs.double(), naive(logits, targets, mask, 1.0)[0], atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
