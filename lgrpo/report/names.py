"""The names a run logs, known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_ROLLOUT = [
    "reward",
    "reward_std",
    "zero_variance_fraction",
    "completion_length",
    "live_fraction",
    "recorded_fraction",
    "resampled_fraction",
    "truncated_fraction",
    "late_waiting",
    "late_joined",
    "late_dropped",
]
_REWARD = ["failures", "timeouts", "crashes", "memory", "output", "errors"]
_TRAIN = [
    "loss",
    "live_tokens",
    "step_skipped",
    "lag",
    "lag_max",
    "ratio_mean",
    "ratio_std",
    "ratio_min",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_behaviour",
    "kl_reference",
    "engine_mismatch_mean",
    "engine_mismatch_max",
    "entropy",
]
_TIME = ["sync", "generate", "score", "wait", "update", "trainer_idle_share", "engine_idle_share"]
_VALIDATION = ["pass@1", "pass@1_stderr", "pass@1_over_reference"]


def metric_names(num_samples: int, benchmarks: Iterable[str] = ()) -> list[str]:
    """Every name the page of metrics has, the parts of a reward apart (``reward/NAME``), for a run's evaluation.

    >>> [name for name in metric_names(4) if "@" in name]
    ['val/pass@1', 'val/pass@1_stderr', 'val/pass@1_over_reference', 'val/pass@2', 'val/pass@4', 'val/maj@4']
    """
    powers = [2**n for n in range(1, num_samples.bit_length()) if 2**n <= num_samples]
    validation = [*_VALIDATION, *(f"pass@{k}" for k in powers), *(f"maj@{k}" for k in powers if k >= 4)]
    rooms = {"rollout": _ROLLOUT, "reward": _REWARD, "train": _TRAIN, "time": _TIME, "val": validation}
    rooms |= {f"val/{name}": validation for name in benchmarks}
    return [f"{room}/{name}" for room, names in rooms.items() for name in names]


def nearest(name: str, names: Sequence[str]) -> str:
    """The words "did you mean …?", where something is near.

    >>> nearest("val/pas@1", ["val/pass@1", "train/loss"])
    ': did you mean val/pass@1?'
    """
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(near)}?" if near else ""
