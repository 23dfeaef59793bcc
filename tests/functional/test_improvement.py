"""Terms of the improvement theorem, compared with loops and with exact expectations over small policies."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgrpo import functional as F

ALPHA = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
PI = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
PROXIMAL = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
REWARD = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)


def every_group(size):
    """Return all possible groups of samples of α, and their probabilities."""
    groups = torch.tensor(list(itertools.product(range(3), repeat=size)))
    return groups, ALPHA[groups].prod(1)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_estimate_of_the_gain_is_unbiased(size):
    """The expectation over all groups of α is exactly J(π) - J(α), at any group size."""
    groups, probability = every_group(size)
    gain = F.expected_gain((PI / ALPHA).log()[groups], REWARD[groups])
    assert float((probability * gain).sum()) == pytest.approx(float((PI - ALPHA) @ REWARD), abs=1e-12)
    terms = F.improvement_terms((PI / ALPHA).log()[groups], (PROXIMAL / ALPHA).log()[groups], REWARD[groups])
    expected = {
        "gain": (PI - ALPHA) @ REWARD,
        "gain_rollout": (PI - PROXIMAL) @ REWARD,
        "tv": (PI - ALPHA).abs().sum() / 2,
        "tv_proximal": (PROXIMAL - ALPHA).abs().sum() / 2,
    }
    for name, value in expected.items():
        assert float((probability * terms[name]).sum()) == pytest.approx(float(value), abs=1e-12), name


def test_gain_is_s_times_the_surrogate():
    """J(π) - J(α) = s L_α with the true s and the true mean; the group represents α exactly, in tenths."""
    population = ALPHA.mul(10).long()
    rewards, log_ratio = (x.repeat_interleave(population)[None] for x in (REWARD, (PI / ALPHA).log()))
    mean = ALPHA @ REWARD
    s = torch.sqrt(ALPHA @ (REWARD - mean) ** 2 + 1e-4)
    surrogate = (ALPHA * PI / ALPHA * (REWARD - mean) / s).sum()
    assert float(s * surrogate) == pytest.approx(float((PI - ALPHA) @ REWARD), abs=1e-12)
    terms = F.improvement_terms(log_ratio, torch.zeros_like(log_ratio), rewards)
    assert float(terms["s"]) == pytest.approx(float(s), abs=1e-12)
    assert float(terms["surrogate"]) * 9 / 10 == pytest.approx(float(surrogate), abs=1e-12)  # G - 1, not G


def test_gain_requires_ratios_of_whole_completions():
    """All completions of two tokens are enumerated; ratios of tokens give a different number."""
    g = torch.Generator().manual_seed(0)
    policies = []
    for _ in range(2):  # α, then π: p(first), p(second | first)
        first, second = torch.rand(3, generator=g).softmax(0), (3 * torch.rand(3, 3, generator=g)).softmax(1)
        policies.append((first.double(), second.double()))
    (a1, a2), (p1, p2) = policies
    pairs = list(itertools.product(range(3), repeat=2))
    reward = torch.rand(9, generator=g, dtype=torch.float64)
    alpha = torch.tensor([a1[i] * a2[i, j] for i, j in pairs])
    pi = torch.tensor([p1[i] * p2[i, j] for i, j in pairs])
    token = torch.tensor([[torch.log(p1[i] / a1[i]), torch.log(p2[i, j] / a2[i, j])] for i, j in pairs])
    whole = F.completion_log_ratio(token, torch.ones(9, 2, dtype=torch.bool))
    gain = float((pi - alpha) @ reward)
    centred = reward - alpha @ reward
    assert float((alpha * whole.exp() * centred).sum()) == pytest.approx(gain, abs=1e-6)
    by_token = float((alpha * token.exp().mean(1) * centred).sum())
    assert abs(by_token - gain) > 0.01


def test_two_standard_errors_cover_the_truth():
    """In 400 rollouts of 64 prompts, about 95 % of the estimates are within two standard errors."""
    g = torch.Generator().manual_seed(1)
    truth = float((PI - ALPHA) @ REWARD)
    samples = torch.multinomial(ALPHA, 400 * 64 * 4, replacement=True, generator=g).view(400, 64, 4)
    gains = torch.stack([F.expected_gain((PI / ALPHA).log()[s], REWARD[s]) for s in samples])
    errors = torch.stack([F.standard_error(gain) for gain in gains])
    z = (gains.mean(1) - truth) / errors
    assert abs(float(z.mean())) < 4 / 400**0.5
    assert 0.92 < float((z.abs() < 2).double().mean()) < 0.98


def test_both_bounds_hold_and_the_stated_one_is_rarely_positive():
    """20,000 random problems with exact quantities."""
    g = torch.Generator().manual_seed(2)
    count, positive = 20_000, {2: 0, 1: 0}
    scale = torch.empty(count, 1, dtype=torch.float64).uniform_(0, 2, generator=g)
    base = torch.randn(count, 4, generator=g, dtype=torch.float64) * 2
    alpha, proximal, pi = (
        (base + step * scale * torch.randn(count, 4, generator=g, dtype=torch.float64)).softmax(1)
        for step in (0, 0.3, 1)
    )
    reward = torch.where(
        torch.rand(count, 1, generator=g) < 0.5,
        torch.rand(count, 4, generator=g, dtype=torch.float64),
        torch.randint(0, 2, (count, 4), generator=g).double(),
    )
    mean = (alpha * reward).sum(1, keepdim=True)
    variance = (alpha * (reward - mean) ** 2).sum(1)
    s = (variance + 1e-4).sqrt()
    surrogate = (pi * (reward - mean)).sum(1) / s
    tv, tv_proximal = ((p - alpha).abs().sum(1) / 2 for p in (pi, proximal))
    gain = ((pi - proximal) * reward).sum(1)
    for factor in (2, 1):
        bound = F.improvement_bound(surrogate, s, tv, tv_proximal, factor)
        assert bool((bound <= gain + 1e-12).all())
        positive[factor] = int((bound > 0).sum())
    assert positive[2] <= 2
    assert positive[1] > 200
    kl = (alpha * (alpha / pi).log()).sum(1)
    assert bool((tv <= F.pinsker(kl) + 1e-12).all())


def autoregressive(alpha, pi):
    """Return exact quantities of all sequences of two policies, [V] and [V, V] and [V, V, V] of conditional tokens."""
    size, length = len(alpha[0]), len(alpha)
    sequences = list(itertools.product(range(size), repeat=length))
    tokens = torch.tensor(
        [[[float(p[t][sequence[: t + 1]]) for t in range(length)] for sequence in sequences] for p in (alpha, pi)],
        dtype=torch.float64,
    )
    largest_tv = max(float((p - q).abs().sum(-1).max()) / 2 for p, q in zip(pi, alpha, strict=True))
    largest_kl = max(float((q * (q / p).log()).sum(-1).max()) for p, q in zip(pi, alpha, strict=True))
    return tokens[0], tokens[1], largest_tv, largest_kl


def test_the_bound_of_trm_holds_and_is_often_better_than_theorem_1():
    """2,000 random policies over three tokens of three symbols, with exact quantities."""
    g = torch.Generator().manual_seed(3)
    gains, bounds, theorem = [], [], []
    for _ in range(2000):
        step = float(torch.rand((), generator=g)) * 0.8
        alpha, pi = [], []
        for t in range(3):
            logits = torch.randn((3,) * (t + 1), generator=g, dtype=torch.float64)
            moved = logits + step * torch.randn(logits.shape, generator=g, dtype=torch.float64)
            alpha.append(logits.softmax(-1))
            pi.append(moved.softmax(-1))
        under_alpha, under_pi, largest_tv, largest_kl = autoregressive(alpha, pi)
        reward = torch.randint(0, 2, (27,), generator=g).double()
        weight, ratio = under_alpha.prod(1), under_pi / under_alpha
        gain = float((under_pi.prod(1) - weight) @ reward)
        surrogate = float(weight @ ((ratio - 1).sum(1) * reward))
        tv = (weight[:, None] * (ratio - 1).abs() / 2).sum(0)
        whole_tv = ((under_pi.prod(1) - weight).abs().sum() / 2)[None]
        exact = tv[None], torch.tensor([3]), torch.tensor([largest_tv]), torch.tensor([largest_kl]), whole_tv
        penalty = float(F.trust_region_penalty(*exact))
        assert abs(gain - surrogate) <= penalty + 1e-12
        mean = weight @ reward
        s = torch.sqrt(weight @ (reward - mean) ** 2 + 1e-4)
        gains.append(gain)
        bounds.append(surrogate - penalty)
        theorem.append(float(F.improvement_bound(gain / s, s, whole_tv, torch.zeros(1), 1.0)))
    found, stated = torch.tensor(bounds), torch.tensor(theorem)
    assert int((found > 0).sum()) > 20
    assert 100 < int((found > stated).sum()) < 1900  # neither is always the better one


def test_the_penalty_of_trm_equals_a_loop():
    g = torch.Generator().manual_seed(4)
    for _ in range(50):
        prompts, width = 3, 7
        tv = torch.rand(prompts, width, generator=g, dtype=torch.float64) * 0.4
        lengths = torch.randint(1, width + 1, (prompts,), generator=g)
        tv[torch.arange(width) >= lengths[:, None]] = 0.0
        eps, delta, whole = (torch.rand(prompts, generator=g, dtype=torch.float64) for _ in range(3))
        found = F.trust_region_penalty(tv, lengths, eps, delta, whole)
        for p in range(prompts):
            e, d, w, length = float(eps[p]), float(delta[p]), float(whole[p]), int(lengths[p])
            adaptive = marginal = 0.0
            for t in range(1, length + 1):
                adaptive += 4 * float(tv[p, t - 1]) * min(1, (length - t) * e, math.sqrt((length - t) * d / 2))
                shift = min(1, (t - 1) * e, math.sqrt((t - 1) * d / 2), w)
                marginal += 4 * min(1, e, math.sqrt(d / 2)) * shift
            assert float(found[p]) == pytest.approx(min(adaptive, marginal), abs=1e-12)


def test_terms_of_trm_equal_loops():
    """Two groups of three completions with prompts of different lengths, so that the t-th tokens are not aligned."""
    g = torch.Generator().manual_seed(5)
    behaviour = -torch.rand(6, 9, generator=g, dtype=torch.float64) - 0.1
    log_ratio = 0.4 * torch.randn(6, 9, generator=g, dtype=torch.float64)
    starts, ends = [1, 3, 2, 0, 4, 4], [5, 9, 3, 6, 8, 5]
    mask = torch.tensor([[start <= t < end for t in range(9)] for start, end in zip(starts, ends, strict=True)])
    rewards = torch.rand(2, 3, generator=g, dtype=torch.float64)
    found = F.trust_region_terms(log_ratio, behaviour, mask, rewards)
    for p in range(2):
        rows = range(3 * p, 3 * p + 3)
        summed, tv, kl_max, tv_max, whole = [], [0.0] * 9, 0.0, 0.0, 0.0
        for row in rows:
            ratios = log_ratio[row, starts[row] : ends[row]].exp().tolist()
            probabilities = behaviour[row, starts[row] : ends[row]].exp().tolist()
            summed.append(sum(ratios) - len(ratios))
            whole += abs(math.prod(ratios) - 1) / 2 / 3
            for t, (ratio, a) in enumerate(zip(ratios, probabilities, strict=True)):
                tv[t] += abs(ratio - 1) / 2 / 3
                rest = max(1 - a * ratio, 1e-8)
                kl_max = max(kl_max, a * math.log(1 / ratio) + (1 - a) * math.log((1 - a) / rest))
                tv_max = max(tv_max, abs(a * ratio - a))
        mean = sum(rewards[p].tolist()) / 3
        surrogate = sum(x * (r - mean) for x, r in zip(summed, rewards[p].tolist(), strict=True)) / 2
        length = max(ends[row] - starts[row] for row in rows)
        exact = (
            torch.tensor([tv]).double(),
            torch.tensor([length]),
            *(torch.tensor([x]) for x in (tv_max, kl_max, whole)),
        )
        expected = {"surrogate_trm": surrogate, "kl_token_max": kl_max, "tv_token_max": tv_max}
        expected["penalty_trm"] = float(F.trust_region_penalty(*exact))
        for name, value in expected.items():
            assert float(found[name][p]) == pytest.approx(value, rel=1e-5), name


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_terms_equal_loops(size, prompts, seed):
    g = torch.Generator().manual_seed(seed)
    log_ratio, proximal = (torch.randn(prompts, size, generator=g, dtype=torch.float64) * 0.5 for _ in range(2))
    rewards = torch.rand(prompts, size, generator=g, dtype=torch.float64)
    terms = F.improvement_terms(log_ratio, proximal, rewards, eps=1e-3)
    for p in range(prompts):
        r, w, b = rewards[p].tolist(), log_ratio[p].exp().tolist(), proximal[p].exp().tolist()
        mean = sum(r) / size
        variance = sum((x - mean) ** 2 for x in r) / size
        smooth = (sum(r) + 1) / (size + 2)
        expected = {"gain": 0.0, "tv": 0.0, "tv_proximal": 0.0}
        k3 = k3_proximal = gain_proximal = 0.0
        for i in range(size):
            others = (sum(r) - r[i]) / (size - 1)  # leave one out, which gives the same estimate
            expected["gain"] += w[i] * (r[i] - others) / size
            gain_proximal += b[i] * (r[i] - others) / size
            expected["tv"] += abs(w[i] - 1) / 2 / size
            expected["tv_proximal"] += abs(b[i] - 1) / 2 / size
            k3 += (w[i] - 1 - math.log(w[i])) / size
            k3_proximal += (b[i] - 1 - math.log(b[i])) / size
        expected["gain_rollout"] = expected["gain"] - gain_proximal
        expected["tv_pinsker"], expected["tv_proximal_pinsker"] = math.sqrt(k3 / 2), math.sqrt(k3_proximal / 2)
        for name, s in (("", math.sqrt(variance + 1e-3)), ("_bernoulli", math.sqrt(smooth * (1 - smooth) + 1e-3))):
            expected[f"s{name}"], expected[f"coefficient{name}"] = s, (1 - s) / s
            surrogate = expected[f"surrogate{name}"] = expected["gain"] / s
            for c in (2, 1):
                penalty = (1 - s) / s * expected["tv"] + expected["tv_proximal"]
                expected[f"bound_{c}{name}"] = surrogate - c * penalty
                if not name:
                    penalty = (1 - s) / s * expected["tv_pinsker"] + expected["tv_proximal_pinsker"]
                    expected[f"bound_{c}_pinsker"] = surrogate - c * penalty
        assert expected.keys() == terms.keys()
        for name, value in expected.items():
            assert float(terms[name][p]) == pytest.approx(value, abs=1e-9, rel=1e-9), name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_divergences_equal_loops(logs):
    n, w = len(logs), [math.exp(x) for x in logs]
    log_ratio = torch.tensor(logs, dtype=torch.float64)
    expected = {
        "k3_of_ratio": sum(x - 1 - math.log(x) for x in w) / n,
        "total_variation": sum(abs(x - 1) / 2 for x in w) / n,
        "chi_squared": sum((x - 1) ** 2 for x in w) / n,
        "effective_sample_size": sum(w) ** 2 / (n * sum(x * x for x in w)),
    }
    for name, value in expected.items():
        assert float(getattr(F, name)(log_ratio).mean()) == pytest.approx(value, abs=1e-9), name


def test_expectations_are_the_exact_divergences():
    log_ratio = (PI / ALPHA).log()
    for name, value in {
        "k3_of_ratio": (ALPHA * (ALPHA / PI).log()).sum(),
        "total_variation": (PI - ALPHA).abs().sum() / 2,
        "chi_squared": ((PI - ALPHA) ** 2 / ALPHA).sum(),
    }.items():
        assert float(ALPHA @ getattr(F, name)(log_ratio)) == pytest.approx(float(value), abs=1e-12), name


def test_terms_without_overlap_are_finite():
    log_ratio = F.completion_log_ratio(torch.tensor([[-500.0, 1.0], [500.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool))
    assert log_ratio.tolist() == [-20, 20]
    terms = F.improvement_terms(log_ratio[None], torch.zeros(1, 2).double(), torch.tensor([[0.0, 1.0]]).double())
    assert all(bool(value.isfinite().all()) for value in terms.values())


def test_bounds_of_long_completions_are_those_of_the_page():
    """Tokens that are coins: the total variation of T of them is that of two binomial distributions."""
    epsilon, half = 1e-3, torch.tensor([0.5], dtype=torch.float64)
    page = (Path(__file__).parents[2] / "tutorials/pages/monitor.md").read_text(encoding="utf-8")
    for length in (10, 100, 1_000, 10_000):
        counts = torch.arange(length + 1, dtype=torch.float64)
        alpha, pi = (
            torch.distributions.Binomial(length, probs=p).log_prob(counts).exp() for p in (half, half + epsilon)
        )
        tv = (pi - alpha).abs().sum(0, keepdim=True) / 2
        bounds = [F.improvement_bound(0 * half, half, tv, 0 * half, factor=c) for c in (2.0, 1.0)]
        tokens = torch.full((1, length), epsilon, dtype=torch.float64)
        kl = F.binary_kl((half + epsilon).log(), half.log())
        bounds.append(-F.trust_region_penalty(tokens, torch.tensor([length]), 0 * half + epsilon, kl, tv))
        assert f"| {length:,} | {' | '.join(f'{float(bound):.4f}' for bound in bounds)} |" in page
