"""Write the kept results of ``step`` and ``update`` as tables and plots: ``python -m tests.benchmarks.page``.

Replaces the text between ``<!-- NAME -->`` and ``<!-- end -->`` on ``tutorials/pages/speed.md`` and draws its plots.
The rest of the page is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.benchmarks import update
from tests.benchmarks.step import RESULTS, SWEEPS, table

PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "speed.md"
COLOURS = {"generate": "#1f77b4", "score": "#9467bd", "sync": "#2ca02c", "update": "#d95f02", "rest": "#7f7f7f"}
NAMES = {"lgrpo": "lgrpo", "trl": "TRL"}


def kept() -> dict[str, dict[str, Any]]:
    """Return every kept result by the name of its file without ``step-``."""
    return {p.stem.removeprefix("step-"): json.loads(p.read_text()) for p in sorted(RESULTS.glob("step-*.json"))}


def main_runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if run["sweep"] in (None, "also v")]


def describe(name: str, result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    blocks, runs = [], main_runs(result)
    for run in runs:
        if run.get("brief"):
            continue
        s = run["settings"]
        tokens = (
            f"{s['completion_tokens']} tokens each"
            if s["workload"] == "fixed"
            else f"log-normal lengths, mean {s['mean_tokens']:g}, at most {s['cap_tokens']}"
        )
        v = f"{s['v']} (TRL 1)" if run["sweep"] and "trl" in run else s["v"]
        title = (
            f"**{result['model']}, {s['workload']} lengths**: {s['prompts']} prompts of {s['prompt_tokens']} tokens × "
            f"{s['group']} completions, {tokens}; v = {v}, micro-batches: {s['micro_batches']}; "
            f"steps: {s['steps']} after {s['warm_up']}"
        )
        title += f"; {run['note']}" if "note" in run else ""
        title += f". Ratio to TRL: **{run['ratio']:.2f}**" if "ratio" in run else ""
        blocks.append(f"{title}\n\n{table(run)}")
    if others := [run for run in runs if run.get("brief")]:
        blocks.append(brief(others))
    return "\n\n".join([*blocks, source(result, f"step-{name}.json")])


def brief(runs: list[dict[str, Any]]) -> str:
    """Return a table with one row for each older run."""
    lines = ["| other runs | v | lgrpo, s | generate | TRL, s | generate | ratio | GiB |", "|---|" + "---:|" * 7]
    for run in runs:
        both = [run.get(system, {}) for system in NAMES]
        cells = [f"{run['settings']['workload']} lengths, {run['note']}", str(run["settings"]["v"])]
        for times in both:
            seconds = [times["step_seconds"], times["stages"]["generate"]] if "step_seconds" in times else []
            cells += [f"{each:.3g}" for each in seconds] or ["", ""]
        cells.append(f"{run['ratio']:.2f}" if "ratio" in run else "")
        cells.append(" / ".join(f"{times['peak_gib']:.3g}" for times in both if "peak_gib" in times))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def source(result: dict[str, Any], file: str) -> str:
    """Return the machine, the versions and a link to the results."""
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    return f"{result['machine']}; {versions}; [results](../../tests/benchmarks/results/{file})."


def sweeps(result: dict[str, Any]) -> str:
    """Return a table of the seconds of a step for each sweep."""
    blocks = []
    for sweep, field in (("v", "v"), ("group", "group"), ("length", "completion_tokens")):
        runs = [run for run in result["runs"] if run["sweep"] == sweep and "step_seconds" in run.get("lgrpo", {})]
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


def filled(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with the tables of the results."""
    blocks = updates()
    for name, result in results.items():
        blocks |= {name: describe(name, result), f"sweeps of {name}": sweeps(result)}
    for marker, block in blocks.items():
        pattern = rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, b=block: f"{m[1]}\n{b}\n\n{m[2]}", text, flags=re.DOTALL)
    return text


def draw_stages(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the stages of a step relative to TRL's whole step."""
    plt = _pyplot()
    rows = [
        (f"{NAMES[system]}{_setting(run, system)}\n{result['model']}, {run['settings']['workload']}", run[system], run)
        for result in results.values()
        for run in main_runs(result)
        if "ratio" in run and not run.get("brief")
        for system in (["lgrpo"] if run["sweep"] else ["trl", "lgrpo"])  # TRL's bar is the same as at v = 1
    ]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(rows) + 1.3), layout="constrained")
    for row, (_, times, run) in enumerate(reversed(rows)):
        left, whole = 0.0, run["trl"]["step_seconds"]
        if "stages" not in times:
            axes.barh(row, times["step_seconds"] / whole, color="#dddddd", height=0.75)
            continue
        for stage, colour in COLOURS.items():
            width = times["stages"][stage] / whole
            axes.barh(row, width, left=left, color=colour, height=0.75, label=stage if not row else None)
            left += width
    axes.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)], fontsize=8)
    axes.set_xlabel("time of a step relative to TRL")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), fontsize=8, ncols=len(COLOURS), loc="outside upper center")
    figure.savefig(path, dpi=120)


def _setting(run: dict[str, Any], system: str) -> str:
    """Return the settings that distinguish a run in the plot."""
    settings = run["settings"]
    engines = f", {settings['processes']} engines" if system == "lgrpo" and settings.get("processes") else ""
    return engines + (f", v = {settings['v']}" if settings["v"] > 1 else "")


def draw_sweeps(result: dict[str, Any], path: Path) -> None:
    """Draw the seconds of a step over v, G and length; dotted lines are proportional to the last point."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    titles = {"v": ("v", "v"), "group": ("group", "G"), "length": ("completion_tokens", "completion tokens")}
    for axes, (sweep, (field, title)) in zip(panels, titles.items(), strict=True):
        runs = [run for run in result["runs"] if run["sweep"] == sweep]
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
    results = kept()
    PAGE.write_text(filled(PAGE.read_text(), results))
    draw_stages(results, PAGE.with_name("speed_stages.png"))
    for result in results.values():
        if any(run["sweep"] in SWEEPS for run in result["runs"]):
            draw_sweeps(result, PAGE.with_name(f"speed_sweeps_{result['model']}.png"))
    print(PAGE)


if __name__ == "__main__":
    main()
