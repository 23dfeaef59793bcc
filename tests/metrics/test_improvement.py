"""Metrics of the improvement monitor."""

from __future__ import annotations

import pytest
import torch

from lgrpo.metrics import CalibrationMetrics, ImprovementMetrics, LagHistogram, OffPolicyMetrics


def groups(prompts=6, size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 2, (prompts, size), generator=g).double()
    rewards[0] = 1.0
    ratios = [0.3 * torch.randn(prompts, size, generator=g, dtype=torch.float64) for _ in range(2)]
    return {"log_ratio": ratios[0], "proximal_log_ratio": ratios[1], "rewards": rewards}


def test_batches_give_the_same_metrics_as_the_whole():
    whole, pieces, data = ImprovementMetrics(), ImprovementMetrics(), groups()
    whole.update(**data)
    for rows in ([0, 1], [2], [], [3, 4, 5]):
        pieces.update(**{name: value[rows] for name, value in data.items()})
    assert {n: float(v) for n, v in pieces.compute().items()} == {n: float(v) for n, v in whole.compute().items()}


def test_zero_variance_groups_are_left_out_of_terms_with_s():
    data = groups()
    varied = torch.tensor([len(set(row.tolist())) > 1 for row in data["rewards"]])
    assert 0 < int(varied.sum()) < 6
    metric, apart = ImprovementMetrics(), ImprovementMetrics()
    metric.update(**data)
    apart.update(**{name: value[varied] for name, value in data.items()})
    metrics, expected = metric.compute(), apart.compute()
    assert float(metrics["zero_variance_fraction"]) == pytest.approx(float((~varied).double().mean()))
    for name in ("s", "coefficient", "surrogate", "bound_2", "bound_1_positive", "bound_2_bernoulli_stderr"):
        assert float(metrics[name]) == pytest.approx(float(expected[name])), name
    assert float(metrics["gain_varied"]) == pytest.approx(float(expected["gain"]))
    assert float(metrics["gain"]) == pytest.approx(float(expected["gain"] * varied.double().mean()))
    assert float(metrics["tv"]) != pytest.approx(float(expected["tv"]))


def test_zero_variance_alone_and_no_groups_give_fewer_metrics():
    metric, data = ImprovementMetrics(), groups()
    data["rewards"].fill_(1.0)
    metric.update(**data)
    metrics = metric.compute()
    assert float(metrics["gain"]) == 0
    assert float(metrics["zero_variance_fraction"]) == 1
    assert "bound_2" not in metrics
    metric.reset()
    metric.update(**{name: value[:0] for name, value in data.items()})
    assert metric.compute() == {}


def test_rewards_outside_0_and_1_have_no_bound():
    metric, data = ImprovementMetrics(), groups()
    data["rewards"] *= 2
    metric.update(**data)
    names = metric.compute().keys()
    assert {"gain", "s", "tv_pinsker"} <= names
    assert not any(name.startswith("bound") or "bernoulli" in name for name in names)


def test_the_bound_of_trm_and_which_bounds_are_informative():
    metric, data = ImprovementMetrics(), groups()
    terms = {name: torch.linspace(0.0, 0.5, 6) for name in ("surrogate_trm", "penalty_trm")}
    terms |= {"kl_token_max": torch.ones(6), "tv_token_max": torch.ones(6)}
    terms["penalty_trm"] = torch.tensor([0.7, 0.7, 9.0, 0.7, 9.0, 0.7])
    for rows in (slice(0, 2), slice(2, 2), slice(2, 6)):
        own = {name: value[rows] for name, value in terms.items()}
        metric.update(**{name: value[rows] for name, value in data.items()}, trust_region=own)
    metrics = metric.compute()
    varied = torch.tensor([len(set(row.tolist())) > 1 for row in data["rewards"]])
    tv_proximal = (data["proximal_log_ratio"].exp() - 1).abs().mean(1) / 2
    bounds = (terms["surrogate_trm"] - terms["penalty_trm"] - tv_proximal)[varied]
    assert float(metrics["bound_trm"]) == pytest.approx(float(bounds.mean()))
    assert float(metrics["bound_trm_informative"]) == pytest.approx(float((bounds > -1).double().mean()))
    assert 0 < float(metrics["bound_trm_informative"]) < 1
    assert float(metrics["penalty_trm"]) == pytest.approx(float(terms["penalty_trm"].mean()))
    assert {"bound_1_informative", "bound_2_informative", "bound_trm_positive", "bound_trm_stderr"} <= metrics.keys()
    data["rewards"] *= 2
    metric.reset()
    metric.update(**data, trust_region=terms)
    assert not any(name.startswith("bound") for name in metric.compute())


def test_clip_fractions_are_split_by_the_sign_of_the_advantage():
    metric = OffPolicyMetrics(clip_low=0.2, clip_high=0.3)
    ratio = torch.tensor([[1.25, 1.35, 0.5, 9.0], [0.7, 0.85, 1.5, 9.0]])
    mask = torch.tensor([[True, True, True, False]] * 2)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    metric.update(log_ratio=ratio.log(), mask=mask, advantages=advantages)
    metric.update(log_ratio=ratio[:0].log(), mask=mask[:0], advantages=advantages[:0])
    metrics = metric.compute()
    assert float(metrics["clip_fraction_positive"]) == pytest.approx(1 / 3)  # 1.35
    assert float(metrics["clip_fraction_negative"]) == pytest.approx(1 / 3)  # 0.7
    assert float(metrics["clip_fraction"]) == pytest.approx(2 / 6)
    assert float(metrics["ratio_max"]) == pytest.approx(0.7 * 0.85 * 1.5, rel=1e-5)


def test_lags_are_counted_in_buckets():
    metric = LagHistogram()
    metric.update(torch.tensor([0, 1, 2, 3, 4, 7, 8]))
    metric.update(torch.tensor([15, 16, 31, 32, 1000]))
    counts = {name: round(12 * float(fraction)) for name, fraction in metric.compute().items()}
    assert list(counts.values()) == [1, 1, 2, 2, 2, 2, 2]


def test_calibration_compares_the_same_prompts():
    metric = CalibrationMetrics()
    before, after = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    metric.update(log_ratio=torch.tensor([[1.5, 0.5], [0.5, 1.5]]).log(), before=before, after=after)
    metrics = {name: float(value) for name, value in metric.compute().items()}
    assert metrics["predicted"] == pytest.approx(0.5)
    assert metrics["realised"] == pytest.approx(0.5)
    assert metrics["error"] == pytest.approx(0, abs=1e-6)
    assert metrics["error_stderr"] == pytest.approx(0, abs=1e-6)
