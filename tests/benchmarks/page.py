"""Write the rows of ``step``, ``trl_search`` and ``update`` as tables and plots: ``python -m tests.benchmarks.page``.

Replaces the text between ``<!-- NAME -->`` and ``<!-- end -->`` on ``tutorials/pages/speed.md`` and draws its plots.
The rest of the page is written by hand. Every run stays in ``results/step.jsonl``; the page shows the rows with
``shown``. ``--show COMMAND …`` marks the rows of these commands instead of earlier ones with the same settings.

Rows with ``file_commit`` were taken from files that later runs replaced. It and ``file_time`` are those of the commit
that added the measurement, not of the code that was measured; ``command`` only distinguishes the runs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from tests.benchmarks import trl_search, update
from tests.benchmarks.check import SAME
from tests.benchmarks.step import RESULTS, SWEEPS, read_rows, slug, table

PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "speed.md"
ROWS = RESULTS / "step.jsonl"
COLOURS = {"generate": "#1f77b4", "score": "#9467bd", "sync": "#2ca02c", "update": "#d95f02", "rest": "#7f7f7f"}
NAMES = {"lgrpo": "lgrpo", "trl": "TRL"}
Rows = list[dict[str, Any]]


def shown(rows: Rows) -> dict[str, Rows]:
    """Return the rows that the page shows by the names of machine and model."""
    found: dict[str, Rows] = {}
    for row in rows:
        if row.get("shown"):
            found.setdefault(slug(f"{row['machine']}-{row['model']}"), []).append(row)
    return found


def mark(rows: Rows, commands: list[str]) -> None:
    """Show the rows of these commands, and hide earlier ones of the same machine, model, sizes and number of engines.

    Rows with a handicap stay: they are listed separately.
    """

    def subject(row: dict[str, Any]) -> tuple[Any, ...]:
        settings = [row["settings"].get(name) for name in (*SAME, "processes")]
        return row["machine"], row["model"], row["sweep"], *settings

    if unknown := set(commands) - {row["command"] for row in rows}:
        raise SystemExit(f"{ROWS} has no rows of the commands {sorted(unknown)}")
    replaced = {subject(row) for row in rows if row["command"] in commands}
    for row in rows:
        if row["command"] in commands:
            row["shown"] = True
        elif subject(row) in replaced and "handicap" not in row:
            row["shown"] = False


def main_rows(rows: Rows) -> Rows:
    """Return the rows of no sweep that were measured without a handicap."""
    return [row for row in rows if row["sweep"] in (None, "also v") and "handicap" not in row]


def describe(rows: Rows) -> str:
    """Return the tables of the rows of a machine and model."""
    blocks = []
    for row in main_rows(rows):
        s = row["settings"]
        tokens = {
            "fixed": f"{s['completion_tokens']} tokens each",
            "realistic": f"log-normal lengths, mean {s['mean_tokens']:g}, at most {s['cap_tokens']}",
            "real": f"ended by the model, at most {s['cap_tokens']} tokens",
        }[s["workload"]]
        prompts = "of GSM8K" if s["workload"] == "real" else f"of {s['prompt_tokens']} tokens"
        v = f"{s['v']} (TRL 1)" if row["sweep"] and "trl" in row else s["v"]
        title = (
            f"**{row['model']}, {s['workload']} lengths**: {s['prompts']} prompts {prompts} × "
            f"{s['group']} completions, {tokens}; v = {v}, {micro_batches(s)}; "
            f"steps: {s['steps']} after {s['warm_up']}{'' if 'ratio_range' in row else ', means'}"
        )
        title += f"; TRL: {trl_search.settings_text(s['peer'])}" if "peer" in s else ""
        title += f"; {row['note']}" if "note" in row else ""
        title += f"; memory: {row['memory']}" if "memory" in row else ""
        blocks.append(f"{title}{ratio_text(row)}\n\n{table(row)}\n\n{source(row, ROWS.name)}")
    if older := [row for row in rows if "handicap" in row]:
        blocks.append(with_handicap(older))
    return "\n\n".join(blocks)


def micro_batches(settings: dict[str, Any]) -> str:
    """Return how lgrpo's update is divided.

    >>> micro_batches({"micro_batches": 28}), micro_batches({"micro_batch_tokens": 8192, "share_prompts": True})
    ('micro-batches: 28', 'micro-batches of up to 8,192 tokens, shared prompts')
    """
    if (budget := settings.get("micro_batch_tokens")) is None:
        text = f"micro-batches: {settings['micro_batches']}"
    else:
        text = f"micro-batches of up to {budget:,} tokens"
    return text + (", shared prompts" if settings.get("share_prompts") else "")


def ratio_text(row: dict[str, Any]) -> str:
    """Return the ratio to TRL with its range; that of the medians for rows that have means."""
    if "ratio_range" in row:
        return ". Ratio to TRL: **{:.2f}** ({:.2f}–{:.2f})".format(row["ratio"], *row["ratio_range"])
    if "ratio" in row:
        ours, peer = (statistics.median(row[system]["steps"]) for system in NAMES)
        return f". Ratio to TRL: **{peer / ours:.2f}** of the medians, {row['ratio']:.2f} of the means"
    return ""


def with_handicap(rows: Rows) -> str:
    """Return a table with one line for each run that was measured with a handicap of TRL."""
    lines = ["| runs that flatter lgrpo | v | lgrpo, s | generate | TRL, s | generate | ratio | GiB |"]
    lines.append("|---|" + "---:|" * 7)
    for row in rows:
        both = [row.get(system, {}) for system in NAMES]
        note = f", {row['note']}" if "note" in row else ""
        cells = [f"{row['settings']['workload']} lengths{note}", str(row["settings"]["v"])]
        for times in both:
            seconds = times.get("step_seconds"), times.get("stages", {}).get("generate")
            cells += ["" if each is None else f"{each:.3g}" for each in seconds]
        cells.append(f"{row['ratio']:.2f}" if "ratio" in row else "")
        cells.append(" / ".join(f"{times['peak_gib']:.3g}" for times in both if "peak_gib" in times))
        lines.append(f"| {' | '.join(cells)} |")
    handicaps = "; ".join(dict.fromkeys(row["handicap"] for row in rows))
    last = {name: value for name, value in rows[-1].items() if name != "file_commit"}  # each row has its own
    return "\n".join([*lines, "", f"Handicap of TRL: {handicaps}. {source(last, ROWS.name)}"])


def source(row: dict[str, Any], file: str) -> str:
    """Return the machine, the versions and a link to the results."""
    versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
    commit = f"; commit {row['commit']}" if "commit" in row else ""
    commit += f"; in the repository since {row['file_commit']}" if "file_commit" in row else ""
    return f"{row['machine']}; {versions}{commit}; [results](../../tests/benchmarks/results/{file})."


def sweeps(rows: Rows) -> str:
    """Return a table of the seconds of a step for each sweep."""
    blocks = []
    for sweep, field in (("v", "v"), ("group", "group"), ("length", "completion_tokens")):
        runs = [run for run in rows if run["sweep"] == sweep and "step_seconds" in run.get("lgrpo", {})]
        if not runs:
            continue
        title = {"v": "v", "group": "G", "length": "completion tokens"}[sweep]
        lines = [f"| {title} | " + " | ".join(str(run["settings"][field]) for run in runs) + " |"]
        lines.append("|---|" + "---:|" * len(runs))
        for system, label in NAMES.items():
            if all("step_seconds" in run.get(system, {}) for run in runs):
                lines.append(f"| {label}, s | " + " | ".join(f"{r[system]['step_seconds']:.3f}" for r in runs) + " |")
        if sweep == "v" and all("ratio" in run for run in runs):
            lines.append("| ratio | " + " | ".join(f"{run['ratio']:.2f}" for run in runs) + " |")
        if sweep != "v":
            tokens = [run["lgrpo"]["trained_tokens"] / run["lgrpo"]["step_seconds"] for run in runs]
            lines.append("| tokens trained per second | " + " | ".join(f"{t:,.0f}" for t in tokens) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def updates() -> dict[str, str]:
    """Return the tables of the update benchmark by the names of their files."""
    found = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("update-*.json"))}
    return {
        path.stem: f"{update.table(result['rows'])}\n\n{source(result, path.name)}" for path, result in found.items()
    }


def filled(text: str, rows: Rows) -> str:
    """Return the page with the tables of the shown rows."""
    blocks = updates() | {"trl search": trl_search.table(read_rows(trl_search.ROWS))}
    for name, group in shown(rows).items():
        blocks |= {name: describe(group), f"sweeps of {name}": sweeps(group)}
    for marker, block in blocks.items():
        pattern = rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, b=block: f"{m[1]}\n{b}\n\n{m[2]}", text, flags=re.DOTALL)
    return text


def draw_stages(rows: Rows, path: Path) -> None:
    """Draw the stages of a step relative to TRL's whole step."""
    plt = _pyplot()
    bars = [
        (f"{NAMES[system]}{_setting(run, system)}\n{run['model']}, {run['settings']['workload']}", run[system], run)
        for run in main_rows(rows)
        if "ratio" in run
        for system in (["lgrpo"] if run["sweep"] else ["trl", "lgrpo"])  # TRL's bar is the same as at v = 1
    ]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(bars) + 1.3), layout="constrained")
    for row, (_, times, run) in enumerate(reversed(bars)):
        left, whole = 0.0, run["trl"]["step_seconds"]
        for stage, colour in COLOURS.items():
            width = times["stages"][stage] / whole
            axes.barh(row, width, left=left, color=colour, height=0.75, label=stage if not row else None)
            left += width
    axes.set_yticks(range(len(bars)), [label for label, *_ in reversed(bars)], fontsize=8)
    axes.set_xlabel("time of a step relative to TRL")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), fontsize=8, ncols=len(COLOURS), loc="outside upper center")
    figure.savefig(path, dpi=120)


def _setting(run: dict[str, Any], system: str) -> str:
    """Return the settings that distinguish a run in the plot."""
    settings = run["settings"]
    engines = f", {settings['processes']} engines" if system == "lgrpo" and settings.get("processes") else ""
    return engines + (f", v = {settings['v']}" if settings["v"] > 1 else "")


def draw_sweeps(rows: Rows, path: Path) -> None:
    """Draw the seconds of a step over v, G and length; dotted lines are proportional to the last point."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    titles = {"v": ("v", "v"), "group": ("group", "G"), "length": ("completion_tokens", "completion tokens")}
    for axes, (sweep, (field, title)) in zip(panels, titles.items(), strict=True):
        runs = [run for run in rows if run["sweep"] == sweep]
        for system, colour in (("lgrpo", "#d95f02"), ("trl", "#1f77b4")):
            points = [(r["settings"][field], r[system]["step_seconds"]) for r in runs if "stages" in r.get(system, {})]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=NAMES[system])
            if points and sweep != "v":
                x, y = points[-1]
                axes.plot([0, x], [0, y], ":", color="black", linewidth=0.8)
        axes.set_xlabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds of a step")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", nargs="+", default=[], metavar="COMMAND", help="commands whose rows to show")
    options, rows = parser.parse_args(), read_rows(ROWS)
    if options.show:
        mark(rows, options.show)
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(filled(PAGE.read_text(), rows))
    groups = shown(rows)
    draw_stages([row for group in groups.values() for row in group], PAGE.with_name("speed_stages.png"))
    for group in groups.values():
        if any(row["sweep"] in SWEEPS for row in group):
            draw_sweeps(group, PAGE.with_name(f"speed_sweeps_{group[0]['model']}.png"))
    print(PAGE)


if __name__ == "__main__":
    main()
