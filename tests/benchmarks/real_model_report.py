"""Tables, verdicts and the picture of the study on a real model, computed from its rows.

``python -m tests.benchmarks.studies --report`` writes them into ``tutorials/pages/results.md``.
"""

from __future__ import annotations

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import real_model
from tests.benchmarks.real_model import (
    ARMS,
    BASELINE,
    CLIPS,
    GROUPS,
    INITIAL,
    LEARNING_RATES,
    LENGTH,
    LONGER,
    NUM_SEEDS,
    PERIODS,
    TRL,
    TUNED,
    read,
)

Rows = list[dict[str, Any]]
Arms = dict[str, Rows]
SIDES = ("low", "high")
LAST = 10
"""Rollouts at the end over which rewards are averaged."""
SETS = {
    "pass@1": ("test", "pass@1"),
    "forgiving": ("test", "forgiving"),
    "truncated": ("test", "truncated"),
    "of finished": ("test", "finished"),
    "448 tokens": ("test_long", "pass@1"),
    "MATH-500": ("math500", "pass@1"),
    "tokens": ("test", "tokens"),
}
"""Set and score of each column of the table that separates format from reasoning."""

SECTION = """## A real model: how far may the sampler lag behind?

Qwen2.5-Coder-1.5B-Instruct learns GSM8K with `configs/papers/a_gsm8k.yaml`, `fast.yaml`, `mask.yaml` and the changes
listed in [real_model.py](../../tests/benchmarks/real_model.py): {rollouts} rollouts of 28 × 16 completions, an
optimizer step on each, learning rate 3e-6, no KL term. Before training pass@1 is {before} (500 test problems, two
samples each, temperature 1). The clip is 0.2 unless named. All runs used one H200. What the rows say about lag, clip
and methods: [Staleness](staleness.md).

![pass@1 against optimizer steps and against seconds](../../tests/benchmarks/results/study_real_model.png)

{table}

*less v=1* is the difference to v = 1 with the same seed; its interval contains the error of evaluating 500 problems,
and not the variation between seeds. *Mean* is the area under the curve of pass@1, *s/step* the median time of a rollout
and its update, for runs that did not share the machine. {seeds}; arms with fewer are no verdict, and {tuning}. Rows:
{link}.

{verdicts}"""
LINK = "[real_model.jsonl](../../tests/benchmarks/results/real_model.jsonl)"
FORMAT = """### Format, length or reasoning?

The final policies were evaluated once more. *Forgiving* scores the same completions with an extractor that accepts any
number that a reader could take for the answer, *of finished* is pass@1 of the completions that were not truncated, *448
tokens* is pass@1 with that limit instead of 320, one sample each; *MATH-500* likewise, on the problems whose prompts
leave as much. Means over seeds, with the standard error of the problems.

{table}

{sentences}"""


TOOL_TITLE, TEACHER_TITLE = "A Python tool", "A teacher instead of rewards"
EXPLANATIONS = {
    TOOL_TITLE: """With `configs/python_tool.yaml`: the model may write programs, and sees what they print. Everything
else is as at v = 1, but for an episode's limit of 448 tokens, observations included. *Turns* are those of an episode in
the first and in the last rollout, *tools* is the share of generation in which every episode waited for a program.""",
    TEACHER_TITLE: """With `configs/distil.yaml`: the teacher is the final policy of v = 1 with the same seed, the
student the model before training. The loss is the reverse KL on the student's own completions; rewards are only
logged.""",
}
"""Text below the title of a comparison."""


def by_arm() -> Arms:
    """Return the rows of every arm that has some, by seed."""
    rows = sorted(read(real_model.ROWS), key=lambda row: row["seed"])
    return {arm: own for arm in ARMS if (own := [row for row in rows if row["arm"] == arm])}


def main_arms() -> Arms:
    """Return the arms that are compared with v = 1: on the test problems, with as many completions."""
    names = {arm for group in ("v", "methods", "tuned", "adaptive", "i") for arm in GROUPS[group]}
    return {arm: rows for arm, rows in by_arm().items() if arm in names}


def table(arms: Arms, baseline: str = BASELINE) -> str:
    """Return a Markdown table with a line for each arm."""
    lines = [
        f"| arm | seeds | pass@1 | less {baseline} | mean | reward, last {LAST} | clipped tokens | largest KL to α "
        "| s/step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, rows in arms.items():
        after = ", ".join(f"{row['pass@1'][-1][1]:.3f}" for row in rows)
        reward = statistics.fmean(value for row in rows for value in row["reward"][-LAST:])
        mean = statistics.fmean(map(area, rows))
        clipped = sum(
            statistics.fmean(x for row in rows for x in row.get(f"clip_fraction_{side}", [0.0])) for side in SIDES
        )
        kl = [value for row in rows for value in row.get("kl_behaviour", [])]
        speed = [value for row in rows for value in step_seconds(row)]
        cells = [arm, str(len(rows)), after, difference(rows, arms.get(baseline, [])), f"{mean:.3f}", f"{reward:.3f}"]
        cells += [f"{clipped:.2%}" if kl else "", f"{max(kl):.2g}" if kl else ""]
        cells.append(f"{statistics.median(speed):.1f}" if speed else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(rows: Rows, baseline: Rows) -> str:
    """Return the final pass@1 of an arm less that of the baseline with the same seed, and the error of measuring it."""
    others = {row["seed"]: row for row in baseline}
    pairs = [(row, others[row["seed"]]) for row in rows if row["seed"] in others and row is not others[row["seed"]]]
    if not pairs:
        return ""
    mean = statistics.fmean(row["pass@1"][-1][1] - other["pass@1"][-1][1] for row, other in pairs)
    variance = sum(row["pass@1_stderr"] ** 2 + other["pass@1_stderr"] ** 2 for row, other in pairs) / len(pairs) ** 2
    return f"{mean:+.3f} ± {1.96 * variance**0.5:.3f}"


def verdicts(arms: Arms, baseline: str = BASELINE) -> str:
    """Return what the seeds of each complete arm say about its difference to the baseline."""
    from lgrpo.report.intervals import paired_difference

    complete = {arm: rows for arm, rows in arms.items() if len(rows) >= NUM_SEEDS}
    final = {arm: {row["seed"]: row["pass@1"][-1][1] for row in rows} for arm, rows in complete.items()}
    others = [arm for arm in final if arm != baseline and len(final[arm].keys() & final.get(baseline, {}).keys()) > 1]
    if not others:
        return f"No verdict yet: {baseline} and another arm need {NUM_SEEDS} seeds."
    lines = [
        f"Verdicts on final pass@1: the difference to {baseline}, paired by seed, with a t-interval over the seeds at "
        f"95 % after Bonferroni's correction for {len(others)} comparison{'s' * (len(others) > 1)}.",
        "",
    ]
    for arm in others:
        found = paired_difference(final[arm], final[baseline], 1 - 0.05 / len(others))
        assert found is not None
        side = "below" if found.mean < 0 else "above"
        is_clear = abs(found.mean) > found.half_width
        verdict = f"**{side} {baseline}**" if is_clear else f"these seeds do not separate it from {baseline}"
        lines.append(f"- {arm}: {found.mean:+.3f} ± {found.half_width:.3f}: {verdict}.")
    return "\n".join(lines)


def area(row: dict[str, Any]) -> float:
    """Return the mean of pass@1 over the steps of a run: the area under its curve."""
    points = row["pass@1"]
    pieces = [(x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points)]
    return sum(pieces) / (points[-1][0] - points[0][0]) if pieces else points[-1][1]


def step_seconds(row: dict[str, Any]) -> list[float]:
    """Return the seconds of each rollout and its update; none if the run shared the machine.

    Compiling, in the first steps of a process, is left out: more than twice the median counts as the median.
    """
    if row.get("workers") != 1 or row.get("other_load"):
        return []
    found = row.get("step_seconds")
    if found is None:
        parts = [row.get(name, []) for name in ("generate_seconds", "update_seconds")]
        found = [sum(each) for each in zip(*parts, strict=False)]
    if not found:
        return []
    median = statistics.median(found)
    return [median if value > 2 * median else value for value in found]


def best_rates() -> dict[str, str]:
    """Return the learning rate with the largest area under the curve of each arm for which all were tried."""
    found = by_arm()
    tried = {name: {rate: found.get(f"{name}, lr {rate}") for rate in LEARNING_RATES} for name in TUNED}
    return {
        name: max(rates, key=lambda rate: statistics.fmean(area(row) for row in rates[rate] or []))
        for name, rates in tried.items()
        if all(rates.values())
    }


def rate_table() -> str:
    """Return the areas under the curves of the learning rates as a Markdown table, one line per arm; empty if none."""
    found, best = by_arm(), best_rates()
    lines = [f"| arm | {' | '.join(LEARNING_RATES)} | best |", f"|---|{'---:|' * (len(LEARNING_RATES) + 1)}"]
    for name in TUNED:
        tried = [found.get(f"{name}, lr {rate}", []) for rate in LEARNING_RATES]
        if any(tried):
            areas = [f"{statistics.fmean(map(area, rows)):.3f}" if rows else "" for rows in tried]
            lines.append(f"| {' | '.join([name, *areas, best.get(name, '')])} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def tuning() -> str:
    """Return which learning rates were tuned, as the end of a sentence."""
    if not (rates := rate_table()):
        return "no learning rate was tuned for an arm yet"
    return (
        "learning rates were compared with one seed by the mean pass@1 of the run on 200 problems held out of the "
        f"training split:\n\n{rates}\n\nAn arm named *at* a rate was trained with that one"
    )


def format_section() -> str:
    """Return the part of the page that separates format and length from reasoning; empty if no row has the scores.

    Arms with a tool have another prompt and another limit of tokens than the model before training.
    """
    arms = {arm: rows for arm, rows in by_arm().items() if arm not in GROUPS["tool"]}
    scored = {arm: [row for row in rows if "test" in row] for arm, rows in arms.items()}
    scored = {arm: rows for arm, rows in scored.items() if rows}
    if len(scored) < 2:
        return ""
    lines = [f"| arm | seeds | {' | '.join(SETS)} |", "|---|" + "---:|" * (len(SETS) + 1)]
    for arm, rows in scored.items():
        cells = [score_text(rows, *place) for place in SETS.values()]
        lines.append(f"| {' | '.join([arm, str(len(rows)), *cells])} |")
    sentences = [gain_sentence(arm, rows, scored[INITIAL]) for arm, rows in scored.items() if INITIAL in scored]
    return FORMAT.format(table="\n".join(lines), sentences="\n".join(filter(None, sentences)))


def score(rows: Rows, name: str, key: str) -> tuple[float, float] | None:
    """Return the mean of a score over the rows that have it, and the standard error of the problems; None if none."""
    found = [row[name] for row in rows if name in row]
    if not found:
        return None
    errors = [each.get(f"{key}_stderr", 0.0) for each in found]
    return statistics.fmean(each[key] for each in found), sum(error**2 for error in errors) ** 0.5 / len(found)


def score_text(rows: Rows, name: str, key: str) -> str:
    """Return a cell of the table of scores."""
    found = score(rows, name, key)
    if found is None:
        return ""
    if key == "tokens":
        return f"{found[0]:.0f}"
    return f"{found[0]:.3f} ± {found[1]:.3f}" if found[1] else f"{found[0]:.3f}"


def gain_sentence(arm: str, rows: Rows, before: Rows) -> str:
    """Return how much an arm gains by each score; empty for the model before training."""
    parts = []
    for label, place in SETS.items():
        if label in ("truncated", "tokens") or arm == INITIAL:
            continue
        after, first = score(rows, *place), score(before, *place)
        if after is not None and first is not None:
            error = 1.96 * (after[1] ** 2 + first[1] ** 2) ** 0.5
            parts.append(f"{after[0] - first[0]:+.3f}{f' ± {error:.3f}' if error else ''} ({label})")
    return f"- {arm} gains {', '.join(parts)}." if parts else ""


def present(found: Arms, group: str) -> Arms:
    """Return the arms of a group that have rows."""
    return {arm: found[arm] for arm in GROUPS[group] if arm in found}


def comparisons() -> Iterable[tuple[str, Arms, str]]:
    """Yield the title, the arms and the baseline of each comparison beside the main one that has rows."""
    found = by_arm()
    longer = {arm: rows for arm, rows in found.items() if arm in LONGER}
    first = next((arm for arm in longer if arm.startswith("v=1,") or arm.startswith("v=1 ")), "")
    masks = present(found, "mask")
    trl = {arm: found[arm] for arm in (BASELINE, TRL) if arm in found}
    own = {group: {BASELINE: found.get(BASELINE, [])} | present(found, group) for group in ("tool", "distillation")}
    titles = {
        "Groups whose rewards are all equal, with paper A's KL term": (masks, next(iter(GROUPS["mask"]))),
        "TRL with the settings of v = 1": (trl, BASELINE),
        f"{LENGTH} steps": (longer, first),
        TOOL_TITLE: (own["tool"], BASELINE),
        TEACHER_TITLE: (own["distillation"], BASELINE),
    }
    for title, (arms, baseline) in titles.items():
        if baseline in arms and len(arms) > 1:
            yield title, arms, baseline


def curves(arms: Arms) -> str:
    """Return a table of pass@1 by optimizer step, of runs with the seeds that all arms have, and of what they log."""
    seeds = set.intersection(*({row["seed"] for row in rows} for rows in arms.values()))
    chosen = {arm: [row for row in rows if row["seed"] in seeds] for arm, rows in arms.items()}
    steps = [step for step, _ in next(iter(chosen.values()))[0]["pass@1"]] if seeds else []
    if not steps:
        return ""
    columns = {
        **{f"step {step}": partial(pass_at, step=step) for step in steps},
        "KL to the teacher": partial(first_and_last, name="kl_teacher"),
        "turns": partial(first_and_last, name="turns"),
        "tools": tool_share,
        "s/step beside other processes": loaded_seconds,
    }
    cells = {title: [column(rows) for rows in chosen.values()] for title, column in columns.items()}
    cells = {title: texts for title, texts in cells.items() if any(texts)}
    lines = [f"| seeds {', '.join(map(str, sorted(seeds)))} | {' | '.join(cells)} |", "|---|" + "---:|" * len(cells)]
    lines += [f"| {' | '.join(line)} |" for line in zip(chosen, *cells.values(), strict=True)]
    return "\n".join(lines)


def pass_at(rows: Rows, step: int) -> str:
    """Return the mean pass@1 after an optimizer step."""
    return f"{statistics.fmean(dict(row['pass@1'])[step] for row in rows):.3f}"


def first_and_last(rows: Rows, name: str) -> str:
    """Return the means of a metric in the first and the last rollout; empty if the runs have none."""
    found = [row[name] for row in rows if name in row]
    return " to ".join(f"{statistics.fmean(values[end] for values in found):.2g}" for end in (0, -1)) if found else ""


def loaded_seconds(rows: Rows) -> str:
    """Return the median time of a rollout and its update of runs beside other processes; empty if there are none."""
    loaded = [{**row, "other_load": ""} for row in rows if row.get("other_load")]
    found = [value for row in loaded for value in step_seconds(row)]
    return f"{statistics.median(found):.1f}" if found else ""


def tool_share(rows: Rows) -> str:
    """Return the share of generation in which nothing was sampled because all episodes waited for their tools."""
    waited = sum(sum(row.get("environment_seconds", [])) for row in rows)
    total = sum(sum(row["generate_seconds"]) for row in rows if "environment_seconds" in row)
    return f"{waited / total:.0%} of sampling" if total else ""


def section() -> str:
    """Return the section of the results page."""
    found = main_arms()
    complete = [arm for arm, rows in found.items() if len(rows) >= NUM_SEEDS]
    rows = [row for rows in found.values() for row in rows]
    first, (length,) = rows[0], {row["rollouts"] for row in rows}
    parts = [
        SECTION.format(
            rollouts=length,
            before=f"{first['pass@1'][0][1]:.3f}",
            table=table(found),
            seeds=f"{len(complete)} of {len(found)} arms have {NUM_SEEDS} seeds",
            verdicts=verdicts(found),
            tuning=tuning(),
            link=LINK,
        ),
        format_section(),
    ]
    for title, arms, baseline in comparisons():
        explained = [EXPLANATIONS[title], curves(arms)] if title in EXPLANATIONS else []
        parts += [f"### {title}", *explained[:1], table(arms, baseline), *explained[1:], verdicts(arms, baseline)]
    return wrapped("\n\n".join(filter(None, parts)))


def wrapped(text: str) -> str:
    """Return Markdown with lines of at most 120 characters, except in tables, links to pictures and titles."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", "![", "#", "```")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(_filled(item, "  " if item.startswith("- ") else "") for item in items))
    return "\n\n".join(blocks)


def _filled(text: str, indent: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def drawn() -> Arms:
    """Return the arms in the picture: sync periods and clips, the best other arm at v = 10, and TRL."""
    found = main_arms()
    others = {
        arm: rows
        for arm, rows in found.items()
        if arm not in PERIODS and arm.startswith("v=10") and len(rows) >= NUM_SEEDS
    }
    best = max(others, key=lambda arm: statistics.fmean(row["pass@1"][-1][1] for row in others[arm]), default=None)
    chosen = {arm: rows for arm, rows in found.items() if arm in PERIODS or arm == best}
    return chosen | {arm: rows for arm, rows in by_arm().items() if arm == TRL}


def points(rows: Rows, place: Callable[[dict[str, Any], int], float]) -> list[tuple[float, float, float]]:
    """Return (position, mean, half of the 95 % interval) of each validation that all rows have.

    The interval is that of the mean over seeds; for a single one, that of the evaluated problems.
    """
    from lgrpo.report.intervals import mean_interval

    found = []
    for index in range(min(len(row["pass@1"]) for row in rows)):
        interval = mean_interval([row["pass@1"][index][1] for row in rows])
        half = interval.half_width if len(rows) > 1 else 1.96 * rows[0]["pass@1_stderr"]
        found.append((statistics.fmean(place(row, index) for row in rows), interval.mean, half))
    return found


def seconds_until(row: dict[str, Any], index: int) -> float:
    """Return the seconds of training before a validation."""
    step, last = row["pass@1"][index][0], row["pass@1"][-1][0]
    seconds = step_seconds(row)
    return sum(seconds[: round(len(seconds) * step / last)])


def draw(path: Path) -> None:
    """Draw pass@1 against optimizer steps and against seconds, a line per arm with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    styles = dict(zip(CLIPS, ("-", "--", ":"), strict=True))
    colours = {v: f"C{number}" for number, v in enumerate((1, 2, 5, 10, 30))}
    arms = drawn()
    for number, (arm, rows) in enumerate(arms.items()):
        v, clip = arm.partition(",")[0], arm[len(arm.partition(",")[0]) :]
        look = {"color": colours[int(v[2:])], "linestyle": styles[clip]} if arm in PERIODS else {"color": "black"}
        label = f"{arm} ({len(rows)} seed{'s' * (len(rows) > 1)})"
        alone = [row for row in rows if step_seconds(row)]
        for axes, own, place in (
            (left, rows, lambda row, index: row["pass@1"][index][0]),
            (right, alone, seconds_until),
        ):
            if own:
                x, y, half = zip(*points(own, place), strict=True)
                shift = (
                    0.3 * (number - len(arms) / 2) if axes is left else 0
                )  # so that intervals do not hide each other
                x = tuple(each + shift for each in x)
                name = label if axes is left else f"{arm} ({len(own)} seed{'s' * (len(own) > 1)})"
                axes.errorbar(x, y, half, marker="o", markersize=3, capsize=2, elinewidth=0.8, label=name, **look)
    left.set(xlabel="optimizer steps (slightly shifted)", ylabel="pass@1, GSM8K test problems")
    right.set(xlabel="seconds of sampling and updates, runs that had the GPU alone")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=130)
