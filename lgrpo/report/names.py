"""The names of the metrics that a run logs, so that a misspelt name is found before the run starts."""

from __future__ import annotations

from collections.abc import Mapping

_ROLLOUT = [
    "reward",
    "reward_std",
    "reward_stderr",
    "zero_variance_fraction",
    "completion_length",
    "live_fraction",
    "recorded_fraction",
    "resampled_fraction",
    "continued_fraction",
    "unfinished_groups",
    "dropped_groups",
    "truncated_fraction",
    "kept_tokens",
    "kept_incomplete",
    "turns",
    "observed_length",
    "dropped_observations",
    "turn_signal_fraction",
    "model_errors",
    "late_waiting",
    "late_joined",
    "late_dropped",
]
_REWARD = ["failures", "timeouts", "crashes", "memory", "output", "errors"]
_ENVIRONMENT = ["failures", "timeouts", "crashes", "memory", "output", "errors"]
_TRAIN = [
    "loss",
    "live_tokens",
    "step_skipped",
    "grad_norm",
    "learning_rate",
    "effective_sample_size",
    "gradient_cosine",
    "gradient_kept",
    "lag",
    "lag_max",
    "ratio_mean",
    "ratio_std",
    "ratio_min",
    "ratio_max",
    "ratio_q01",
    "ratio_q10",
    "ratio_q50",
    "ratio_q90",
    "ratio_q99",
    "clip_fraction_low",
    "clip_fraction_high",
    "outside_band_fraction",
    "kl_behaviour",
    "kl_reference",
    "kl_teacher",
    "engine_mismatch_mean",
    "engine_mismatch_p95",
    "engine_mismatch_p99",
    "engine_mismatch_max",
    "engine_outside_band_fraction",
    "self_mismatch_mean",
    "self_mismatch_p95",
    "self_mismatch_p99",
    "self_mismatch_max",
    "self_outside_band_fraction",
    "entropy",
]
_TRAIN += [f"distance_lag_{lags}" for lags in ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-")]
_TIME = [
    "sync",
    "generate",
    "score",
    "wait",
    "update",
    "validate",
    "trainer_idle_share",
    "engine_idle_share",
    "tokens_per_second",
    "sampled_at",
    "clock",
    "engine_recovery",
    "environment",
    "monitor",
    "calibration",
    "divergence",
]
_MEMORY = ["gpu", "resident"]
_FAULT = ["engine_failures", "nonfinite_steps", "checkpoint_writes", "file_writes", "logger_writes"]
_MONITOR = ["gain", "gain_varied", "gain_rollout", "zero_variance_fraction"]
_MONITOR += [f"{term}{of_s}" for term in ("s", "coefficient", "surrogate") for of_s in ("", "_bernoulli")]
_MONITOR += [f"{term}{of_tv}" for term in ("tv", "tv_proximal") for of_tv in ("", "_pinsker")]
_MONITOR += [f"bound_{factor}{kind}" for factor in (2, 1) for kind in ("", "_bernoulli", "_pinsker")]
_MONITOR += ["surrogate_trm", "penalty_trm", "bound_trm", "kl_token_max", "tv_token_max"]
_MONITOR += ["bound_2_positive", "bound_2_informative", "kl", "kl_k3", "tv_rms", "chi_squared", "effective_sample_size"]
_MONITOR += ["ratio_q01", "ratio_max", "clip_fraction_positive", "clip_fraction_negative", "clip_fraction", "lag_0"]
_CALIBRATION = ["predicted", "realised", "error", "reward"]
_SYNC = ["divergence"]
_JUDGE = [
    "unreadable_fraction",
    "unanimous_fraction",
    "vote_std",
    "order_change_fraction",
    "cached_fraction",
    "seconds",
]
_CURRICULUM = ["measured_fraction", "in_band_fraction", "retired_fraction"]
_VALIDATION = ["pass@1", "pass@1_stderr", "pass@1_over_reference", "reward_failures"]


def metric_names(num_samples: Mapping[str, int]) -> list[str]:
    """Return every metric of ``tutorials/pages/metrics.md`` except the parts of a reward (``reward/NAME``).

    Args:
        num_samples: Samples per problem of each validated task, by name; "" is the name of the run's task.

    >>> [name for name in metric_names({"": 5, "aime": 2}) if "j@" in name or "s@" in name and "1" not in name]
    ['val/pass@2', 'val/pass@4', 'val/pass@5', 'val/maj@4', 'val/maj@5', 'val/aime/pass@2']
    """
    groups = {"rollout": _ROLLOUT, "reward": _REWARD, "train": _TRAIN, "time": _TIME, "memory": _MEMORY}
    groups |= {
        "environment": _ENVIRONMENT,
        "fault": _FAULT,
        "monitor": _MONITOR,
        "calibration": _CALIBRATION,
        "sync": _SYNC,
        "curriculum": _CURRICULUM,
        "judge": _JUDGE,
    }
    for task, count in num_samples.items():
        several = sorted({2**n for n in range(1, count.bit_length())} | ({count} - {1}))
        at_k = [f"pass@{k}" for k in several] + [f"maj@{k}" for k in several if k > 2]
        groups[f"val/{task}" if task else "val"] = [*_VALIDATION, *at_k]
    return [f"{group}/{name}" for group, names in groups.items() for name in names]
