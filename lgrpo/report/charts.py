"""The charts of a page and their sections.

To add a chart, add a ``Chart`` to a section of ``SECTIONS``. A metric that has none gets a chart to itself, in the
section that ``SECTION_OF_PREFIX`` names, unless ``NOT_DRAWN`` excludes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Chart:
    """Curves that share one pair of axes."""

    title: str
    note: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    """Label in the legend by name of the metric."""
    show_syncs: bool = False
    """Whether syncs are marked."""
    axis_min: float | None = None
    """Value that the vertical axis includes at its lower end, and ``axis_max`` at its upper end."""
    axis_max: float | None = None
    is_smoothed: bool = False
    """Whether the curves are smoothed unless the reader chooses otherwise."""


REWARD = Chart(
    title="Reward of rollouts",
    note="Mean over the completions of a rollout, before normalisation.",
    lines={"rollout/reward": "each rollout"},
    is_smoothed=True,
)
SECTIONS = {
    "Off-policy": [
        Chart(
            title="Lag",
            note="Optimizer steps between the weights that sampled a completion and the weights being trained.",
            lines={"train/lag": "mean", "train/lag_max": "largest"},
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="Ratio",
            note="Probability of a live token under the policy divided by its probability when it was sampled.",
            lines={"train/ratio_mean": "mean", "train/ratio_min": "smallest", "train/ratio_max": "largest"},
            show_syncs=True,
        ),
        Chart(
            title="Quantiles of the token ratio",
            note="Ratio that this share of live tokens does not exceed.",
            lines={f"train/ratio_q{q}": f"{int(q)} %" for q in ("01", "10", "50", "90", "99")},
            show_syncs=True,
        ),
        Chart(
            title="Spread of the ratio",
            note="Standard deviation over tokens: how far the policy has moved from the behaviour policy.",
            lines={"train/ratio_std": "deviation"},
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="Distance by lag",
            note="Mean of |log π_θ/π_α| over the live tokens in each range of lags.",
            lines={f"train/distance_lag_{lags}": lags for lags in ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-")},
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="Clip fraction",
            note="Share of live tokens without gradient because their ratio is outside the clip band, and share of all "
            "that are outside.",
            lines={
                "train/clip_fraction_low": "clipped below",
                "train/clip_fraction_high": "clipped above",
                "train/outside_band_fraction": "outside",
            },
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="KL",
            note="k3 estimate per token: from the behaviour policy and from the reference.",
            lines={"train/kl_behaviour": "from behaviour", "train/kl_reference": "from reference"},
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="Entropy",
            note="Entropy of the policy per live token, in nats.",
            lines={"train/entropy": "entropy"},
            show_syncs=True,
        ),
        Chart(
            title="Engine mismatch",
            note="Difference of the log-probabilities of engine and trainer while both have the same weights, and of "
            "the policy from itself in other micro-batches.",
            lines={
                "train/engine_mismatch_mean": "mean",
                "train/engine_mismatch_p95": "95 %",
                "train/engine_mismatch_p99": "99 %",
                "train/engine_mismatch_max": "largest",
                "train/self_mismatch_mean": "policy and itself, mean",
                "train/self_mismatch_max": "policy and itself, largest",
            },
        ),
    ],
    "Improvement": [
        Chart(
            title="Predicted and realised improvement",
            note="Change of the reward on held-out prompts from one sync to the next: predicted from samples of the "
            "old weights, and measured with the new ones.",
            lines={"calibration/predicted": "predicted", "calibration/realised": "realised"},
            show_syncs=True,
        ),
        Chart(
            title="Gain",
            note="Estimated improvement of the expected reward over the weights that sampled, and by this rollout's "
            "steps alone.",
            lines={"monitor/gain": "over the sampler", "monitor/gain_rollout": "by this rollout"},
            show_syncs=True,
        ),
        Chart(
            title="Lower bounds of the improvement",
            note="An improvement is guaranteed while a bound is above 0. A bound below -1 says nothing: rewards are "
            "between 0 and 1.",
            lines={
                "monitor/bound_1": "Theorem 1, factor 1",
                "monitor/bound_2": "Theorem 1, factor 2",
                "monitor/bound_trm": "TRM",
            },
            show_syncs=True,
        ),
        Chart(
            title="Informative bounds",
            note="Share of the prompts with unequal rewards whose bound is above -1.",
            lines={
                "monitor/bound_1_informative": "Theorem 1, factor 1",
                "monitor/bound_2_informative": "Theorem 1, factor 2",
                "monitor/bound_trm_informative": "TRM",
            },
            show_syncs=True,
            axis_min=0,
            axis_max=1,
        ),
        Chart(
            title="Total variation",
            note="Distance of the policy from the weights that sampled, over completions, and its upper bound by "
            "Pinsker's inequality.",
            lines={"monitor/tv": "estimate", "monitor/tv_pinsker": "Pinsker"},
            show_syncs=True,
            axis_min=0,
        ),
        Chart(
            title="Effective sample size",
            note="Share of the completions that count after weighting by ratios; 1 if the policy has not moved.",
            lines={"monitor/effective_sample_size": "share"},
            show_syncs=True,
            axis_min=0,
            axis_max=1,
        ),
        Chart(
            title="Quantiles of the ratio",
            note="Ratio of whole completions: probability under the policy divided by that when it was sampled.",
            lines={f"monitor/ratio_q{q}": f"{int(q)} %" for q in ("01", "10", "50", "90", "99")},
            show_syncs=True,
        ),
    ],
    "Rollouts": [
        Chart(
            title="Shares of completions",
            note="In groups of equal rewards; with a loss; cut at the length limit; sampled again; continued.",
            lines={
                "rollout/zero_variance_fraction": "zero variance",
                "rollout/live_fraction": "live",
                "rollout/truncated_fraction": "truncated",
                "rollout/resampled_fraction": "resampled",
                "rollout/continued_fraction": "continued",
            },
            axis_min=0,
        ),
        Chart(
            title="Length of completions",
            note="Mean number of tokens.",
            lines={"rollout/completion_length": "tokens"},
            axis_min=0,
        ),
        Chart(
            title="Spread of the reward",
            note="Standard deviation over completions.",
            lines={"rollout/reward_std": "deviation"},
            axis_min=0,
        ),
    ],
    "Optimisation": [
        Chart(title="Loss", note="Of one optimizer step, over all micro-batches.", lines={"train/loss": "loss"}),
        Chart(
            title="Gradient norm",
            note="Norm of the gradient of a step before clipping.",
            lines={"train/grad_norm": "norm"},
            axis_min=0,
        ),
        Chart(
            title="Learning rate",
            note="Learning rate of a step.",
            lines={"train/learning_rate": "rate"},
            axis_min=0,
        ),
        Chart(
            title="Live tokens", note="Number of tokens with a loss.", lines={"train/live_tokens": "tokens"}, axis_min=0
        ),
        Chart(
            title="Skipped steps",
            note="1 if there was nothing to train on.",
            lines={"train/step_skipped": "skipped"},
            axis_min=0,
        ),
    ],
    "Time": [
        Chart(
            title="Idle share",
            note="Share of the time since the previous rollout: trainer waiting, engine not generating.",
            lines={"time/trainer_idle_share": "trainer", "time/engine_idle_share": "engine"},
            axis_min=0,
            axis_max=1,
        ),
        Chart(
            title="Stage seconds",
            note="Seconds of one rollout in each stage; the update is one optimizer step.",
            lines={f"time/{stage}": stage for stage in ("sync", "generate", "score", "wait", "update", "validate")},
            axis_min=0,
        ),
        Chart(
            title="Tokens per second",
            note="Sampled tokens of a rollout over the time since the previous rollout.",
            lines={"time/tokens_per_second": "tokens/s"},
            axis_min=0,
        ),
        Chart(
            title="Memory",
            note="GiB, largest of all ranks: peak of PyTorch's GPU memory, or resident memory without a GPU.",
            lines={"memory/gpu": "GPU", "memory/resident": "resident"},
            axis_min=0,
        ),
    ],
}
SECTION_OF_PREFIX = {
    "rollout": "Rollouts",
    "reward": "Rewards",
    "train": "Optimisation",
    "fault": "Faults",
    "time": "Time",
}
"""Section of a metric without a chart, by the prefix of its name."""
NOT_DRAWN = ("monitor/", "calibration/", "time/sampled_at", "time/clock")
"""Prefixes of metrics that are drawn only in the charts above, of which there are some forty, or only in gantt.js."""


def chart_sections(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the sections with charts for these metrics.

    Every name is in exactly one chart or drawn as a band, except for those in ``NOT_DRAWN``.
    """
    names = list(names)
    left = dict.fromkeys(names)
    sections = {"Learning": [*_take(left, [REWARD]), *_validation(left)]}
    sections |= {title: _take(left, charts) for title, charts in SECTIONS.items()}
    for name in list(left):
        if name.endswith("_stderr") and name.removesuffix("_stderr") in names:
            del left[name]  # drawn as a band
    for name in left:
        if name.startswith(NOT_DRAWN):
            continue
        group, _, rest = name.rpartition("/")
        section = SECTION_OF_PREFIX.get(name.partition("/")[0], group.capitalize() or "Other")
        title = rest[:1].upper() + rest[1:].replace("_", " ")
        chart = Chart(title=title, lines={name: name})
        sections.setdefault(section, []).append(chart)
    order = ["Learning", "Off-policy", "Improvement", "Rollouts", "Rewards", "Optimisation"]
    titles = [*order, *(title for title in sections if title not in (*order, "Time")), "Time"]
    return [{"title": title, "charts": [*map(asdict, sections[title])]} for title in titles if sections.get(title)]


def _take(left: dict[str, None], charts: Iterable[Chart]) -> list[Chart]:
    """Return the charts that have metrics in ``left``, restricted to these, and remove the metrics from ``left``."""
    taken = []
    for chart in charts:
        lines = {name: label for name, label in chart.lines.items() if name in left}
        for name in lines:
            del left[name]
        if lines:
            taken.append(Chart(**{**asdict(chart), "lines": lines}))
    return taken


def _validation(left: dict[str, None]) -> list[Chart]:
    """Return charts of pass@k, maj@k and the gain over the reference for every evaluated task."""
    charts = []
    groups = dict.fromkeys(name.rpartition("/")[0] for name in left if "@" in name.rpartition("/")[2])
    for group in groups:
        problems = {"val": "held-out problems", "test": "test problems"}.get(group, group.removeprefix("val/"))
        for kind, note in (
            ("pass", "Probability that at least one of k samples is correct, mean over problems."),
            ("maj", "Probability that the most frequent answer of k samples is correct."),
        ):
            start = f"{group}/{kind}@"
            names = sorted((n for n in left if n.startswith(start) and n.removeprefix(start).isdigit()), key=_samples)
            lines = {name: f"{kind}@{_samples(name)}" for name in names}
            charts += _take(
                left, [Chart(title=f"{kind}@k, {problems}", note=note, lines=lines, axis_min=0, axis_max=1)]
            )
        gain = Chart(
            title=f"Gain over the reference, {problems}",
            note="pass@1 of the policy minus pass@1 of the reference.",
            lines={f"{group}/pass@1_over_reference": "gain"},
        )
        charts += _take(left, [gain])
    return charts


def _samples(name: str) -> int:
    return int(name.rpartition("@")[2])
