"""Write ``tutorials/pages/staleness.md`` from the rows of the study on a real model.

    python -m tests.benchmarks.staleness

Numbers and sentences that judge are computed. The text states the papers' claims and settings, and limits of the study
that follow from its settings.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from lgrpo.report.intervals import mean_interval, paired_difference
from tests.benchmarks.real_model import BASELINE, CLIPS, GROUPS, METHODS, NUM_SEEDS, PERIODS, ROWS, SETTINGS, TUNED
from tests.benchmarks.real_model_report import (
    LINK,
    Arms,
    Rows,
    area,
    best_rates,
    by_arm,
    main_arms,
    wrapped,
)

PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "staleness.md"
PICTURE = ROWS.with_name("study_cycle.png")
V = 10
"""Sync period whose cycles are examined."""
SATURATED = 0.1
"""Growth of the KL in the second half of a cycle, as a share of that without a clip, below which it counts as held."""

TEXT = """# Staleness: what lag does to GRPO, and why

Written by `python -m tests.benchmarks.staleness` from {link}: every number and every sentence that judges is computed.
The study is described in [Results](results.md).

## Question

If the sampler receives new weights only every v rollouts, completions are up to v − 1 optimizer steps old. Larger v
saves syncs and lets the engine sample in larger batches. How much does it cost in learning, and what can be done?

- Mroueh et al. (paper A) report that v = 10 learns as well as v = 1: Qwen2.5-0.5B-Instruct on GSM8K, temperature 0.1,
  learning rate 5e-6, a KL term with β = 0.1, three stages over the training split. They do not state their clip.
- Yao et al. (paper B) report that group-relative REINFORCE is off-policy by nature; that clipping is essential and
  importance sampling is not; and that a wide clip (0.6, 2.0) learns faster if weights are synced regularly, at the
  price of stability if they are not: Qwen2.5-1.5B-Instruct on GSM8K, a sync every 20 rollouts, learning rate 1e-6, no
  KL term.

Here: {setting}. This is neither paper's setting, so a difference to their numbers refutes neither. All clips are those
of the ratio π/α; the arm without a clip keeps this ratio as a weight, so it is not the REINFORCE without a clip that
paper B reports to collapse.

## What lag does

{lag_table}

{lag_verdict}

## What the clip does in a cycle

Each cycle of v = {v} starts with the sampler and the policy equal. *KL* is the divergence of the policy from the
sampler's weights α on the completions of a step (`train/kl_behaviour`; at v = 1, where it is only rounding of the
engine, {floor}), *clipped* the share of tokens whose gradient the clip removes. Means over cycles and seeds, by the
step of the cycle:

![KL to α and clipped tokens by the step of a cycle](../../tests/benchmarks/results/study_cycle.png)

{cycle_table}

We say that the clip holds the policy if the KL grows less than {saturated} as much in the second half of a cycle as
without a clip.

{cycle_verdict}

{rank_verdict} An equal order proves no cause: a policy that learns less for another reason moves less, too.
{limit_verdict}

## Which methods help at v = {v}, and by how much

{method_table}

{method_verdict}

## What is not known

{unknown}
"""


def mean(rows: Rows, key: str = "pass@1") -> float:
    """Return the mean over seeds of the final pass@1, or of the area under the curve."""
    return statistics.fmean(area(row) if key == "area" else row["pass@1"][-1][1] for row in rows)


def by_cycle_step(rows: Rows, name: str, v: int = V) -> list[float]:
    """Return a metric by the step of a cycle, averaged over cycles and seeds."""
    values = [clipped(row) if name == "clipped" else row[name] for row in rows]
    return [statistics.fmean(x for each in values for x in each[start::v]) for start in range(v)]


def clipped(row: dict[str, Any]) -> list[float]:
    """Return the share of tokens that the clip removes, on either side, by step."""
    return [low + high for low, high in zip(row["clip_fraction_low"], row["clip_fraction_high"], strict=True)]


def compare(rows: Rows, baseline: Rows, count: int = 1) -> tuple[str, bool | None]:
    """Return the difference to a baseline, paired by seed, and whether it is clear; None if there are too few seeds.

    The interval is that of the seeds, with Bonferroni's correction for ``count`` comparisons.
    """
    final = [{row["seed"]: row["pass@1"][-1][1] for row in each} for each in (rows, baseline)]
    found = paired_difference(*final, 1 - 0.05 / count)
    if found is None:
        return "", None
    if found.count < NUM_SEEDS:
        return f"{found.mean:+.3f}", None
    return f"{found.mean:+.3f} ± {found.half_width:.3f}", abs(found.mean) > found.half_width


def lag_table(arms: Arms) -> str:
    """Return final pass@1 by v and clip."""
    periods = sorted({int(arm.partition(",")[0][2:]) for arm in arms if arm in PERIODS})
    lines = [f"| clip | {' | '.join(f'v={v}' for v in periods)} |", "|---|" + "---:|" * len(periods)]
    for clip in CLIPS:
        cells = []
        for v in periods:
            rows = arms.get(f"v={v}{clip}", [])
            cells.append(f"{mean(rows):.3f} ({len(rows)})" if rows else "")
        if any(cells):
            lines.append(f"| {' | '.join([clip.removeprefix(', ') or '0.2', *cells])} |")
    return "\n".join([*lines, "", "Final pass@1, mean over seeds, whose number is in brackets."])


def lag_verdict(arms: Arms) -> str:
    """Return what the rows say about v with the usual clip."""
    periods = [v for v in (1, 2, 5, 10, 30) if f"v={v}" in arms]
    means = [mean(arms[f"v={v}"]) for v in periods]
    start = arms[BASELINE][0]["pass@1"][0][1]
    steps = arms[BASELINE][0]["pass@1"][-1][0]
    shares = ", ".join(
        f"{(x - start) / (means[0] - start):.0%} at v = {v}" for v, x in zip(periods, means, strict=True)
    )
    text = f"Before training pass@1 is {start:.3f}. Of the gain of v = 1 in {steps} steps the arms keep {shares}. "
    if all(lower < upper for upper, lower in itertools.pairwise(means)):
        text += f"Final pass@1 falls with every larger v, from {means[0]:.3f} to {means[-1]:.3f}. "
    else:
        best = periods[means.index(max(means))]
        text += f"Final pass@1 is largest at v = {best} ({max(means):.3f}; v = 1 has {means[0]:.3f}). "
    complete = [v for v in periods[1:] if len(arms[f"v={v}"]) >= NUM_SEEDS]
    found = {v: compare(arms[f"v={v}"], arms[BASELINE], len(complete)) for v in complete}
    for is_clear, words in ((True, "Clearly different from"), (False, "Not separated from")):
        if named := [f"v = {v} ({difference})" for v, (difference, clear) in found.items() if clear is is_clear]:
            text += f"{words} v = 1: {', '.join(named)}. "
    few = [f"v = {v}" for v in periods if len(arms[f"v={v}"]) < NUM_SEEDS]
    return text + (f"Fewer than {NUM_SEEDS} seeds, so no verdict: {', '.join(few)}." if few else "")


def cycle_arms(arms: Arms) -> Arms:
    """Return the arms at v = 10 with each clip that have rows, by the name of the clip."""
    return {clip.removeprefix(", ") or "clip 0.2": arms[f"v={V}{clip}"] for clip in CLIPS if f"v={V}{clip}" in arms}


def cycle_table(arms: Arms) -> str:
    """Return KL and clipped tokens by the step of a cycle."""
    lines = [f"| step of the cycle | {' | '.join(map(str, range(V)))} |", "|---|" + "---:|" * V]
    for name, rows in cycle_arms(arms).items():
        kl = by_cycle_step(rows, "kl_behaviour")
        lines.append(f"| KL, {name} | {' | '.join(f'{value:.4f}' for value in kl)} |")
        removed = by_cycle_step(rows, "clipped")
        if any(removed):
            lines.append(f"| clipped, {name} | {' | '.join(f'{value:.2%}' for value in removed)} |")
    return "\n".join(lines)


def growth(rows: Rows) -> float:
    """Return by how much the KL grows in the second half of a cycle."""
    kl = by_cycle_step(rows, "kl_behaviour")
    return kl[-1] - kl[V // 2]


def cycle_verdict(arms: Arms) -> str:
    """Return what the cycles say about the clip."""
    found = cycle_arms(arms)
    if len(found) < 2 or "no clip" not in found or "clip 0.2" not in found:
        return "The rows of v = 10 with and without a clip are not complete yet."
    free, parts = growth(found["no clip"]), []
    for name, rows in found.items():
        kl = by_cycle_step(rows, "kl_behaviour")
        share = growth(rows) / free
        held = "the clip **holds the policy**" if share < SATURATED else "the clip does not hold the policy"
        note = "" if name == "no clip" else f", {share:.0%} of the growth without a clip: {held}"
        parts.append(
            f"- {name}: from step {V // 2} to {V - 1} of a cycle the KL grows by {growth(rows):.4f}, to {kl[-1]:.4f}"
            f"{note}. Final pass@1: {mean(rows):.3f}."
        )
    kl, removed = (by_cycle_step(found["clip 0.2"], name) for name in ("kl_behaviour", "clipped"))
    first = next(step for step, value in enumerate(kl) if value >= kl[-1] / 2)
    parts.append(
        f"- With the clip of 0.2 the KL reaches half of its last value at step {first}, where the clip removes "
        f"{removed[first]:.2%} of the tokens, and {removed[-1]:.2%} at the end: few, but by its definition those whose "
        "ratio has moved most in the direction of their advantage."
    )
    return "\n".join(parts)


def rank_verdict(arms: Arms) -> str:
    """Return whether the arms have the same order by growth of the KL and by final pass@1."""
    found = cycle_arms(arms)
    orders = [sorted(found, key=lambda name: value(found[name])) for value in (growth, mean)]
    words = "the same order" if orders[0] == orders[1] else "different orders"
    return f"By this growth and by final pass@1 these {len(found)} arms have {words}."


def limit_verdict(arms: Arms) -> str:
    """Return whether more distance always means more learning."""
    longest = {clip: arms[f"v=30{clip}"] for clip in CLIPS if f"v=30{clip}" in arms}
    if ", no clip" not in longest:
        return "Whether a cycle without a clip can be too long is not known yet."
    rows = longest[", no clip"]
    curve = [statistics.fmean(values) for values in zip(*([y for _, y in row["pass@1"]] for row in rows), strict=True)]
    kl = max(max(row["kl_behaviour"]) for row in rows)
    if curve[-1] < max(curve):
        sense = f"falls from {max(curve):.3f} to {curve[-1]:.3f}, so more distance is not always better"
    else:
        sense = f"rises to {curve[-1]:.3f}"
    note = "" if len(rows) >= NUM_SEEDS else f" ({len(rows)} seed{'s' * (len(rows) > 1)}, no verdict)"
    return f"In a cycle of 30 steps without a clip the KL reaches {kl:.2g}, and pass@1 {sense}{note}."


def on_policy(arms: Arms) -> str:
    """Return v = 1 at the learning rate that suits it best; at the usual one if that is not known, or has few seeds."""
    name = f"{BASELINE} at {best_rates().get(BASELINE)}"
    return name if len(arms.get(name, [])) >= NUM_SEEDS else BASELINE


def method_arms(arms: Arms) -> Arms:
    """Return all arms at v = 10, the best first."""
    names = [arm for arm in arms if arm.split(",")[0].split(" at ")[0] == f"v={V}"]
    return {arm: arms[arm] for arm in sorted(names, key=lambda arm: -mean(arms[arm]))}


def method_table(arms: Arms) -> str:
    """Return the arms at v = 10 with their differences to v = 1 and to the usual clip."""
    usual, first_name = f"v={V}", on_policy(arms)
    lines = [f"| arm | seeds | pass@1 | mean of the run | less {first_name} | less v={V}, clip 0.2 |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    found = method_arms(arms)
    for arm, rows in found.items():
        interval = mean_interval([row["pass@1"][-1][1] for row in rows])
        value = f"{interval.mean:.3f}" + (f" ± {interval.half_width:.3f}" if len(rows) > 1 else "")
        first = compare(rows, arms[first_name], len(found))[0]
        second = "" if arm == usual else compare(rows, arms.get(usual, []), len(found))[0]
        lines.append(f"| {arm} | {len(rows)} | {value} | {mean(rows, 'area'):.3f} | {first} | {second} |")
    note = (
        "Differences are paired by seed, with t-intervals over seeds after Bonferroni's correction for "
        f"{len(found)} comparisons; without an interval there are fewer than {NUM_SEEDS} seeds, and no verdict."
    )
    return "\n".join(lines) + f"\n\n{note}"


def method_verdict(arms: Arms) -> str:
    """Return which arms are clearly better than the usual clip, and which reach v = 1."""
    found, usual = method_arms(arms), f"v={V}"
    others = {arm: rows for arm, rows in found.items() if arm != usual and len(rows) >= NUM_SEEDS}
    if not others or usual not in found:
        return "No verdict yet."
    better, below, open_ = [], [], []
    for arm, rows in others.items():
        difference, is_clear = compare(rows, arms[usual], len(found))
        if is_clear and difference.startswith("+"):
            better.append(f"{arm.removeprefix(f'v={V}, ')} ({difference})")
        difference, is_clear = compare(rows, arms[on_policy(arms)], len(found))
        (below if is_clear and difference.startswith("-") else open_).append(arm.removeprefix(f"v={V}, "))
    parts = [
        f"Clearly better than the clip of 0.2 at the same v: {', '.join(better)}."
        if better
        else "None is clearly better than the clip of 0.2 at the same v."
    ]
    if open_:
        parts.append(f"These seeds do not separate from {on_policy(arms)}: {', '.join(open_)}.")
    if below:
        parts.append(f"Clearly below {on_policy(arms)}: {', '.join(below)}.")
    return " ".join(parts)


def unknown(arms: Arms) -> str:
    """Return what the rows leave open, as a list."""
    found = by_arm()
    groups = {
        "Sync periods and clips": list(GROUPS["v"]),
        f"Methods at v = {V}": [f"v={V}, {name}" for name in METHODS],
        "A period that adapts": list(GROUPS["adaptive"]),
        "The mask with a KL term": list(GROUPS["mask"]),
        "Several steps on a rollout": list(GROUPS["i"]),
        "TRL": list(GROUPS["trl"]),
    }
    lines = []
    for name, wanted in groups.items():
        complete = sum(len(found.get(arm, [])) >= NUM_SEEDS for arm in wanted)
        if complete < len(wanted):
            some = sum(arm in found for arm in wanted)
            lines.append(f"- {name}: {complete} of {len(wanted)} arms have {NUM_SEEDS} seeds, {some} have any.")
    tuned = best_rates()
    if len(tuned) < len(TUNED):
        lines.append(
            f"- Learning rates: three were compared for {len(tuned)} of {len(TUNED)} arms, so a method may be judged "
            "at a rate that suits another. A larger rate may make up for a tight clip."
        )
    if not any("math500" in row for rows in arms.values() for row in rows):
        lines.append("- How much of the gain is reasoning: no row has scores on MATH-500 yet.")
    first = arms[BASELINE][0]
    lines.append(
        f"- Other models, tasks and lengths of training: one model of 1.5B, one task, {first['pass@1'][-1][0]} steps. "
        "The cost of lag may shrink in a longer run."
    )
    lines.append(
        "- Paper A's own setting (temperature 0.1, β = 0.1, three stages) and paper B's (96 × 8 completions, learning "
        "rate 1e-6) were not run: their results may hold there."
    )
    return "\n".join(lines)


def setting(arms: Arms) -> str:
    """Return the setting of the runs in words."""
    first = arms[BASELINE][0]
    temperature = f"{SETTINGS['data.sampling.temperature']:g}"
    rate = f"{SETTINGS['model.optimizer.init_args.lr']:g}".replace("e-0", "e-")
    return (
        f"Qwen2.5-Coder-1.5B-Instruct on GSM8K, temperature {temperature}, learning rate {rate}, no KL term, "
        f"{first['rollouts']} rollouts of 448 completions with a step on each, on one {first['device']}"
    )


def page() -> str:
    """Return the page."""
    arms = main_arms()
    text = TEXT.format(
        link=LINK,
        setting=setting(arms),
        lag_table=lag_table(arms),
        lag_verdict=lag_verdict(arms),
        floor=f"{statistics.fmean(x for row in arms[BASELINE] for x in row['kl_behaviour']):.5f}",
        saturated=f"{SATURATED:.0%}",
        cycle_table=cycle_table(arms),
        cycle_verdict=cycle_verdict(arms),
        rank_verdict=rank_verdict(arms),
        limit_verdict=limit_verdict(arms),
        method_table=method_table(arms),
        method_verdict=method_verdict(arms),
        unknown=unknown(arms),
        v=V,
    )
    return wrapped(text.rstrip("\n")) + "\n"


def draw(path: Path) -> None:
    """Draw KL to α and clipped tokens by the step of a cycle, a line per clip."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for style, (name, rows) in zip(("-", "--", ":"), cycle_arms(main_arms()).items(), strict=False):
        left.plot(
            range(V), by_cycle_step(rows, "kl_behaviour"), style, color="C3", marker="o", markersize=3, label=name
        )
        removed = [100 * value for value in by_cycle_step(rows, "clipped")]
        right.plot(range(V), removed, style, color="C3", marker="o", markersize=3, label=name)
    left.set(xlabel=f"step of a cycle of v = {V}", ylabel="KL to α, nats per token", yscale="log")
    right.set(xlabel=f"step of a cycle of v = {V}", ylabel="tokens clipped, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    draw(PICTURE)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
