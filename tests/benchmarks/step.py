"""Time a whole step of GRPO with lgrpo and TRL on one machine: ``python -m tests.benchmarks.step`` (``make bench``).

Both systems train the same model on the same prompts, with the same numbers of prompts, completions and tokens, in the
same precision. They run one after the other in separate processes, each with all workloads in turn; the first steps are
left out as warm-up. On a GPU, where starting takes longer than measuring, TRL's packages are imported while lgrpo
starts. Memory use and the order of work are up to each system. Results are written to
``tests/benchmarks/results/step-MACHINE-MODEL.json``; ``python -m tests.benchmarks.page`` writes a page from them,
``python -m tests.benchmarks.check`` compares two of them.

    python -m tests.benchmarks.step                            # the demo's model on a CPU; needs no file, no network
    python -m tests.benchmarks.step --model FOLDER             # a Hugging Face model
    python -m tests.benchmarks.step --sweep v group length     # also time against v, G and length
    python -m tests.benchmarks.step --threads 1 --clock cpu    # on a machine with other load
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

from tests.benchmarks.isolated import IsolatedPart, isolated_part, wait_for_start
from tests.benchmarks.stages import STAGES, matmul_peak
from tests.benchmarks.workload import SHAPES, make_model

RESULTS = Path(__file__).parent / "results"
H200 = 790e12  # FLOP/s in bfloat16
SIZES: dict[str, dict[str, Any]] = {  # on a CPU, lengths are 16 or 32 times shorter
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
    """Return the model of the GPU, or of the CPU with its number of cores."""
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
    """Return a name in a form suited to file names."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def start(system: str, options: argparse.Namespace, phases: list[dict[str, Any]]) -> IsolatedPart:
    """Start the process of one system, which waits for :meth:`IsolatedPart.measure`."""
    given = argparse.Namespace(**vars(options), phases=phases)
    return IsolatedPart("tests.benchmarks.step", system, given, options.threads)


def ensure_model(options: argparse.Namespace) -> None:
    """Write the model with random weights if the options name a shape and the folder is empty."""
    if options.model in SHAPES and not Path(options.folder, "config.json").exists():
        make_model(Path(options.folder), options.model, options.longest)


def measure(process: IsolatedPart, limit: float, phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of every phase; each may take ``limit`` seconds."""
    found, failure = process.measure(limit * len(phases))
    if found is None:
        return [failure] * len(phases)
    return [result | failure if "error" in result else result for result in found]


def phase(options: argparse.Namespace, workload: str, v: int, steps: int, warm_up: int) -> dict[str, Any]:
    """Return a phase of a run, rounded up to whole cycles."""
    if "trl" in options.systems and v == options.v:  # TRL's cycles start with the first step, lgrpo's after warm-up
        warm_up = -(-warm_up // v) * v
    return {"workload": workload, "v": v, "steps": -(-steps // v) * v, "warm_up": warm_up}


def compare(
    options: argparse.Namespace, sweep: str | None, phases: list[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Measure both systems with the same settings, one run per phase; TRL only in phases with ``options.v``.

    Yield the runs after each system, so that results can be saved early.
    """
    shared = {name: getattr(options, name) for name in SETTINGS}
    runs: list[dict[str, Any]] = [{"sweep": sweep, "settings": phase | shared} for phase in phases]
    parts = {s: [i for i, p in enumerate(phases) if s == "lgrpo" or p["v"] == options.v] for s in options.systems}
    parts = {system: indices for system, indices in parts.items() if indices}
    with ExitStack() as stack:
        processes: dict[str, IsolatedPart] = {}
        for system, indices in parts.items():
            for one in parts if options.early_start else [system]:
                if one not in processes:
                    processes[one] = stack.enter_context(start(one, options, [phases[i] for i in parts[one]]))
            ensure_model(options)  # while the processes import their packages
            chosen = [runs[i] for i in indices]
            begin = time.perf_counter()
            found = measure(processes[system], options.limit, [phases[i] for i in indices])
            print(f"{system}: {time.perf_counter() - begin:.0f} s including start and warm-up", flush=True)
            for run, result in zip(chosen, found, strict=True):
                run[system] = result
            for error in dict.fromkeys(str(run[system]["error"]) for run in chosen if "error" in run[system]):
                print(f"{system} failed: {error}", flush=True)
            yield runs
    for run in runs:
        if run["settings"]["v"] != options.v:
            run["sweep"] = "also v"
            add_trl(run, runs)
        if all("step_seconds" in run.get(system, {}) for system in ("lgrpo", "trl")):
            ours, peer = (run[system]["step_seconds"] / run[system]["trained_tokens"] for system in ("lgrpo", "trl"))
            run["ratio"] = peer / ours  # with realistic lengths, a cycle has more or fewer tokens per step
    yield runs


def add_trl(run: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Add TRL's results at v = 1 to a run of lgrpo alone."""
    for other in others:
        same = other["settings"]["workload"] == run["settings"]["workload"] and other["settings"]["v"] == 1
        if same and "step_seconds" in other.get("trl", {}) and "step_seconds" in run.get("lgrpo", {}):
            run["trl"] = other["trl"]


def table(run: dict[str, Any]) -> str:
    """Return the Markdown table of a run; cells without a measurement are empty."""
    systems = [system for system in ("lgrpo", "trl") if "step_seconds" in run.get(system, {})]
    names = {"lgrpo": "lgrpo", "trl": "TRL"}
    lines = ["| | " + " | ".join(names[s] for s in systems) + " |", "|---|" + "---:|" * len(systems)]

    def row(name: str, needs: str, cell: Callable[[dict[str, Any]], str]) -> None:
        cells = [cell(run[s]) if needs in run[s] else "" for s in systems]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    def stage_cell(result: dict[str, Any], stage: str) -> str:
        seconds, speed = result["stages"].get(stage, 0.0), result["tokens_per_second"].get(stage)
        return f"{seconds:.3g}" + (f" ({speed:,.0f} tok/s)" if speed and stage != "score" else "")

    def turn_cell(seconds: float) -> str:
        return f"{seconds:.3g}" if seconds > 1e-3 else ""  # engines that do not sleep have no such time

    row("whole step, s", "steps", lambda f: f"{f['step_seconds']:.3g} ({min(f['steps']):.3g}–{max(f['steps']):.3g})")
    for stage in STAGES:
        row(f"– {stage}", "stages", lambda f, stage=stage: stage_cell(f, stage))
        if stage == "generate":
            row("– – wake, sleep, free memory", "turn_seconds", lambda f: turn_cell(f["turn_seconds"]))
    row("update, share of the peak (6N)", "update_mfu", lambda f: f"{f['update_mfu']:.1%}")
    row("own time", "own_share", lambda f: f"{f['own_seconds']:.3g} ({f['own_share']:.1%})")
    row("peak memory, GiB", "peak_gib", lambda f: f"{f['peak_gib']:.3g}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help=f"Hugging Face folder, or one of {', '.join(SHAPES)} with random weights")
    parser.add_argument("--workload", nargs="+", choices=["fixed", "realistic", "none"], default=["fixed", "realistic"])
    parser.add_argument(
        "--sweep", nargs="+", choices=SWEEPS, default=[], help="further runs over these, with fixed lengths"
    )
    parser.add_argument("--machine", help="name of the machine in the results; by default the processor's model")
    parser.add_argument("--prompts", type=int, help="prompts per rollout")
    parser.add_argument("--group", type=int, help="completions per prompt")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--completion-tokens", type=int, help="length of completions of the fixed workload")
    parser.add_argument("--mean-tokens", type=float, help="mean length of the realistic workload, before the cap")
    parser.add_argument("--cap-tokens", type=int, help="maximum length of the realistic workload")
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int)
    parser.add_argument(
        "--sweep-steps", type=int, default=3, help="steps of each run of a sweep, after one warm-up step"
    )
    parser.add_argument(
        "--v", type=int, default=1, help="rollouts per cycle; for TRL, steps_per_generation in optimizer steps"
    )
    parser.add_argument(
        "--also-v",
        type=int,
        nargs="+",
        default=[],
        help="values of v of further lgrpo runs, compared with TRL at --v 1",
    )
    parser.add_argument("--engine-memory", type=float, default=0.4, help="share of the GPU's memory for lgrpo's vLLM")
    parser.add_argument(
        "--peer-engine-memory",
        type=float,
        default=0.3,
        help="share of the GPU's memory for TRL's vLLM (0.3, TRL's default)",
    )
    parser.add_argument(
        "--peer-sleeps", action=argparse.BooleanOptionalAction, default=False, help="TRL's vLLM sleeps during updates"
    )
    parser.add_argument(
        "--peer-correction",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="TRL's vllm_importance_sampling_correction (TRL's default), which adds a forward pass",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="processes of lgrpo's EnginePool; 0 for the trainer's process (default: 2 for small models on a CPU)",
    )
    parser.add_argument("--sequences", type=int, default=320, help="sequences that each vLLM of lgrpo decodes together")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="lgrpo's policy.compile")
    parser.add_argument("--activation-memory", type=float, default=0.8, help="lgrpo's policy.activation_memory")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=False, help="TRL's fused loss")
    parser.add_argument(
        "--continuous-batching",
        action="store_true",
        help="let TRL generate with the continuous batching of transformers",
    )
    parser.add_argument("--systems", nargs="+", choices=["lgrpo", "trl"], default=["lgrpo", "trl"])
    parser.add_argument("--threads", type=int, help="number of torch threads; one per core by default")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine with other load"
    )
    parser.add_argument(
        "--early-start",
        action=argparse.BooleanOptionalAction,
        help="import the packages of the second system while the first one starts (default on a GPU)",
    )
    parser.add_argument("--limit", type=float, default=400, help="time limit in seconds for each system and workload")
    parser.add_argument("--out", type=Path, help="path of the results; by default in tests/benchmarks/results")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
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
            f"{options.prompts} prompts × {options.group} cannot be split into {options.micro_batches} micro-batches"
        )
    if options.also_v and options.workload == ["none"]:
        parser.error("--also-v requires a workload other than none")
    if options.sequences <= 0:
        parser.error(f"--sequences is {options.sequences}; it must be above 0")
    if options.processes is None:
        options.processes = 2 if small and not cuda and options.threads is None and (os.cpu_count() or 1) > 1 else 0
    if options.clock == "cpu" and options.processes:
        parser.error("--clock cpu measures one process: add --processes 0")
    if options.clock == "cpu" and (cuda or options.threads != 1):
        parser.error("--clock cpu adds up the time of all threads: it requires --threads 1 on a CPU")
    options.checkpointing = cuda if options.checkpointing is None else options.checkpointing
    options.compile = cuda if options.compile is None else options.compile
    # A machine with a GPU has enough cores for both, and loading the first system takes longer than the imports of the
    # second. On a CPU the imports would overlap with the measured steps.
    options.early_start = cuda if options.early_start is None else options.early_start
    return options


def main() -> None:
    if part := isolated_part():
        from tests.benchmarks.systems import SYSTEMS, import_packages

        system, options = part
        import_packages(system)
        if options.early_start and torch.cuda.is_initialized():
            raise RuntimeError(f"importing the packages of {system} initialised CUDA: add --no-early-start")
        wait_for_start()
        Path(options.results).write_text(json.dumps(SYSTEMS[system](options)))
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
        options.longest = options.prompt_tokens + longest  # over all jobs, which share the model
        jobs: list[tuple[str | None, argparse.Namespace, list[dict[str, Any]]]] = []
        main_phases = [phase(options, w, options.v, options.steps, options.warm_up) for w in workloads if w != "none"]
        main_phases += [phase(options, w, v, v, 0) for v in options.also_v for w in workloads if w != "none"]
        jobs += [(None, options, main_phases)] if main_phases else []
        for sweep in options.sweep:
            field, values, systems = SWEEPS[sweep]
            chosen = {"systems": [system for system in systems if system in options.systems]}
            for value in values:
                given = argparse.Namespace(**vars(options) | chosen | {field: value})
                jobs.append((sweep, given, [phase(given, "fixed", given.v, options.sweep_steps, 1)]))
        for sweep, given, phases in jobs:
            before = results["runs"]
            for runs in compare(given, sweep, phases):
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
        print(f"ratio to TRL {min(ratios):.2f}")  # the smallest over workloads
    if any("error" in run.get(system, {}) for run in results["runs"] for system in options.systems):
        sys.exit(1)


if __name__ == "__main__":
    main()
