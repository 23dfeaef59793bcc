"""A whole step of GRPO, ours and TRL's, on one machine: ``python -m tests.benchmarks.step`` (``make bench``).

Both systems train the same model on the same prompts, with the same numbers of prompts, completions and tokens, in the
same precision: one process after the other, the workloads one after the other in each, the first steps of each left out
as warm-up. On a GPU, where starting takes longer than measuring, TRL's packages are imported while lgrpo starts. What a
system does with its memory and in what order is its own business. Results are written to
``tests/benchmarks/results/step-MACHINE-MODEL.json``;
``python -m tests.benchmarks.page`` makes them a page, ``python -m tests.benchmarks.check`` compares two files of them.

    python -m tests.benchmarks.step                            # the demo's model on a CPU; needs no file, no network
    python -m tests.benchmarks.step --model FOLDER             # any model of Hugging Face
    python -m tests.benchmarks.step --sweep v group length     # cost against v, G and length as well
    python -m tests.benchmarks.step --threads 1 --clock cpu    # on a machine that others use too
    python -m tests.benchmarks.step --device cuda --no-checkpointing --engine-memory 0.15 --processes 2 --also-v 10
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.apart import Apart, inside, wait_for_turn
from tests.benchmarks.stages import STAGES, matmul_peak
from tests.benchmarks.workload import SHAPES, make_model

RESULTS = Path(__file__).parent / "results"
H200 = 790e12  # FLOP/s in bfloat16
SIZES: dict[str, dict[str, Any]] = {  # lengths are scaled down on a CPU: by 16, or by 32
    "demo": {"prompts": 32, "group": 8, "prompt_tokens": 6, "completion_tokens": 32, "mean_tokens": 19.0}
    | {"cap_tokens": 64, "micro_batches": 1, "steps": 10, "warm_up": 3},
    "folder": {"prompts": 4, "group": 4, "prompt_tokens": 8, "completion_tokens": 16, "mean_tokens": 10.0}
    | {"cap_tokens": 32, "micro_batches": 1, "steps": 4, "warm_up": 2},
    "cuda": {"prompts": 28, "group": 16, "prompt_tokens": 100, "completion_tokens": 512, "mean_tokens": 300.0}
    | {"cap_tokens": 1024, "micro_batches": 28, "steps": 2, "warm_up": 1},
}
SWEEPS: dict[str, tuple[str, tuple[int, ...], list[str]]] = {
    "v": ("v", (1, 2, 5, 10), ["lgrpo", "trl"]),
    "group": ("group", (4, 8, 16, 32), ["lgrpo"]),
    "length": ("completion_tokens", (16, 32, 64, 128), ["lgrpo"]),
}
SETTINGS = ("prompts", "group", "prompt_tokens", "completion_tokens", "mean_tokens", "cap_tokens", "micro_batches")
SETTINGS += ("checkpointing", "compile", "liger", "continuous_batching", "threads", "clock", "engine_memory")
SETTINGS += ("processes", "sequences", "peer_engine_memory", "peer_sleeps", "peer_correction", "activation_memory")


def machine_name(device: str) -> str:
    """The processor: its model, and of a CPU the number of cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
        name = next(line.split(":")[1].strip() for line in listed.splitlines() if line.startswith("Model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def start(system: str, options: argparse.Namespace, phases: list[dict[str, Any]]) -> Apart:
    """A process for one system, which waits for its turn."""
    there = argparse.Namespace(**vars(options), phases=phases)
    return Apart("tests.benchmarks.step", system, there, options.threads)


def ensure_model(options: argparse.Namespace) -> None:
    """Makes the model of random weights, where that is what is asked for and it is not there yet."""
    if options.model in SHAPES and not Path(options.folder, "config.json").exists():
        make_model(Path(options.folder), options.model, options.longest)


def measure(process: Apart, limit: float, phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of every phase; each has ``limit`` seconds."""
    found, failure = process.measure(limit * len(phases))
    if found is None:
        return [failure] * len(phases)
    return [figures | failure if "error" in figures else figures for figures in found]


def phase(options: argparse.Namespace, workload: str, v: int, steps: int, warm_up: int) -> dict[str, Any]:
    """Some steps of a run, in whole cycles."""
    if "trl" in options.systems and v == options.v:  # whose cycles begin with the first step; ours after the warm-up
        warm_up = -(-warm_up // v) * v
    return {"workload": workload, "v": v, "steps": -(-steps // v) * v, "warm_up": warm_up}


def compare(
    options: argparse.Namespace, sweep: str | None, phases: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Both systems under the same settings, a run for each phase; TRL in those with the v it is given.

    The runs come after each system, so that what is measured can be kept.
    """
    shared = {name: getattr(options, name) for name in SETTINGS}
    runs: list[dict[str, Any]] = [{"sweep": sweep, "settings": own | shared} for own in phases]
    parts = {s: [i for i, own in enumerate(phases) if s == "lgrpo" or own["v"] == options.v] for s in options.systems}
    parts = {system: places for system, places in parts.items() if places}
    with ExitStack() as stack:
        processes: dict[str, Apart] = {}
        for system, places in parts.items():
            for one in parts if options.early_start else [system]:
                if one not in processes:
                    processes[one] = stack.enter_context(start(one, options, [phases[i] for i in parts[one]]))
            ensure_model(options)  # while they import
            chosen = [runs[i] for i in places]
            begin = time.perf_counter()
            found = measure(processes[system], options.limit, [phases[i] for i in places])
            print(f"{system}: {time.perf_counter() - begin:.0f} s, with its start and warm-up", flush=True)
            for run, figures in zip(chosen, found, strict=True):
                run[system] = figures
            for error in dict.fromkeys(str(run[system]["error"]) for run in chosen if "error" in run[system]):
                print(f"{system} failed: {error}", flush=True)
            yield runs
    for run in runs:
        if run["settings"]["v"] != options.v:
            run["sweep"] = "also v"
            beside_trl(run, runs)
        if all("step_seconds" in run.get(system, {}) for system in ("lgrpo", "trl")):
            ours, peer = (run[system]["step_seconds"] / run[system]["trained_tokens"] for system in ("lgrpo", "trl"))
            run["ratio"] = peer / ours  # a cycle of realistic lengths has other tokens than one step
    yield runs


def beside_trl(run: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Gives a run of lgrpo alone the figures TRL had at v = 1, its best where it does not start at a larger one."""
    for other in others:
        same = other["settings"]["workload"] == run["settings"]["workload"] and other["settings"]["v"] == 1
        if same and "step_seconds" in other.get("trl", {}) and "step_seconds" in run.get("lgrpo", {}):
            run["trl"] = other["trl"]


def table(run: dict[str, Any]) -> str:
    """A run as Markdown. A figure that was not measured stays empty."""
    systems = [system for system in ("lgrpo", "trl") if "step_seconds" in run.get(system, {})]
    names = {"lgrpo": "lgrpo", "trl": "TRL"}
    lines = ["| | " + " | ".join(names[s] for s in systems) + " |", "|---|" + "---:|" * len(systems)]

    def row(name: str, needs: str, cell: Callable[[dict[str, Any]], str]) -> None:
        cells = [cell(run[s]) if needs in run[s] else "" for s in systems]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    def stage_cell(figures: dict[str, Any], stage: str) -> str:
        seconds, speed = figures["stages"].get(stage, 0.0), figures["tokens_per_second"].get(stage)
        return f"{seconds:.3g}" + (f" ({speed:,.0f} tok/s)" if speed and stage != "score" else "")

    def turn_cell(seconds: float) -> str:
        return f"{seconds:.3g}" if seconds > 1e-3 else ""  # else there is nothing that would sleep

    row("whole step, s", "steps", lambda f: f"{f['step_seconds']:.3g} ({min(f['steps']):.3g}–{max(f['steps']):.3g})")
    for stage in STAGES:
        row(f"– {stage}", "stages", lambda f, stage=stage: stage_cell(f, stage))
        if stage == "generate":
            row("– – wake, sleep, room", "turn_seconds", lambda f: turn_cell(f["turn_seconds"]))
    row("update, share of the peak (6N)", "update_mfu", lambda f: f"{f['update_mfu']:.1%}")
    row("own time", "own_share", lambda f: f"{f['own_seconds']:.3g} ({f['own_share']:.1%})")
    row("peak memory, GiB", "peak_gib", lambda f: f"{f['peak_gib']:.3g}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help=f"a folder of Hugging Face, or one of {', '.join(SHAPES)} with random weights")
    parser.add_argument("--workload", nargs="+", choices=["fixed", "realistic", "none"], default=["fixed", "realistic"])
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=[], help="cost against these too, fixed lengths")
    parser.add_argument("--machine", help="its name in the results; by default the processor's model")
    parser.add_argument("--prompts", type=int, help="P")
    parser.add_argument("--group", type=int, help="G")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--completion-tokens", type=int, help="of the fixed workload")
    parser.add_argument("--mean-tokens", type=float, help="of the realistic workload, before the cap")
    parser.add_argument("--cap-tokens", type=int, help="of the realistic workload")
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int)
    parser.add_argument("--sweep-steps", type=int, default=3, help="of each run of a sweep, after one of warm-up")
    parser.add_argument("--v", type=int, default=1, help="TRL's steps_per_generation, in steps")
    parser.add_argument("--also-v", type=int, nargs="+", default=[], help="and a cycle of lgrpo, beside TRL at v = 1")
    parser.add_argument("--engine-memory", type=float, default=0.4, help="share of the GPU that lgrpo's vLLM takes")
    parser.add_argument("--peer-engine-memory", type=float, default=0.3, help="and TRL's; by default as TRL has it")
    parser.add_argument(
        "--peer-sleeps", action=argparse.BooleanOptionalAction, default=False, help="TRL's vLLM sleeps during updates"
    )
    parser.add_argument(
        "--peer-correction",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="TRL's vllm_importance_sampling_correction, its default: one more forward pass, which lgrpo does not need",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="lgrpo samples with an EnginePool of so many; 0: in the trainer's. By default 2 for small models on a CPU",
    )
    parser.add_argument("--sequences", type=int, default=320, help="that each vLLM of lgrpo decodes at a time")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="lgrpo's policy.compile")
    parser.add_argument("--activation-memory", type=float, default=0.8, help="lgrpo's policy.activation_memory")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=False, help="TRL's fused loss")
    parser.add_argument("--continuous-batching", action="store_true", help="TRL generates with transformers' own")
    parser.add_argument("--systems", nargs="+", choices=["lgrpo", "trl"], default=["lgrpo", "trl"])
    parser.add_argument("--threads", type=int, help="of torch; by default a thread for each core")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, where others use the machine too"
    )
    parser.add_argument(
        "--early-start",
        action=argparse.BooleanOptionalAction,
        help="the second system imports its packages while the first one starts; by default on a GPU",
    )
    parser.add_argument("--limit", type=float, default=400, help="seconds for each system and workload")
    parser.add_argument("--out", type=Path, help="the results; by default kept beside the others")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    options.model = options.model or ("1.5b" if cuda else "demo")
    if options.model not in SHAPES and not Path(options.model, "config.json").exists():
        parser.error(f"--model {options.model} is neither a folder with a config.json nor one of {', '.join(SHAPES)}")
    small = options.model in ("demo", "tiny")
    for name, value in SIZES["cuda" if cuda else "demo" if small else "folder"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    if options.prompts * options.group % options.micro_batches:
        parser.error(
            f"{options.prompts} prompts × {options.group} cannot be cut into {options.micro_batches} micro-batches"
        )
    if options.also_v and options.workload == ["none"]:
        parser.error("--also-v goes with a workload, and there is none")
    if options.sequences <= 0:
        parser.error(f"--sequences is {options.sequences}; it must be above 0")
    if options.processes is None:
        options.processes = 2 if small and not cuda and options.threads is None and (os.cpu_count() or 1) > 1 else 0
    if options.clock == "cpu" and options.processes:
        parser.error("--clock cpu is the time of one process: add --processes 0")
    if options.clock == "cpu" and (cuda or options.threads != 1):
        parser.error(
            "--clock cpu adds up the time of all threads: it is that of a step with --threads 1 on a CPU alone"
        )
    options.checkpointing = cuda if options.checkpointing is None else options.checkpointing
    options.compile = cuda if options.compile is None else options.compile
    # Beside a GPU there are cores enough, and the first system imports as much before it even loads a model. On a CPU
    # the first is soon at the steps that are measured, and another process would be in its way.
    options.early_start = cuda if options.early_start is None else options.early_start
    return options


def main() -> None:
    if apart := inside():
        from tests.benchmarks.systems import SYSTEMS, import_packages

        system, options = apart
        import_packages(system)
        if options.early_start and torch.cuda.is_initialized():
            raise RuntimeError(f"importing the packages of {system} took the GPU: add --no-early-start")
        wait_for_turn()
        Path(options.figures).write_text(json.dumps(SYSTEMS[system](options)))
        return
    options = parse()
    machine = options.machine or machine_name(options.device)
    model = Path(options.model).name
    out = options.out or RESULTS / f"step-{slug(f'{machine}-{model}')}.json"
    if options.threads:
        torch.set_num_threads(options.threads)
    options.peak_flops = H200 if options.device == "cuda" else matmul_peak(options.clock)
    results: dict[str, Any] = {"machine": machine, "device": options.device, "model": model}
    packages = ("torch", "transformers", "trl", "lightning", *(["vllm"] if options.device == "cuda" else []))
    results["versions"] = {name: version(name) for name in packages}
    results |= {"peak_flops": options.peak_flops, "runs": []}
    workloads: list[str] = options.workload
    with tempfile.TemporaryDirectory() as name:
        options.folder = name if options.model in SHAPES else options.model
        longest = max(options.completion_tokens, options.cap_tokens, *SWEEPS["length"][1])
        options.longest = options.prompt_tokens + longest  # of all jobs, in one model
        jobs: list[tuple[str | None, argparse.Namespace, list[dict[str, Any]]]] = []
        main_ones = [phase(options, w, options.v, options.steps, options.warm_up) for w in workloads if w != "none"]
        main_ones += [phase(options, w, v, v, 0) for v in options.also_v for w in workloads if w != "none"]
        jobs += [(None, options, main_ones)] if main_ones else []
        for sweep in options.sweep:
            field, values, systems = SWEEPS[sweep]
            own = {"systems": [system for system in systems if system in options.systems]}
            for value in values:
                there = argparse.Namespace(**vars(options) | own | {field: value})
                jobs.append((sweep, there, [phase(there, "fixed", there.v, options.sweep_steps, 1)]))
        for sweep, there, phases in jobs:
            before = results["runs"]
            for runs in compare(there, sweep, phases):
                results["runs"] = before + runs
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1) + "\n")
            for run in runs:
                title = f"{run['settings']['workload']} lengths, v = {run['settings']['v']}"
                title += f", {sweep} {run['settings'][SWEEPS[sweep][0]]}" if sweep in ("group", "length") else ""
                print(f"\n{model}, {title}, on {machine}\n{table(run)}", flush=True)
                if "ratio" in run:
                    print(f"{title}: {run['ratio']:.2f} times as fast as TRL", flush=True)
    print(f"\n{out}")
    if ratios := [run["ratio"] for run in results["runs"] if run["sweep"] not in SWEEPS and "ratio" in run]:
        print(f"ratio to TRL {min(ratios):.2f}")  # the smaller, where there are two workloads
    if any("error" in run.get(system, {}) for run in results["runs"] for system in options.systems):
        sys.exit(1)


if __name__ == "__main__":
    main()
