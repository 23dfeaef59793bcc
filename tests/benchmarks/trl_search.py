"""Search TRL's fastest settings for a workload of ``tests.benchmarks.step``, for ``--peer best`` there.

    python -m tests.benchmarks.trl_search --device cuda --model 1.5b --workload fixed --seconds 500
    python -m tests.benchmarks.trl_search --device cuda --model FOLDER --data GSM8K --workload real --seconds 500
    python -m tests.benchmarks.trl_search --device cuda --model 1.5b --workload fixed --seconds 500 --cycles 2 5 9
    python -m tests.benchmarks.trl_search --report

Each candidate changes the fastest settings so far by one of ``MOVES``, in this order, and runs in its own process, with
``--steps`` measured steps (3 on a GPU) after ``--warm-up``. The two fastest candidates are measured again, and the one
with the lower median of all its steps wins. Rows are appended to ``tests/benchmarks/results/trl_search.jsonl`` when a
candidate ends, with the error if it failed. A later command repeats the search with the rows it finds and measures
those that are missing or have fewer steps; ``--retry`` measures failed ones again. ``--cycles`` runs the fastest
settings with ``steps_per_generation`` for so many optimizer steps.

GRPOTrainer of TRL 1.16 has no packing and no padding-free mode. The log-probabilities are computed in chunks by a fused
head in all candidates; ``use_liger_kernel`` replaces the kernels of the layers. Attention other than torch's needs
packages or kernels from the hub.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from tests.benchmarks.isolated import IsolatedPart
from tests.benchmarks.step import (
    PEER,
    RESULTS,
    arguments,
    ensure_model,
    machine_name,
    model_folder,
    origin,
    parse,
    phase,
    read_rows,
    start,
)

ROWS = RESULTS / "trl_search.jsonl"
MOVES: list[dict[str, Any]] = [
    {},
    {"liger": True},
    {"detokenize": False},
    {"sleeps": True, "engine_memory": 0.1},
    {"rows": 32},
    {"rows": 64},
    {"rows": 112},
    {"compile": True},
    {"rows": 8},
    {"engine_memory": 0.15},
    {"engine_memory": 0.1},
    {"sleeps": True},
    {"checkpointing": True, "rows": 112},
]
SAME = ("prompts", "group", "prompt_tokens", "completion_tokens", "mean_tokens", "cap_tokens")


def key(row: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies the search that a row belongs to."""
    sizes = {name: row["settings"][name] for name in ("workload", *SAME)}
    return sizes | {name: row[name] for name in ("machine", "device", "model")}


def seconds_per_token(row: dict[str, Any]) -> float:
    """Return the seconds per trained token; infinite for a candidate that failed."""
    found = row["trl"]
    return found["step_seconds"] / found["trained_tokens"] if "step_seconds" in found else float("inf")


def ranking(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return TRL's settings in these rows, the fastest first, by the median of all steps with the same settings."""
    steps: dict[str, list[float]] = {}
    for row in rows:
        if "step_seconds" in row["trl"]:
            steps.setdefault(json.dumps(row["settings"]["peer"]), []).extend(row["trl"]["per_token"])
    return [json.loads(peer) for peer in sorted(steps, key=lambda peer: statistics.median(steps[peer]))]


def best_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return TRL's fastest settings at v = 1 for the options' machine, model and workload."""
    workloads = [name for name in options.workload if name != "none"]
    wanted = {"workload": workloads[0], "device": options.device, "model": options.name}
    wanted |= {"machine": options.machine or machine_name(options.device)}
    wanted |= {name: getattr(options, name) for name in SAME}
    rows = [row for row in read_rows(ROWS) if row["settings"]["v"] == 1 and wanted.items() <= key(row).items()]
    found = ranking(rows)
    if len(workloads) != 1 or not found:
        raise SystemExit(f"--peer best requires one workload, and a row in {ROWS} with {wanted}")
    return found[0]


class Search:
    """Measures candidates, with the next process importing its packages meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shared = options, origin(options)
        self.begin, self.longest = time.monotonic(), 0.0
        self.next: IsolatedPart | None = None

    def blank(self, peer: dict[str, Any], v: int) -> dict[str, Any]:
        """Return a row without results."""
        options = self.options
        given = argparse.Namespace(**vars(options) | {"v": v})
        settings = {name: getattr(options, name) for name in ("micro_batches", *SAME)}
        settings |= phase(given, options.workload[0], v, options.steps, options.warm_up)
        return self.shared | {"settings": settings | {"peer": peer}}

    def measured(self, peer: dict[str, Any], v: int) -> list[dict[str, Any]]:
        """Return the rows of this search at v, with any settings of TRL and at least as many steps as a new row."""
        wanted = self.blank(peer, v)
        rows = [row for row in read_rows(self.options.out) if key(row) == key(wanted) and row["settings"]["v"] == v]
        return [row for row in rows if row["settings"]["steps"] >= wanted["settings"]["steps"]]

    def row(self, peer: dict[str, Any], v: int, runs: int = 1) -> dict[str, Any] | None:
        """Return the first row of a candidate, measured now if it has fewer than ``runs``; None if no time is left."""
        options = self.options
        rows = [row for row in self.measured(peer, v) if row["settings"]["peer"] == peer]
        succeeded = [row for row in rows if "error" not in row["trl"]]
        found = succeeded if succeeded or options.retry else rows
        if len(found) >= runs:
            return found[0]
        left = options.seconds - (time.monotonic() - self.begin)
        if left < self.longest:
            print(f"{left:.0f} s are left, a candidate took {self.longest:.0f} s: run this command again", flush=True)
            return None
        return self.measure(self.blank(peer, v), min(options.limit, left))

    def measure(self, row: dict[str, Any], limit: float) -> dict[str, Any]:
        begin, settings = time.monotonic(), row["settings"]
        chosen = {name: settings[name] for name in ("workload", "v", "steps", "warm_up")}
        process = self.next or start("trl", self.options, [])
        self.next = start("trl", self.options, []) if self.options.early_start else None
        ensure_model(self.options)  # while the processes import their packages
        with process:
            found, failure = process.measure(limit, peer=settings["peer"], phases=[chosen])
        row["trl"] = (found[0] if found else {}) | failure
        row["seconds"] = round(time.monotonic() - begin, 1)
        self.longest = max(self.longest, row["seconds"])
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        with self.options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(describe(row), flush=True)
        return row

    def close(self) -> None:
        if self.next is not None:
            with self.next:
                pass


def settings_text(peer: dict[str, Any]) -> str:
    """Return the settings of TRL that differ from ``PEER``.

    >>> settings_text(PEER | {"rows": 16, "liger": True, "detokenize": False})
    'rows 16, liger, no detokenize'
    """
    changed = {name: value for name, value in peer.items() if value != PEER[name]}
    words = {True: "{}", False: "no {}"}
    each = (words[v].format(n) if isinstance(v, bool) else f"{n} {v}" for n, v in changed.items())
    return ", ".join(each) or "defaults"


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line of a Markdown table."""
    settings, found = row["settings"], row["trl"]
    cells = [row["model"], settings["workload"], str(settings["v"]), settings_text(settings["peer"])]
    cells.append(str(settings["steps"]))
    if "step_seconds" in found:
        stages = (found["stages"][stage] for stage in ("generate", "update"))
        numbers = [found["step_seconds"], *stages, found["peak_gib"], found.get("cache_gib", 0.0)]
        cells += [f"{number:.3g}" for number in numbers]
    else:
        error = found.get("error", "")
        cells += [f"failed: {(error[-1] if isinstance(error, list) else error)[:80]}", "", "", "", ""]
    return f"| {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows as a Markdown table."""
    titles = "| model | workload | v | TRL's settings | steps | step, s | generate | update | peak, GiB | KV cache |\n"
    return titles + "|---|---|---:|---|" + "---:|" * 6 + "\n" + "\n".join(map(describe, rows))


def main() -> None:
    parser = arguments()
    parser.description = __doc__
    parser.set_defaults(out=ROWS, workload=["fixed"], systems=["trl"])
    parser.add_argument("--seconds", type=float, default=540, help="time after which no candidate is started")
    parser.add_argument("--cycles", type=int, nargs="+", default=[], help="values of v > 1, with the fastest settings")
    parser.add_argument("--moves", type=int, default=len(MOVES), help="number of candidates to try")
    parser.add_argument("--retry", action="store_true", help="measure failed candidates again")
    parser.add_argument("--report", action="store_true", help="print all rows as a table")
    options = parse(parser)
    if options.report:
        print(table(read_rows(options.out)))
        return
    if len(options.workload) != 1:
        parser.error("--workload must be one of fixed, realistic and real")
    size, base = options.prompts * options.group, dict(options.peer)
    with model_folder(options):
        search, best = Search(options), None
        try:
            for move in MOVES[: options.moves]:
                peer = (best["settings"]["peer"] if best else base) | move
                if size % peer["rows"]:
                    continue
                if (row := search.row(peer, 1)) is None:
                    return
                best = row if best is None or seconds_per_token(row) < seconds_per_token(best) else best
            for peer in ranking(search.measured(base, 1))[:2]:
                if search.row(peer, 1, runs=2) is None:
                    return
            fastest = ranking(search.measured(base, 1))
            for v in options.cycles:
                if not fastest or search.row(fastest[0], v) is None:
                    return
        finally:
            search.close()
    print(f"fastest at v = 1: {settings_text(fastest[0])}" if fastest else "nothing was measured")


if __name__ == "__main__":
    main()
