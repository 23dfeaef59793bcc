"""Compare every named method at v = 1, v = 10 and offline by final pass@1 on ``configs/tiny.yaml``, three seeds each.

    python -m tests.benchmarks.methods            # two runs in parallel; resumable
    python -m tests.benchmarks.methods --report   # table and plot of the rows so far

Each run appends a row to ``tests/benchmarks/results/methods.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PERIODS = {"1": 1, "10": 10, "offline": None}
SEEDS = (0, 1, 2)


def methods() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))


def run(method: str, v: str, seed: int) -> dict[str, Any]:
    """One run of the tiny config, in this process."""
    import torch

    from lgrpo.cli import quiet_lightning
    from lgrpo.commands.fit import LGRPOCLI
    from lgrpo.report import read_series

    torch.set_num_threads(1)
    quiet_lightning()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        LGRPOCLI(
            [
                "fit",
                f"--config={ROOT / 'configs' / 'tiny.yaml'}",
                f"--config={ROOT / 'configs' / 'algorithms' / method}.yaml",
                f"--weight_sync.period={'null' if PERIODS[v] is None else PERIODS[v]}",
                f"--seed_everything={seed}",
                f"--run={folder}/run",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_checkpointing=false",
            ]
        )
        series = read_series(Path(folder) / "run")
    scores = [round(value, 4) for _, value in series["val/pass@1"]]
    seconds = round(time.perf_counter() - start, 1)
    return {"method": method, "v": v, "seed": seed, "pass@1": scores, "seconds": seconds}


def work(job: tuple[str, str, int]) -> dict[str, Any]:
    try:
        return run(*job)
    except Exception as error:
        return dict(zip(("method", "v", "seed"), job, strict=True)) | {
            "error": f"{type(error).__name__}: {error}"[:300]
        }


def read() -> list[dict[str, Any]]:
    path = RESULTS / "methods.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(workers: int) -> None:
    done = {(row["method"], row["v"], row["seed"]) for row in read()}
    jobs = [job for seed in SEEDS for v in PERIODS for m in methods() if (job := (m, v, seed)) not in done]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    RESULTS.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for count, row in enumerate(pool.imap_unordered(work, jobs), start=1):
            with (RESULTS / "methods.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{count}/{len(jobs)} {row}", flush=True)


def summary() -> dict[str, dict[str, list[float]]]:
    """Return the final pass@1 of every seed by method and v."""
    finals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read():
        if "error" not in row:
            finals[row["method"]][row["v"]].append(row["pass@1"][-1])
    return finals


def table(finals: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table of mean and range over seeds, best at v = 10 first."""

    def cell(values: list[float]) -> str:
        return f"{statistics.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–"

    order = sorted(finals, key=lambda name: -statistics.mean(finals[name]["10"] or [0.0]))
    lines = ["| method | v = 1 | v = 10 | offline |", "|---|---|---|---|"]
    lines += [f"| `{name}` | " + " | ".join(cell(finals[name][v]) for v in PERIODS) + " |" for name in order]
    return "\n".join(lines)


def draw(finals: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted(finals, key=lambda name: statistics.mean(finals[name]["10"] or [0.0]))
    figure, axes = plt.subplots(figsize=(8, 0.27 * len(names) + 1.2), layout="constrained")
    styles = {"1": ("v = 1", "#1f77b4", 0.2), "10": ("v = 10", "#d95f02", 0.0), "offline": ("offline", "#7f7f7f", -0.2)}
    start = statistics.mean(row["pass@1"][0] for row in read() if "error" not in row)
    axes.axvline(start, color="black", linewidth=0.8, linestyle=":", label="start (mean)")
    for v, (label, colour, offset) in styles.items():
        for row, name in enumerate(names):
            values = finals[name][v]
            if values:
                axes.plot([min(values), max(values)], [row + offset] * 2, color=colour, linewidth=1.2)
                mean = statistics.mean(values)
                axes.plot(mean, row + offset, "o", color=colour, markersize=4, label=label if not row else None)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("final pass@1 (mean and range of the seeds)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="parallel runs, one thread each")
    parser.add_argument("--report", action="store_true", help="write the report without running anything")
    options = parser.parse_args()
    if not options.report:
        sweep(options.workers)
    finals = summary()
    (RESULTS / "methods.md").write_text(table(finals) + "\n")
    draw(finals, RESULTS / "methods.png")
    print(table(finals))
    if failed := [row for row in read() if "error" in row]:
        print(f"\n{len(failed)} runs failed:", *failed, sep="\n")


if __name__ == "__main__":
    main()
