"""Page, table and heat map of the league, computed from its rows."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lgrpo.report import Interval, mean_interval, paired_difference
from tests.benchmarks import league
from tests.benchmarks.league import (
    BASELINE,
    LOWER_RATE,
    RATES,
    SELECT_SEEDS,
    TEST_SEEDS,
    Row,
    best_rate,
    in_order,
    rates_to_try,
)
from tests.benchmarks.league_arm import LENGTHS, PERIODS, ROOT, SIZES, START, methods
from tests.benchmarks.league_statistics import (
    LEVEL,
    POWER,
    detectable_effect,
    holm,
    paired_p_value,
    pooled_deviation,
)

PAGE = ROOT / "tutorials" / "pages" / "league.md"
PICTURE = league.RESULTS / "league.png"
PILOT = league.RESULTS / "league_pilot.jsonl"
REPEATED = league.RESULTS / "league_repeated.jsonl"
HIGHER, LOWER = "▲", "▼"


def lag_name(lag: str) -> str:
    return lag if lag == "offline" else f"v = {lag}"


def short(value: float, spec: str = ".0e") -> str:
    """Return a small number, by default a learning rate, without a zero in its exponent.

    >>> short(3e-4), short(5.7e-5, ".2g")
    ('3e-4', '5.7e-5')
    """
    return format(value, spec).replace("e-0", "e-")


@dataclass(frozen=True)
class Cell:
    """A method at a lag: its selected learning rate and test pass@1 by seed."""

    method: str
    lag: str
    rate: float | None
    scores: dict[int, float]

    @property
    def is_complete(self) -> bool:
        return self.scores.keys() >= set(TEST_SEEDS)

    @cached_property
    def interval(self) -> Interval:
        return mean_interval(list(self.scores.values()))


class League:
    """The rows of the league, and what follows from them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row["method"] in methods()]
        self.cells = {(name, lag): self._cell(name, lag) for name in in_order(methods()) for lag in PERIODS}

    def _cell(self, method: str, lag: str) -> Cell:
        rate = best_rate(self.rows, method, lag)
        scores = {
            row["seed"]: row["test"]
            for row in self.rows
            if (row["stage"], row["method"], row["lag"], row["lr"]) == ("test", method, lag, rate)
            and row["seed"] in TEST_SEEDS
            and "error" not in row
        }
        return Cell(method, lag, rate, scores)

    @property
    def num_comparisons(self) -> int:
        """Number of planned comparisons with the baseline."""
        return (len(methods()) - 1) * len(PERIODS)

    @property
    def num_planned(self) -> int:
        """Number of planned runs, as far as it is known which cells also try the lower rate."""
        return num_runs(self.rows, self.cells)

    @property
    def num_finished(self) -> int:
        """Number of runs that count: all of stage ``select``, and those of stage ``test`` at the selected rate."""
        tried = {key: rates_to_try(self.rows, *key) for key in self.cells}
        selecting = sum(
            row["stage"] == "select" and "error" not in row and row["lr"] in tried[row["method"], row["lag"]]
            for row in self.rows
        )
        return selecting + sum(len(cell.scores) for cell in self.cells.values())

    def differences(self, cell: Cell) -> list[float]:
        """Return the differences to the baseline at the same lag, for the seeds both have."""
        baseline = self.cells[BASELINE, cell.lag].scores
        return [cell.scores[seed] - baseline[seed] for seed in sorted(cell.scores.keys() & baseline.keys())]

    @cached_property
    def compared(self) -> dict[tuple[str, str], Interval]:
        """Differences to the baseline at the same lag, where both have all seeds."""
        found = {}
        for key, cell in self.cells.items():
            baseline = self.cells[BASELINE, cell.lag]
            if cell.method != BASELINE and cell.is_complete and baseline.is_complete:
                difference = paired_difference(cell.scores, baseline.scores)
                assert difference is not None
                found[key] = difference
        return found

    @cached_property
    def adjusted(self) -> dict[tuple[str, str], float]:
        """Adjusted p-values of the comparisons."""
        p_values = {key: paired_p_value(self.differences(self.cells[key])) for key in self.compared}
        return holm(p_values, self.num_comparisons)

    @cached_property
    def deviation(self) -> float | None:
        """Standard deviation of the difference of a seed, pooled over comparisons; None without two seeds."""
        samples = [self.differences(cell) for cell in self.cells.values() if cell.method != BASELINE]
        samples = [sample for sample in samples if len(sample) > 1]
        return pooled_deviation(samples) if samples else None

    @cached_property
    def effect(self) -> float:
        """Smallest difference that the planned seeds detect at the corrected level, in its own standard deviations."""
        return detectable_effect(len(TEST_SEEDS), LEVEL / self.num_comparisons)

    def mark(self, method: str, lag: str) -> str:
        """Return whether a method is higher or lower than the baseline; "" if no difference is seen, or not tested."""
        difference = self.compared.get((method, lag))
        if difference is None or self.adjusted[method, lag] >= LEVEL:
            return ""
        if abs(difference.mean) < self.effect * statistics.stdev(self.differences(self.cells[method, lag])):
            return ""
        return HIGHER if difference.mean > 0 else LOWER


def num_runs(rows: Sequence[Row], cells: Iterable[tuple[str, str]]) -> int:
    """Return the number of runs of some methods and lags."""
    lower = (LOWER_RATE in rates_to_try(rows, *cell) for cell in cells)
    return sum(league.RUNS_PER_CELL + len(SELECT_SEEDS) * tries_lower for tries_lower in lower)


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the methods that have test runs."""
    all_cells = League(rows)
    lines = [f"| method | {' | '.join(map(lag_name, PERIODS))} |", "|---|" + "---:|" * len(PERIODS)]
    for name in in_order(methods()):
        cells = [all_cells.cells[name, lag] for lag in PERIODS]
        if any(cell.scores for cell in cells):
            lines.append(f"| `{name}` | {' | '.join(_table_cell(all_cells, cell) for cell in cells)} |")
    return "\n".join(lines)


def _table_cell(all_cells: League, cell: Cell) -> str:
    if not cell.scores:
        return ""
    text = f"{cell.interval.mean:.3f}"
    if cell.interval.count > 1:
        text += f" ± {cell.interval.half_width:.3f}"
    if (difference := all_cells.compared.get((cell.method, cell.lag))) is not None:
        text += f" ({difference.mean:+.3f} ± {difference.half_width:.3f}"
        adjusted = all_cells.adjusted[cell.method, cell.lag]
        text += f", p = {short(adjusted, '.2g')}{all_cells.mark(cell.method, cell.lag)})"
    if not cell.is_complete:
        text += f" [{len(cell.scores)} of {len(TEST_SEEDS)} seeds]"
    return text if cell.rate is None else f"{text}, {short(cell.rate)}"


def verdict(all_cells: League, lag: str) -> str:
    """Return a sentence on the methods at a lag, as far as the rows allow one."""
    baseline = all_cells.cells[BASELINE, lag]
    name = lag_name(lag)
    tested = [method for method, other in all_cells.compared if other == lag]
    if not baseline.is_complete:
        return f"**{name}**: nothing can be said; `{BASELINE}` has {len(baseline.scores)} of {len(TEST_SEEDS)} runs."
    if not tested:
        return f"**{name}**: nothing can be said; no method besides `{BASELINE}` has all {len(TEST_SEEDS)} runs."
    by_mark: dict[str, list[str]] = {HIGHER: [], LOWER: [], "": []}
    for method in sorted(tested, key=lambda method: -all_cells.compared[method, lag].mean):
        by_mark[all_cells.mark(method, lag)].append(method)

    def listed(mark: str) -> str:
        return ", ".join(f"`{m}` ({all_cells.compared[m, lag].mean:+.2f})" for m in by_mark[mark]) or "none"

    others = len(methods()) - 1
    edge = [f"`{m}`" for m in by_mark[LOWER] if all_cells.cells[m, lag].rate == LOWER_RATE]
    caution = (
        f" Of the lower ones, {', '.join(edge)} selected the lowest rate, {short(LOWER_RATE)}, so an even lower one "
        "may be better for them."
    )
    return (
        f"**{name}** ({len(tested)} of {others} methods are compared with `{BASELINE}`, which has "
        f"{baseline.interval.mean:.2f}): higher: {listed(HIGHER)}; lower: {listed(LOWER)}; not "
        f"distinguished: {listed('')}.{caution if edge else ''}"
    )


def power_text(all_cells: League) -> str:
    """Return the power calculation in words."""
    count, comparisons = len(TEST_SEEDS), all_cells.num_comparisons
    if all_cells.deviation is None:
        return "No two methods share two test seeds yet, so there is no estimate of the power."
    single = detectable_effect(count, LEVEL)
    return (
        f"With {count} seeds and the level {LEVEL} / {comparisons} of the first step of Holm's method, a difference of "
        f"{all_cells.effect:.2f} standard deviations of a seed's difference is detected with a probability of "
        f"{POWER:.0%} (noncentral t-distribution; without a correction it would be {single:.2f}). A difference is "
        "reported if its corrected p-value is below "
        f"{LEVEL} and it is at least as large by its own deviation. Pooled over methods and lags the deviation is "
        f"{all_cells.deviation:.3f}, so differences below **{all_cells.effect * all_cells.deviation:.3f}** may well "
        "remain unseen."
    )


def rates_text(all_cells: League) -> str:
    """Return how often each learning rate was selected."""
    selected = Counter(cell.rate for cell in all_cells.cells.values() if cell.rate is not None)
    if not selected:
        return "No learning rate has been selected yet."
    parts = ", ".join(f"{short(rate)} in {selected[rate]}" for rate in (LOWER_RATE, *RATES))
    return f"Selected learning rates, by the number of pairs of method and lag: {parts}."


def versions_text(rows: Iterable[Row], repeated: Sequence[Row]) -> str:
    """Return from which code and packages the rows come, and what changed in runs that were repeated with others."""
    finished = {league.job_of(row): row for row in rows if "error" not in row}
    if not finished:
        return ""
    stacks = Counter(_stack(row) for row in finished.values())
    commits = {row["commit"] for row in finished.values()}
    text = (
        f"The rows come from {_counted(len(commits), 'commit')}, and from "
        f"{' and '.join(f'{stack} ({count:,} runs)' for stack, count in stacks.most_common())}."
    )
    pairs = [(finished[job], row) for row in repeated if (job := league.job_of(row)) in finished]
    if pairs:
        packages = sum(_stack(first) != _stack(again) for first, again in pairs)
        same = sum(all(first[key] == again[key] for key in ("validation", "test")) for first, again in pairs)
        text += (
            f" {_counted(len(pairs), 'run')} were repeated later, {packages} of them with the other packages "
            f"([league_repeated.jsonl](../../tests/benchmarks/results/{REPEATED.name})): {same} have exactly the same "
            "pass@1."
        )
    return text


def _stack(row: Row) -> str:
    return f"torch {row['versions']['torch']} with transformers {row['versions']['transformers']}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def failures_text(all_cells: League) -> str:
    """Return the runs that failed."""
    failed = [row for row in all_cells.rows if "error" in row]
    if not failed:
        return "No run failed."
    reasons = Counter((row["method"], row["error"]) for row in failed)
    lines = [f"- `{method}` ({count}×): {error}" for (method, error), count in sorted(reasons.items())]
    return "\n".join(["Runs that failed, which the next command repeats:", "", *lines])


def task_text(rows: Iterable[Row]) -> str:
    """Return the scores of the start models and the time of a run, from rows."""
    finished = [row for row in rows if "error" not in row]
    if not finished:
        return ""
    starts = {row["seed"]: row["start"]["test"] for row in finished}
    times = sorted(row["cpu_seconds"] for row in finished)
    seconds, most = statistics.median(times), times[int(0.95 * len(times))]
    subset = num_runs(finished, [(name, league.LAGS[0]) for name in league.SUBSET])
    shortest, longest = str(LENGTHS[0]), str(LENGTHS[-1])
    tested = [row for row in finished if row["stage"] == "test" and row["method"] == BASELINE]
    text = (
        f"The start models of the seeds used so far ({len(starts)}) have {min(starts.values()):.2f} to "
        f"{max(starts.values()):.2f} on the test problems. A run takes {seconds:.0f} CPU seconds (median; 95 % at most "
        f"{most:.0f}), so that the {subset} runs of the subset need {subset * seconds / 120:.0f} to "
        f"{subset * most / 120:.0f} minutes on two cores."
    )
    if tested:
        short, long = (statistics.fmean(row["test_by_length"][key] for row in tested) for key in (shortest, longest))
        text += f" `{BASELINE}` ends at {short:.2f} with {shortest} digits and at {long:.2f} with {longest}."
    return text


def pilot_text(rows: Sequence[Row]) -> str:
    """Return the section on the rows that were made before the start models were alike."""
    if not rows:
        return ""
    pilot = League(rows)
    starts = [row["start"]["test"] for row in rows]
    explanation = (
        f"{len(rows)} earlier runs ([league_pilot.jsonl](../../tests/benchmarks/results/{PILOT.name})) followed the "
        "same rules, but their start models had 100 or 120 supervised steps and between "
        f"{min(starts):.2f} and {max(starts):.2f} on the test problems. The league's start models were therefore made "
        f"alike, and the pilot's rows are not used above. {power_text(pilot)}"
    )
    return "\n\n".join(["## Pilot", _filled(explanation), table(rows)])


def comparison(own: Sequence[Row], committed: Sequence[Row]) -> str:
    """Return a table of the test pass@1 of the subset and of the same cells of the league."""
    here, there = League(own), League(committed)
    lines = ["| method | lag | this run | league.jsonl |", "|---|---|---:|---:|"]
    for key, cell in here.cells.items():
        if cell.scores:
            other = there.cells[key]
            lines.append(f"| `{key[0]}` | {key[1]} | {cell.interval} | {other.interval if other.scores else ''} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the heat map: methods in two panels, lags as columns; cells without test runs stay empty."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    all_cells, names = League(rows), in_order(methods())
    half = (len(names) + 1) // 2
    figure = Figure(figsize=(10, 0.25 * half + 1.4), layout="constrained")
    means = [cell.interval.mean for cell in all_cells.cells.values() if cell.scores]
    low, high = (min(means), max(means)) if means else (0.0, 1.0)
    colours = None
    for axes, part in zip(figure.subplots(1, 2), (names[:half], names[half:]), strict=True):
        values = [[_mean(all_cells.cells[name, lag]) for lag in PERIODS] for name in part]
        colours = axes.imshow(values, cmap="viridis", vmin=low, vmax=max(high, low + 0.01), aspect="auto")
        for y, name in enumerate(part):
            for x, lag in enumerate(PERIODS):
                cell = all_cells.cells[name, lag]
                if not cell.scores:
                    box = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="//", edgecolor="#dddddd", linewidth=0)
                    axes.add_patch(box)
                    continue
                text = f"{cell.interval.mean:.2f}{all_cells.mark(name, lag)}"
                text += "" if cell.is_complete else f" ({len(cell.scores)})"
                shade = "white" if cell.interval.mean < (low + high) / 2 else "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=shade)
        axes.set_xticks(range(len(PERIODS)), [lag_name(lag) for lag in PERIODS])
        axes.set_yticks(range(len(part)), part, fontsize=8)
        axes.set_xticks([x + 0.5 for x in range(len(PERIODS) - 1)], minor=True)
        axes.set_yticks([y + 0.5 for y in range(len(part) - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
    figure.colorbar(colours, ax=figure.axes, label="test pass@1", shrink=0.6)
    title = f"test pass@1, mean of {len(TEST_SEEDS)} seeds (fewer: their number in brackets; hatched: not run)"
    figure.suptitle(f"{title}\n{HIGHER} {LOWER} differs from {BASELINE} at the same lag", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _mean(cell: Cell) -> float:
    return cell.interval.mean if cell.scores else float("nan")


INTRODUCTION = """# League: the methods under growing lag

Every [named method](methods.md#the-named-methods) at four lags v, each with its best learning rate, on a small task
with graded difficulty. This page is written by `python -m tests.benchmarks.league --report`: its numbers and
sentences follow from the rows in [league.jsonl](../../tests/benchmarks/results/league.jsonl).

```bash
python -m tests.benchmarks.league --workers 2 --minutes 60   # continue the league, for an hour
python -m tests.benchmarks.league --subset --workers 2       # four methods at one lag, to reproduce their rows
```"""


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    all_cells = League(rows)
    complete = sum(cell.is_complete for cell in all_cells.cells.values())
    progress = (
        f"**{all_cells.num_finished:,} of {all_cells.num_planned:,} planned runs exist**, and {complete} of "
        f"{len(all_cells.cells)} pairs of method and lag are complete."
    )
    parts = [
        INTRODUCTION,
        _filled(progress + ("" if complete == len(all_cells.cells) else " The rest has not been run.")),
        "## The task and the rules",
        _filled(
            f"Sort {LENGTHS[0]} to {LENGTHS[-1]} digits between 0 and 4 (`43013>` has the answer `01334`); the reward "
            f"is 1 or 0. Longer problems are harder. {SIZES['train']:,} training, {SIZES['validation']} validation and "
            f"{SIZES['test']} test problems are disjoint. The settings are in "
            "[league.yaml](../../tests/benchmarks/league.yaml). All runs of a seed begin with the same model, "
            f"which was trained on solutions until it solves {START:.0%} of the validation problems. "
            f"{task_text(all_cells.rows)}"
        ),
        _filled(
            f"Stage 1 runs {len(RATES)} learning rates with {len(SELECT_SEEDS)} seeds, also {short(LOWER_RATE)} if the "
            "lowest of them is the best, and selects the best mean pass@1 on validation problems. Stage 2 runs that "
            f"rate with {len(TEST_SEEDS)} other seeds; only its pass@1 on test problems is reported. "
            f"{rates_text(all_cells)}"
        ),
        _filled(
            f"Each method is compared with `{BASELINE}` at the same lag, paired by seed (two-sided t-test), once both "
            f"have all {len(TEST_SEEDS)} test runs. Holm's method corrects for all {all_cells.num_comparisons} planned "
            f"comparisons; those not made yet count as p = 1. {power_text(all_cells)}"
        ),
        "## Heat map",
        f"![test pass@1 by method and lag](../../tests/benchmarks/results/{PICTURE.name})",
        "## Which method when",
        "\n".join(_filled(f"- {verdict(all_cells, lag)}", indent="  ") for lag in PERIODS),
        _filled(
            "This holds for this task, a model of a tenth of a million parameters and the settings above. A larger "
            "model or another task may order the methods differently."
        ),
        "## Table",
        _filled(
            "Mean test pass@1 ± 95 % interval over seeds; in brackets the difference to "
            f"`{BASELINE}` ± 95 % interval (not corrected) and the corrected p-value, with {HIGHER} or {LOWER} if it "
            "is reported as a difference by the rules above; then the selected learning rate."
        ),
        table(rows),
        failures_text(all_cells),
        _filled(versions_text(all_cells.rows, league.read(REPEATED))),
        pilot_text(league.read(PILOT)),
    ]
    return "\n\n".join(parts) + "\n"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def write(rows: Sequence[Row]) -> None:
    """Write the page and the heat map."""
    PAGE.write_text(page(rows), encoding="utf-8")
    draw(rows, PICTURE)
