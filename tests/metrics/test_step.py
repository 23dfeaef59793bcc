"""Metrics of a step, compared with loops over its tokens."""

from __future__ import annotations

import math

import pytest
import torch

from lgrpo.metrics.step import StepMetrics


def micro_batch(seed, device="cpu"):
    """Return rows of every kind: fresh, old, recorded with and without log-probabilities, and one that is not live.

    If the behaviour policy is unknown, a loss may still have a ratio, as in one token here.
    """
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 7, generator=draw) < 0.6
    mask[4] = False
    mask[:4, 2] = True
    sampled = mask.clone()
    sampled[0, 3:] = True  # sampled, but not in the loss
    known = torch.ones(5, 7, dtype=torch.bool)
    known[3] = False
    log_ratio = torch.randn(5, 7, generator=draw).where(known, torch.nan)
    ratio = log_ratio.exp()
    ratio[3, 2] = 1.5
    batch = {
        "loss": torch.randn((), generator=draw),
        "mask": mask,
        "sampled": sampled,
        "log_ratio": log_ratio.where(sampled, torch.nan),  # values outside the mask must not count
        "ratio": ratio.where(mask, torch.inf),
        "clipped_low": torch.rand(5, 7, generator=draw) < 0.3,
        "clipped_high": (torch.rand(5, 7, generator=draw) < 0.3).float(),
        "outside_band": torch.rand(5, 7, generator=draw) < 0.3,
        "entropy": torch.rand(5, 7, generator=draw).where(mask, torch.nan),
        "kl_reference": torch.rand(5, 7, generator=draw).where(mask, torch.nan),
        "kl_teacher": torch.rand(5, 7, generator=draw).where(mask, torch.nan),
        "lag": torch.tensor([0.0, 3.0, torch.nan, torch.nan, 9.0]),
        "behaviour_known": known,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def by_loops(batches):
    tokens = [(b, i, j) for b in batches for i, j in b["mask"].nonzero().tolist()]
    with_ratio = [float(b["ratio"][i, j]) for b, i, j in tokens if not b["ratio"][i, j].isnan()]
    log_ratios = [float(b["log_ratio"][i, j]) for b, i, j in tokens if b["behaviour_known"][i, j]]
    sampled = [(b, i, j) for b in batches for i, j in b["sampled"].nonzero().tolist()]
    fresh = [abs(float(b["log_ratio"][i, j])) for b, i, j in sampled if b["lag"][i] == 0]
    lags = [float(b["lag"][i]) for b in batches for i in range(5) if b["mask"][i].any() and not b["lag"][i].isnan()]

    def mean(numbers):
        return sum(numbers) / len(numbers)

    all_tokens = {
        name: mean([float(b[key][i, j]) for b, i, j in tokens])
        for name, key in {
            "clip_fraction_low": "clipped_low",
            "clip_fraction_high": "clipped_high",
            "entropy": "entropy",
            "kl_reference": "kl_reference",
            "kl_teacher": "kl_teacher",
        }.items()
    }
    band = [(b["lag"][i], float(b["outside_band"][i, j])) for b, i, j in tokens if not b["ratio"][i, j].isnan()]
    return all_tokens | {
        "outside_band_fraction": mean([outside for _, outside in band]),
        "engine_outside_band_fraction": mean([outside for lag, outside in band if lag == 0]),
        "loss": sum(float(b["loss"]) for b in batches),
        "live_tokens": len(tokens),
        "engine_mismatch_mean": mean(fresh),
        "engine_mismatch_max": max(fresh),
        "lag": mean(lags),
        "lag_max": max(lags),
        "ratio_mean": mean(with_ratio),
        "ratio_std": mean([(r - mean(with_ratio)) ** 2 for r in with_ratio]) ** 0.5,
        "ratio_min": min(with_ratio),
        "ratio_max": max(with_ratio),
        "kl_behaviour": mean([math.exp(x) - 1 - x for x in log_ratios]),
        **by_lag(tokens),
    }


def by_lag(tokens):
    """Return the mean of |log π_θ/π_α| of live tokens with lags 0, and 2 or 3."""
    live = [(float(b["lag"][i]), abs(float(b["log_ratio"][i, j]))) for b, i, j in tokens if b["behaviour_known"][i, j]]
    ranges = {"0": (0, 0), "2-3": (2, 3)}
    found = {name: [x for lag, x in live if low <= lag <= high] for name, (low, high) in ranges.items()}
    return {f"distance_lag_{name}": sum(values) / len(values) for name, values in found.items()}


def without_quantiles(metrics):
    """Return the metrics that equal a loop over tokens: quantiles are those of bins."""
    return {name: value for name, value in metrics.items() if not name.startswith("ratio_q")}


def test_metrics_equal_loops_over_tokens():
    metrics, batches = StepMetrics(), [micro_batch(seed) for seed in range(3)]
    for batch in batches:
        metrics.update(**batch)
    assert without_quantiles(metrics.compute()) == pytest.approx(by_loops(batches), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 0.1, 2.0])
def test_quantiles_are_those_of_the_whole_step(scale):
    """Micro-batches have different ratios, so that no mean of their quantiles is right."""
    metrics, log_ratios = StepMetrics(), []
    for shift in range(3):
        batch = micro_batch(shift)
        draw = torch.Generator().manual_seed(shift)
        batch["ratio"] = (scale * (torch.randn(5, 7, generator=draw) + shift)).exp().where(batch["mask"], torch.nan)
        log_ratios.append(batch["ratio"][batch["mask"]].log())
        metrics.update(**batch)
    values, found = torch.cat(log_ratios).double().sort().values, metrics.compute()
    for share in (1, 10, 50, 90, 99):
        exact = float(values[max(0, math.ceil(share / 100 * len(values)) - 1)])
        assert math.log(found[f"ratio_q{share:02d}"]) == pytest.approx(exact, rel=0.04), share


def test_a_loss_without_a_band():
    metrics = StepMetrics()
    metrics.update(**micro_batch(0) | {"outside_band": None})
    assert "outside_band_fraction" not in metrics.compute()


def test_percentile_of_many_tokens():
    """3 and 15 of 300 fresh tokens are above the 99th and the 95th percentile; tokens with a lag do not count."""
    batch = micro_batch(0) | {"lag": torch.tensor([0.0, 0.0, 0.0, 7.0])}
    shape = 4, 100
    log_ratio = torch.linspace(-3, 0, 400).view(shape)[:, torch.randperm(100)].flip(0)
    for name in ("clipped_low", "clipped_high", "outside_band", "entropy", "kl_reference", "kl_teacher"):
        batch[name] = torch.zeros(shape)
    everywhere = torch.ones(shape, dtype=torch.bool)
    batch |= dict.fromkeys(("mask", "sampled", "behaviour_known"), everywhere)
    batch |= {"log_ratio": log_ratio, "ratio": log_ratio.exp()}
    metrics = StepMetrics()
    metrics.update(**batch)
    fresh = log_ratio[:3].abs().flatten().sort().values
    found = metrics.compute()
    assert found["engine_mismatch_p99"] == pytest.approx(float(fresh[-4]))
    assert found["engine_mismatch_p95"] == pytest.approx(float(fresh[-16]))


def test_missing_reference_and_missing_live_tokens_are_handled():
    metrics, batch = StepMetrics(), micro_batch(0)
    metrics.update(**batch | {"kl_reference": None})
    assert metrics.compute()["kl_reference"] == 0
    metrics.reset()
    nothing = torch.zeros(5, 7, dtype=torch.bool)
    metrics.update(**batch | {"mask": nothing, "sampled": nothing})
    assert metrics.compute() == {"loss": pytest.approx(float(batch["loss"])), "live_tokens": 0}
    metrics.update(**batch | {"mask": nothing})
    assert metrics.compute()["engine_mismatch_mean"] > 0


def test_empty_micro_batch_adds_nothing():
    metrics, batch = StepMetrics(), micro_batch(0)
    metrics.update(**{name: tensor[:0] if tensor.ndim else tensor for name, tensor in batch.items()})
    metrics.update(**batch)
    assert without_quantiles(metrics.compute()) == pytest.approx(
        by_loops([batch]) | {"loss": 2 * float(batch["loss"])}, rel=1e-5
    )


def test_recording_without_log_probabilities_has_no_ratio_metrics():
    metrics, batch = StepMetrics(), micro_batch(0)
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[3] = batch["mask"][3]
    mask[3, 2] = False
    metrics.update(**batch | {"mask": mask, "sampled": mask})
    absent = {"lag", "ratio_mean", "kl_behaviour", "engine_mismatch_mean"}
    assert not absent & metrics.compute().keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_does_not_synchronise_with_the_gpu():
    metrics, batches = StepMetrics().cuda(), [micro_batch(seed, "cuda") for seed in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            metrics.update(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert without_quantiles(metrics.compute()) == pytest.approx(
        by_loops([micro_batch(seed) for seed in range(3)]), rel=1e-5
    )


def test_lags_of_tokens():
    whole = micro_batch(0)
    spread = whole | {"lag": whole["lag"][:, None].expand(5, 7)}
    metrics = [StepMetrics(), StepMetrics()]
    for metric, batch in zip(metrics, (whole, spread), strict=True):
        metric.update(**batch)
    assert metrics[0].compute() == pytest.approx(metrics[1].compute()), "one lag for all tokens is the same either way"
    lag = spread["lag"].clone()
    lag[0, 2:] = 4.0  # continued from later weights
    metrics[1].reset()
    metrics[1].update(**spread | {"lag": lag})
    found, mask = metrics[1].compute(), whole["mask"]
    assert found["lag"] == pytest.approx((float(lag[0][mask[0]].mean()) + 3) / 2)
    assert found["lag_max"] == 4
    later = (mask[0] & (lag[0] == 4)).nonzero().flatten()
    assert found["distance_lag_4-7"] == pytest.approx(float(whole["log_ratio"][0, later].abs().mean()))
    fresh = (whole["sampled"][0] & (lag[0] == 0)).nonzero().flatten()
    assert found["engine_mismatch_mean"] == pytest.approx(float(whole["log_ratio"][0, fresh].abs().mean()))
