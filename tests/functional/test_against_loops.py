"""Every formula, compared with a plain Python loop."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgrpo import functional as F

rewards_of_groups = st.integers(2, 6).flatmap(
    lambda g: st.tuples(
        st.just(g),
        st.integers(1, 4).flatmap(lambda p: st.lists(st.floats(-5, 5, width=32), min_size=p * g, max_size=p * g)),
    )
)


def groups(rewards, size):
    return [rewards[i : i + size] for i in range(0, len(rewards), size)]


def close(tensor, expected, tolerance=1e-4):
    assert torch.allclose(tensor, torch.tensor(expected, dtype=tensor.dtype), atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(rewards_of_groups, st.sampled_from(["inside", "outside"]), st.booleans())
def test_group_whitened_equals_a_loop(case, placement, unbiased):
    size, rewards = case
    expected = []
    for group in groups(rewards, size):
        mean = sum(group) / size
        variance = sum((r - mean) ** 2 for r in group) / (size - unbiased)
        scale = math.sqrt(variance + 0.01) if placement == "inside" else math.sqrt(variance) + 0.01
        expected += [(r - mean) / scale for r in group]
    groups_of = F.grouped(torch.tensor(rewards), size)
    centred = groups_of - groups_of.mean(1, keepdim=True)
    close((centred / F.group_std(groups_of, 0.01, placement, unbiased)).flatten(), expected, 1e-3)


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, st.floats(0.1, 3))
def test_baselines_equal_a_loop(case, temperature):
    size, rewards = case
    left_out, soft = [], []
    for group in groups(rewards, size):
        left_out += [(sum(group) - r) / (size - 1) for r in group]
        soft += [temperature * math.log(sum(math.exp(r / temperature) for r in group) / size)]
    close(F.leave_one_out_mean(F.grouped(torch.tensor(rewards), size)).flatten(), left_out)
    close(F.log_mean_exp(F.grouped(torch.tensor(rewards), size), temperature).flatten(), soft, 1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8), st.floats(0.1, 3))
def test_bernoulli_std_equals_a_loop(rewards, smoothing):
    expected = []
    for group in groups(rewards, 4):
        p = (sum(group) + smoothing) / (4 + 2 * smoothing)
        expected.append(math.sqrt(p * (1 - p)))
    close(F.bernoulli_std(torch.tensor(rewards).view(2, 4), smoothing).flatten(), expected)


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, st.floats(0, 2, width=32))
def test_has_reward_variance_equals_a_loop(case, tolerance):
    size, rewards = case
    numbers = torch.tensor(rewards).tolist()
    expected = [
        (torch.tensor(max(g)) - torch.tensor(min(g))).item() > tolerance for g in groups(numbers, size) for _ in g
    ]
    assert F.has_reward_variance(torch.tensor(rewards), size, tolerance).tolist() == expected


def test_variance_is_detected_on_raw_rewards():
    """0.1 is not exact, so equal large rewards have a standard deviation above 0 by rounding."""
    equal = torch.full((8,), 1e6 + 0.1)
    assert not F.has_reward_variance(equal, 8).any()


@pytest.mark.parametrize("group_size", [1, 0, 3])
def test_groups_must_be_whole(group_size):
    with pytest.raises(ValueError, match="group"):
        F.grouped(torch.ones(4), group_size)


tokens = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3))


@settings(max_examples=200, deadline=None)
@given(
    tokens,
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.sampled_from(["one", "proximal", "proximal_multiplicative"]),
)
def test_clipped_surrogate_equals_a_loop(token, clip_low, clip_high, centre):
    policy, behaviour, proximal, advantage = token
    ratio = math.exp(policy - behaviour)
    c = 1.0 if centre == "one" else math.exp(proximal - behaviour)
    if centre == "proximal_multiplicative":
        low, high = c * (1 - clip_low), c * (1 + clip_high)
    else:
        low, high = max(c - clip_low, 0.0), c + clip_high
    expected = min(ratio * advantage, min(max(ratio, low), high) * advantage)

    t = [torch.tensor([x], dtype=torch.float64) for x in (policy, behaviour, proximal, advantage)]
    log_rho = F.log_ratio(t[0], t[1], t[2], "behaviour")
    band = F.clip_band(
        F.clip_centre(log_rho, t[1], t[2], centre), clip_low, clip_high, centre == "proximal_multiplicative"
    )
    close(F.clipped_surrogate(log_rho.exp(), t[3], *band), [expected], 1e-9)


def test_a_ratio_on_the_edge_of_the_band_is_inside():
    edges = torch.tensor([0.75, 1.25])
    for advantage in (-1.0, 0.0, 1.0):
        same = torch.full((2,), advantage)
        assert F.one_side(edges, same, 0.75, 1.25).tolist() == [True, True]
        assert [side.tolist() for side in F.outside_band(edges, same, 0.75, 1.25)] == [[False, False]] * 2
    assert F.two_side(edges, 0.75, 1.25).tolist() == [True, True]
    outer = torch.tensor([0.25, 0.75, 1.25, 4.0])
    for advantage, expected in ((1.0, [True, True, True, False]), (-1.0, [False, True, True, True]), (0.0, [True] * 4)):
        assert F.ring(outer, torch.tensor(advantage), 0.75, 1.25, 0.25, 4.0).tolist() == expected


def test_log_ratio_uses_the_chosen_denominator():
    policy = torch.tensor([-1.0], requires_grad=True)
    behaviour, proximal = torch.tensor([-3.0]), torch.tensor([-2.0])
    assert F.log_ratio(policy, behaviour, proximal, "behaviour").item() == 2.0
    assert F.log_ratio(policy, behaviour, proximal, "proximal").item() == 1.0
    none = F.log_ratio(policy, behaviour, None, "none")
    assert none.item() == 0.0
    assert torch.autograd.grad(none.exp().sum(), policy)[0].item() == 1.0, "1, with the gradient of log π"
    with pytest.raises(ValueError, match="proximal_logprobs"):
        F.log_ratio(policy, behaviour, None, "proximal")
    with pytest.raises(ValueError, match="not one of"):
        F.log_ratio(policy, behaviour, None, "old")


@settings(max_examples=50, deadline=None)
@given(st.floats(-5, 0), st.floats(-5, 0))
def test_kl_equals_a_loop(policy, reference):
    d = policy - reference
    p, r = torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    close(F.kl_divergence(p, r, "k1"), [d], 1e-9)
    close(F.kl_divergence(p, r, "k2"), [d * d / 2], 1e-9)
    close(F.kl_divergence(p, r, "k3"), [math.exp(-d) + d - 1], 1e-9)


def test_aggregations_equal_loops():
    torch.manual_seed(0)
    values, mask = torch.randn(5, 7), torch.rand(5, 7) < 0.6
    mask[2] = False
    rows = [[values[b, t].item() for t in range(7) if mask[b, t]] for b in range(5)]
    close(F.token_mean(values, mask, 20), sum(map(sum, rows)) / 20)
    lengths = torch.tensor([len(r) for r in rows])
    close(F.sequence_mean(values, mask, lengths, 5), sum(sum(r) / len(r) for r in rows if r) / 5)
    close(F.constant_sum(values, mask, 3.5), sum(map(sum, rows)) / 3.5)
    empty = torch.zeros_like(mask)
    assert F.token_mean(values, empty, 0) == F.sequence_mean(values, empty, lengths * 0, 0) == 0


def test_masked_values_do_not_count_even_if_not_finite():
    values, mask = torch.tensor([[1.0, float("nan"), float("inf")]]), torch.tensor([[True, False, False]])
    assert F.token_mean(values, mask, 1).item() == 1.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_logprobs_and_entropy_equal_a_loop(temperature):
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6), torch.tensor([0, 5, 3, 2])
    logprobs, entropies = [], []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        weights = [math.exp(x / temperature) for x in row]
        p = [w / sum(weights) for w in weights]
        logprobs.append(math.log(p[target]))
        entropies.append(-sum(q * math.log(q) for q in p))
    got, entropy = F.token_logprobs(logits, targets, temperature)
    close(got, logprobs)
    close(entropy, entropies)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_gradient_of_token_logprobs_equals_autograd(dtype, tolerance, temperature, compile):
    """Autograd through ``log_softmax`` in float32. The logits stay unchanged."""
    torch.manual_seed(0)
    logits = torch.randn(5, 33).mul(3).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, 33, (5,)), torch.randn(5)
    plain = logits.detach().float().clone().requires_grad_()
    got, _ = F.token_logprobs(logits, targets, temperature, compile=compile)
    (gradient,) = torch.autograd.grad((got * weights).sum(), logits)
    assert torch.equal(logits.float(), plain)
    whole = torch.log_softmax(plain / temperature, -1).gather(-1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad((whole * weights).sum(), plain)
    assert torch.allclose(got, whole, atol=1e-5)
    assert gradient.dtype == dtype
    assert (gradient.float() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_change_neither_value_nor_gradient(chunk_size):
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 8, requires_grad=True), torch.nn.Linear(8, 11)
    targets = torch.randint(0, 11, (20,))

    def gradients(logprobs):
        return torch.autograd.grad((logprobs * torch.arange(20)).sum(), [hidden, *head.parameters()])

    whole, entropy = F.token_logprobs(head(hidden), targets, 0.7)
    chunked, chunked_entropy = F.chunked_token_logprobs(hidden, head, targets, 0.7, chunk_size)
    assert torch.allclose(whole, chunked, atol=1e-6)
    assert torch.allclose(entropy, chunked_entropy, atol=1e-6)
    for a, b in zip(gradients(whole), gradients(chunked), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_logits_of_one_chunk_exist_at_a_time():
    """Only the last chunk's logits are kept for the backward pass."""
    head, sizes, logits = torch.nn.Linear(8, 1000), [], []
    hidden, targets = torch.randn(70, 8, requires_grad=True), torch.randint(0, 1000, (70,))

    def watched(h):
        assert not any(out() is not None for out in logits)
        sizes.append(len(h))
        out = head(h)
        logits.append(weakref.ref(out))
        return out

    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        logprobs, _ = F.chunked_token_logprobs(hidden, watched, targets, chunk_size=16)
    assert sizes == [6, 16, 16, 16, 16]
    assert [size for size in saved if size > head.weight.numel()] == [16_000], "without a copy"
    assert [out() is not None for out in logits] == [False] * 4 + [True]
    logprobs.sum().backward()
    assert sizes[5:] == [16, 16, 16, 6], "all others are recomputed in reverse order"


def test_pass_at_k_equals_counting():
    from itertools import combinations

    for n in range(1, 6):
        for c in range(n + 1):
            samples = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                draws = list(combinations(samples, k))
                expected = sum(any(d) for d in draws) / len(draws)
                got = F.pass_at_k(torch.tensor([n]), torch.tensor([c]), k)
                assert got.item() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="pass@3"):
        F.pass_at_k(torch.tensor([2]), torch.tensor([1]), 3)


def test_streams_are_uniform_and_independent_of_the_batch():
    positions = torch.arange(200)[:, None, None]
    siblings, steps = torch.arange(8)[None, :, None], torch.arange(20)[None, None, :]
    u = F.stream_uniform(3, positions, siblings, steps)
    assert u.shape == (200, 8, 20)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert u.unique().numel() == u.numel()
    assert abs(float(u.mean()) - 0.5) < 0.005
    assert abs(float(u.var()) - 1 / 12) < 0.002
    neighbours = torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.02
    assert float(F.stream_uniform(3, torch.tensor(17), 5, 11)) == float(u[17, 5, 11])
    assert not torch.equal(u, F.stream_uniform(4, positions, siblings, steps))
