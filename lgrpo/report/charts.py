"""Which curves a page shows, and in which sections. A metric nobody thought of gets a chart of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SMOOTH = " (smoothed)"
"""Ends the name of a curve that is derived, not logged."""


@dataclass(kw_only=True)
class Chart:
    """Curves that share an axis."""

    title: str
    note: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    """Metric to label."""
    marks: bool = False
    """Whether the moments of syncs are marked."""
    least: float | None = None
    """The axis reaches down to this, and up to ``most``, whatever the values."""
    most: float | None = None


@dataclass(kw_only=True)
class Section:
    """Charts under a heading."""

    title: str
    note: str = ""
    charts: list[Chart] = field(default_factory=list)


REWARD = Chart(
    title="Reward of rollouts",
    note="Mean over a rollout's completions, as the reward gave it.",
    lines={"rollout/reward": "each rollout", "rollout/reward" + SMOOTH: "smoothed"},
)
SECTIONS = {
    "Off-policy": [
        Chart(
            title="Lag",
            note="Optimizer steps between the weights that sampled and those being trained.",
            lines={"train/lag": "mean", "train/lag_max": "largest"},
            marks=True,
            least=0,
        ),
        Chart(
            title="Ratio",
            note="Probability of a live token now over when it was sampled: mean, smallest, largest.",
            lines={"train/ratio_mean": "mean", "train/ratio_min": "smallest", "train/ratio_max": "largest"},
            marks=True,
        ),
        Chart(
            title="Spread of the ratio",
            note="Its standard deviation over tokens: how far the policy has moved from who sampled.",
            lines={"train/ratio_std": "deviation"},
            marks=True,
            least=0,
        ),
        Chart(
            title="Clip fraction",
            note="Share of live tokens without gradient because their ratio left the band.",
            lines={"train/clip_fraction_low": "fell out", "train/clip_fraction_high": "rose out"},
            marks=True,
            least=0,
        ),
        Chart(
            title="KL",
            note="Per token, the k3 estimate: of the policy from who sampled, and from the reference.",
            lines={"train/kl_behaviour": "from behaviour", "train/kl_reference": "from reference"},
            marks=True,
            least=0,
        ),
        Chart(
            title="Entropy",
            note="Of the policy per live token, in nats.",
            lines={"train/entropy": "entropy"},
            marks=True,
        ),
        Chart(
            title="Engine mismatch",
            note="Of the log-probabilities of engine and trainer where both have the same weights.",
            lines={"train/engine_mismatch_mean": "mean", "train/engine_mismatch_max": "largest"},
        ),
    ],
    "Improvement": [],
    "Rollouts": [
        Chart(
            title="Shares of completions",
            note="In groups whose rewards are all equal; that train; that hit the length limit.",
            lines={
                "rollout/zero_variance_fraction": "zero variance",
                "rollout/live_fraction": "live",
                "rollout/truncated_fraction": "truncated",
                "rollout/resampled_fraction": "resampled",
            },
            least=0,
        ),
        Chart(
            title="Length of completions",
            note="Mean, in tokens.",
            lines={"rollout/completion_length": "tokens"},
            least=0,
        ),
        Chart(
            title="Spread of the reward", note="Over completions.", lines={"rollout/reward_std": "deviation"}, least=0
        ),
    ],
    "Optimisation": [
        Chart(title="Loss", note="Of the whole step.", lines={"train/loss": "loss"}),
        Chart(title="Live tokens", note="Tokens that trained.", lines={"train/live_tokens": "tokens"}, least=0),
        Chart(
            title="Skipped steps", note="1 where no token was live.", lines={"train/step_skipped": "skipped"}, least=0
        ),
    ],
    "Time": [
        Chart(
            title="Idle share",
            note="Of the time since the rollout before: the trainer waits; the engine does not generate.",
            lines={"time/trainer_idle_share": "trainer", "time/engine_idle_share": "engine"},
            least=0,
            most=1,
        ),
        Chart(
            title="Stage seconds",
            note="Of a rollout; the update is that of one optimizer step.",
            lines={f"time/{stage}": stage for stage in ("sync", "generate", "score", "wait", "update")},
            least=0,
        ),
    ],
}
ROOMS = {
    "improvement": "Improvement",
    "rollout": "Rollouts",
    "reward": "Rewards",
    "train": "Optimisation",
    "time": "Time",
}


def chart_sections(names: Iterable[str]) -> list[dict[str, Any]]:
    """The sections for metrics of these names, as plain dictionaries; every name is in exactly one chart or a band."""
    names = list(names)
    left = dict.fromkeys(names)
    sections = {"Learning": Section(title="Learning", charts=[*_take(left, [REWARD]), *_validation(left)])}
    for title, charts in SECTIONS.items():
        sections[title] = Section(title=title, charts=_take(left, charts))
    for name in list(left):
        if name.endswith("_stderr") and name.removesuffix("_stderr") in names:
            del left[name]  # drawn as a band
    for name in left:
        group, _, rest = name.rpartition("/")
        room = ROOMS.get(name.partition("/")[0], group.capitalize() or "Other")
        words = rest[:1].upper() + rest[1:].replace("_", " ")
        chart = Chart(title=words, lines={name: name}, marks=room == "Improvement")
        sections.setdefault(room, Section(title=room)).charts.append(chart)
    order = ["Learning", "Off-policy", "Improvement", "Rollouts", "Rewards", "Optimisation"]
    titles = [*order, *(title for title in sections if title not in (*order, "Time")), "Time"]
    return [asdict(sections[title]) for title in titles if title in sections and sections[title].charts]


def _take(left: dict[str, None], charts: Iterable[Chart]) -> list[Chart]:
    """The charts whose metrics are there, each with those that are; they are not left any more."""
    taken = []
    for chart in charts:
        lines = {name: label for name, label in chart.lines.items() if name in left}
        for name in lines:
            del left[name]
        if lines:
            taken.append(Chart(**{**asdict(chart), "lines": lines}))
    return taken


def _validation(left: dict[str, None]) -> list[Chart]:
    """pass@k, maj@k and the gain over the reference of every task that was validated on."""
    charts = []
    groups = dict.fromkeys(name.rpartition("/")[0] for name in left if "@" in name.rpartition("/")[2])
    for group in groups:
        where = {"val": "held-out problems", "test": "test problems"}.get(group, group.removeprefix("val/"))
        for kind, note in (
            ("pass", "Chance that one of k samples is right, mean over problems."),
            ("maj", "Chance that the commonest answer of k samples is right."),
        ):
            start = f"{group}/{kind}@"
            names = sorted((n for n in left if n.startswith(start) and n.removeprefix(start).isdigit()), key=_samples)
            lines = {name: f"{kind}@{_samples(name)}" for name in names}
            charts += _take(left, [Chart(title=f"{kind}@k, {where}", note=note, lines=lines, least=0, most=1)])
        gain = Chart(
            title=f"Gain over the reference, {where}",
            note="pass@1 of the policy less that of the reference.",
            lines={f"{group}/pass@1_over_reference": "gain"},
        )
        charts += _take(left, [gain])
    return charts


def _samples(name: str) -> int:
    return int(name.rpartition("@")[2])
