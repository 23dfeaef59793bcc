"""Time a whole step of GRPO with lgrpo and TRL on one machine: ``python -m tests.benchmarks.step`` (``make bench``).

Both systems train the same model on the same prompts, with the same numbers of prompts and completions, in the same
precision. They run one after the other in separate processes, each with all workloads in turn; the first steps are
left out as warm-up. On a GPU, where starting takes longer than measuring, TRL's packages are imported while lgrpo
starts. Micro-batches, memory use and the order of work are up to each system. Each run appends a row to
``tests/benchmarks/results/step.jsonl``; ``python -m tests.benchmarks.page`` writes a page from the rows it shows,
``python -m tests.benchmarks.check`` compares two files.

    python -m tests.benchmarks.step                            # the demo's model on a CPU; needs no file, no network
    python -m tests.benchmarks.step --model FOLDER             # a Hugging Face model
    python -m tests.benchmarks.step --sweep v group length     # also time against v, G and length
    python -m tests.benchmarks.step --threads 1 --clock cpu    # on a machine with other load
    python -m tests.benchmarks.step --device cuda --workload fixed --peer best      # after tests.benchmarks.trl_search
    python -m tests.benchmarks.step --device cuda --workload real --model FOLDER --data GSM8K --peer best
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
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.isolated import IsolatedPart, isolated_part, wait_for_start
from tests.benchmarks.stages import STAGES, matmul_peak, memory_before
from tests.benchmarks.workload import SHAPES, make_model

RESULTS = Path(__file__).parent / "results"
H200 = 790e12  # FLOP/s in bfloat16
SIZES: dict[str, dict[str, Any]] = {  # on a CPU, lengths are 16 or 32 times shorter
    "demo": {"prompts": 32, "group": 8, "prompt_tokens": 6, "completion_tokens": 32, "mean_tokens": 19.0}
    | {"cap_tokens": 64, "micro_batches": 1, "steps": 10, "warm_up": 3},
    "folder": {"prompts": 4, "group": 4, "prompt_tokens": 8, "completion_tokens": 16, "mean_tokens": 10.0}
    | {"cap_tokens": 32, "micro_batches": 1, "steps": 4, "warm_up": 2},
    "cuda": {"prompts": 28, "group": 16, "prompt_tokens": 100, "completion_tokens": 512, "mean_tokens": 300.0}
    | {"cap_tokens": 1024, "micro_batches": 28, "steps": 3, "warm_up": 1},
}
REAL_CAP = {"cuda": 320, "cpu": 16}
"""Maximum length of completions of real prompts."""
PEER: dict[str, Any] = {
    "rows": None,
    "checkpointing": False,
    "liger": False,
    "compile": False,
    "attention": "sdpa",
    "sleeps": False,
    "engine_memory": 0.3,
    "detokenize": True,
    "correction": False,
    "continuous_batching": False,
}
"""TRL's settings: completions per micro-batch (None: as many as lgrpo), ``gradient_checkpointing``,
``use_liger_kernel``, ``torch_compile``, the attention kernel, ``vllm_enable_sleep_mode``,
``vllm_gpu_memory_utilization``, whether vLLM returns texts (TRL reads token ids only),
``vllm_importance_sampling_correction`` (which adds a forward pass), ``use_transformers_continuous_batching``."""
SWEEPS: dict[str, tuple[str, tuple[int, ...], list[str]]] = {
    "v": ("v", (1, 2, 5, 10), ["lgrpo", "trl"]),
    "group": ("group", (4, 8, 16, 32), ["lgrpo"]),
    "length": ("completion_tokens", (16, 32, 64, 128), ["lgrpo"]),
}
SETTINGS = ("prompts", "group", "prompt_tokens", "completion_tokens", "mean_tokens", "cap_tokens", "micro_batches")
SETTINGS += ("checkpointing", "compile", "threads", "clock", "engine_memory", "cache_gib")
SETTINGS += ("processes", "sequences", "activation_memory", "share_prompts", "micro_batch_tokens", "peer")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def origin(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the rows of a command share: its start, commit, machine, model and versions."""
    packages = ("torch", "transformers", "trl", "lightning", *(["vllm"] if options.device == "cuda" else []))
    return {
        "command": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": options.commit or commit(),
        "machine": options.machine or machine_name(options.device),
        "device": options.device,
        "model": options.name,
        "versions": {name: version(name) for name in packages},
        "peak_flops": options.peak_flops,
    }


def commit() -> str:
    """Return the commit of this repository; "unknown" in a copy without git.

    It is marked if files have changed, except results and pages, which benchmarks write.
    """
    git = ["git", "-C", str(RESULTS)]
    written = [":(top,exclude)tests/benchmarks/results", ":(top,exclude)tutorials/pages"]
    try:
        name, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ":/", *written],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


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


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[None]:
    """Set ``options.folder``: of the given model, or for one with random weights (temporary if not given)."""
    with tempfile.TemporaryDirectory() as name:
        options.folder = (options.folder or name) if options.model in SHAPES else options.model
        yield


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
            run["ratio"] = peer / ours  # with realistic and real lengths, steps have more or fewer tokens
            ours, peer = run["lgrpo"]["per_token"], run["trl"]["per_token"]
            run["ratio_range"] = [min(peer) / max(ours), max(peer) / min(ours)]
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
    row("– of which KV cache", "cache_gib", lambda f: f"{f['cache_gib']:.3g}")
    row("tokens trained in the step", "trained_tokens", lambda f: f"{f['trained_tokens']:,.0f}")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help=f"Hugging Face folder, or one of {', '.join(SHAPES)} with random weights")
    parser.add_argument(
        "--workload", nargs="+", choices=["fixed", "realistic", "real", "none"], default=["fixed", "realistic"]
    )
    parser.add_argument("--data", type=Path, help="folder of GSM8K, for the workload real")
    parser.add_argument("--folder", type=Path, help="folder that keeps a model with random weights for later commands")
    parser.add_argument("--commit", help="commit of the code, for a copy without git")
    parser.add_argument(
        "--sweep", nargs="+", choices=SWEEPS, default=[], help="further runs over these, with fixed lengths"
    )
    parser.add_argument("--name", help="name of the model in the results; by default the one of its folder")
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
    parser.add_argument("--engine-memory", type=float, default=0.15, help="share of the GPU's memory for lgrpo's vLLM")
    parser.add_argument(
        "--cache-gib", type=float, help="size of the KV cache of lgrpo's engines together; default: for a whole rollout"
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help=f"TRL's settings, or best: those of the fastest row of tests.benchmarks.trl_search ({', '.join(PEER)})",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="processes of lgrpo's EnginePool; 0 for the trainer's process (default: 2 on a GPU and for small models)",
    )
    parser.add_argument("--sequences", type=int, default=320, help="sequences that each vLLM of lgrpo decodes together")
    parser.add_argument("--checkpointing", action="store_true", help="lgrpo's policy.gradient_checkpointing")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="lgrpo's policy.compile")
    parser.add_argument("--activation-memory", type=float, default=0.8, help="lgrpo's policy.activation_memory")
    parser.add_argument(
        "--share-prompts",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="lgrpo's policy.share_prompts (default on a GPU, as in configs/fast.yaml)",
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="lgrpo's data.micro_batch_tokens, instead of --micro-batches"
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
    parser.add_argument("--out", type=Path, default=RESULTS / "step.jsonl", help="file to append the rows to")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the checked options of this command."""
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    options.model = options.model or ("1.5b" if cuda else "demo")
    if options.model not in SHAPES and not Path(options.model, "config.json").exists():
        parser.error(f"--model {options.model} is neither a folder with a config.json nor one of {', '.join(SHAPES)}")
    options.name = options.name or Path(options.model).name
    small = options.model in ("demo", "tiny")
    sizes = SIZES["cuda" if cuda else "demo" if small else "folder"]
    if options.workload == ["real"]:
        sizes = sizes | {"cap_tokens": REAL_CAP[options.device]}
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    size = options.prompts * options.group
    if size % options.micro_batches:
        parser.error(
            f"{options.prompts} prompts × {options.group} cannot be split into {options.micro_batches} micro-batches"
        )
    if "real" in options.workload and (options.workload != ["real"] or options.model in SHAPES or not options.data):
        parser.error("the workload real requires --model FOLDER and --data, and no other workload in the same command")
    if options.workload == ["real"]:
        options.prompt_tokens = options.completion_tokens = options.mean_tokens = 0
    if options.peer == ["best"]:
        from tests.benchmarks.trl_search import best_settings

        options.peer = best_settings(options)
    else:
        options.peer = PEER | dict(map(peer_setting, options.peer))
    options.peer["rows"] = options.peer["rows"] or size // options.micro_batches
    if options.peer.keys() != PEER.keys() or size % options.peer["rows"]:
        parser.error(f"--peer {options.peer}: names are {', '.join(PEER)}, and rows must divide {size}")
    if options.also_v and options.workload == ["none"]:
        parser.error("--also-v requires a workload other than none")
    if options.sequences <= 0:
        parser.error(f"--sequences is {options.sequences}; it must be above 0")
    if options.processes is None:
        on_cpu = small and options.threads is None and (os.cpu_count() or 1) > 1
        options.processes = 2 if cuda or on_cpu else 0
    if options.clock == "cpu" and options.processes:
        parser.error("--clock cpu measures one process: add --processes 0")
    if options.clock == "cpu" and (cuda or options.threads != 1):
        parser.error("--clock cpu adds up the time of all threads: it requires --threads 1 on a CPU")
    options.compile = cuda if options.compile is None else options.compile
    options.share_prompts = cuda if options.share_prompts is None else options.share_prompts
    # A machine with a GPU has enough cores for both, and loading the first system takes longer than the imports of the
    # second. On a CPU the imports would overlap with the measured steps.
    options.early_start = cuda if options.early_start is None else options.early_start
    if options.threads:
        torch.set_num_threads(options.threads)
    options.peak_flops = H200 if cuda else matmul_peak(options.clock)
    options.memory_before = memory_before()
    longest = max(options.completion_tokens, options.cap_tokens, *SWEEPS["length"][1])
    options.longest = options.prompt_tokens + longest  # over all jobs, which share the model
    return options


def peer_setting(text: str) -> tuple[str, Any]:
    """Return the name and the value of a setting of TRL.

    >>> peer_setting("rows=32"), peer_setting("attention=sdpa")
    (('rows', 32), ('attention', 'sdpa'))
    """
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def measure_part(part: tuple[str, argparse.Namespace]) -> None:
    """Measure a system in its own process; see :class:`IsolatedPart`."""
    from tests.benchmarks.systems import SYSTEMS, import_packages

    system, options = part
    import_packages(system)
    if options.early_start and torch.cuda.is_initialized():
        raise RuntimeError(f"importing the packages of {system} initialised CUDA: add --no-early-start")
    options = wait_for_start()
    Path(options.results).write_text(json.dumps(SYSTEMS[system](options)))


def main() -> None:
    if part := isolated_part():
        measure_part(part)
        return
    options = parse(arguments())
    shared, rows = origin(options), list[dict[str, Any]]()
    earlier = options.out.read_text() if options.out.exists() else ""
    workloads: list[str] = options.workload
    with model_folder(options):
        jobs: list[tuple[str | None, argparse.Namespace, list[dict[str, Any]]]] = []
        main_phases = [phase(options, w, options.v, options.steps, options.warm_up) for w in workloads if w != "none"]
        main_phases += [phase(options, w, v, v, 0) for v in options.also_v for w in workloads if w != "none"]
        jobs += [(None, options, main_phases)] if main_phases else []
        for sweep in options.sweep:
            field, values, systems = SWEEPS[sweep]
            chosen = {"systems": [system for system in systems if system in options.systems]}
            for value in values:
                given = argparse.Namespace(**vars(options) | chosen | {field: value})
                if given.group != options.group:
                    given.peer = given.peer | {"rows": given.prompts * given.group // given.micro_batches}
                jobs.append((sweep, given, [phase(given, "fixed", given.v, options.sweep_steps, 1)]))
        for sweep, given, phases in jobs:
            before = rows
            for runs in compare(given, sweep, phases):
                rows = before + [shared | run for run in runs]
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(earlier + "".join(json.dumps(row) + "\n" for row in rows))
            for run in runs:
                title = f"{run['settings']['workload']} lengths, v = {run['settings']['v']}"
                title += f", {sweep} {run['settings'][SWEEPS[sweep][0]]}" if sweep in ("group", "length") else ""
                print(f"\n{shared['model']}, {title}, on {shared['machine']}\n{table(run)}", flush=True)
                if "ratio" in run:
                    low, high = run["ratio_range"]
                    print(f"{title}: {run['ratio']:.2f} times as fast as TRL ({low:.2f}–{high:.2f})", flush=True)
    print(f"\n{options.out}: command {shared['command']}")
    if ratios := [row["ratio"] for row in rows if row["sweep"] not in SWEEPS and "ratio" in row]:
        print(f"ratio to TRL {min(ratios):.2f}")  # the smallest over workloads
    if any("error" in row.get(system, {}) for row in rows for system in options.systems):
        sys.exit(1)


if __name__ == "__main__":
    main()
