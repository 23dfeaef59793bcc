"""Time the rollouts of one or more engines on one device, without updates: ``python -m tests.benchmarks.engines``.

With random weights and prescribed lengths the engines wake, receive weights, generate and sleep, as for every rollout
at v = 1; finally they generate a cycle of rollouts in one call. vLLM on a GPU, the embedded engine on a CPU. The first
rollout, which starts the engines, is left out. Results are written to
``tests/benchmarks/results/engines-MACHINE.json``.

    python -m tests.benchmarks.engines                                  # 1.5B, 448 × 512 tokens, one to three processes
    python -m tests.benchmarks.engines --processes 2 --profile FOLDER --out OUT.json    # profiles
    python -m tests.benchmarks.engines --shape demo --completion-tokens 32 --prompt-tokens 6      # on a CPU
    python -m tests.benchmarks.engines --shape tiny --engine vllm --processes 1                   # vLLM on a CPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from lgrpo import CausalPolicy, Completion, Prompt, Sampling
from lgrpo.engines import EnginePool, RolloutEngine
from tests.benchmarks.stages import peak_memory, reset_peak_memory
from tests.benchmarks.step import RESULTS, machine_name, slug
from tests.benchmarks.workload import (
    CHARACTERS,
    SHAPES,
    PrescribedEmbedded,
    PrescribedVLLM,
    cache_gib,
    random_policy,
)

PARTS = ("wake", "sync", "generate", "rest")


def make_engine(policy: CausalPolicy, processes: int, options: argparse.Namespace) -> RolloutEngine:
    """Return an engine in the trainer's process, or a pool of ``processes``."""
    longest, count = options.prompt_tokens + options.completion_tokens, max(1, processes)
    blocks = -(-longest // 128)  # vLLM's cache has blocks of 128 tokens on a CPU, smaller ones on a GPU
    one: PrescribedVLLM | PrescribedEmbedded = PrescribedEmbedded()
    if options.engine == "vllm":
        concurrent = min(options.sequences, -(-options.ahead * options.prompts // count) * options.group)
        one = PrescribedVLLM(
            dtype="bfloat16" if torch.cuda.is_available() else None,
            max_model_len=longest,
            max_num_seqs=options.sequences,
            gpu_memory_utilization=0.5 / count,
            kv_cache_gib=1.1 * cache_gib(policy.model.config, concurrent * blocks * 128),
        )
    rollouts = 1 + options.rollouts + options.ahead
    one.given, one.group = [options.completion_tokens] * (rollouts * options.prompts * options.group), options.group
    one.profile = options.profile
    return EnginePool(one, processes) if processes else one


def measure(policy: CausalPolicy, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each part: of every rollout after the first, and per rollout of a cycle in one call."""
    engine, rows, first = make_engine(policy, processes, options), list[dict[str, float]](), 0
    for call, count in enumerate([1] * (1 + options.rollouts) + [options.ahead]):
        if call == 1:
            reset_peak_memory()
        prompts, last = list[Prompt](), first + count * options.prompts
        for position in range(first, last):
            ids = [2 + (position + n) % len(CHARACTERS) for n in range(options.prompt_tokens)]
            prompts.append(Prompt(token_ids=ids, text="", row={}, position=position))
        first = last
        rows.append({part: seconds / count for part, seconds in one_call(engine, policy, prompts, options).items()})
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    found = {"processes": processes, "peak_gib": peak_memory() / 2**30, "asleep_gib": (total - free) / 2**30}
    engine.close()
    return found | {"rollouts": rows[1:-1], "ahead": rows[-1]}


def one_call(
    engine: RolloutEngine, policy: CausalPolicy, prompts: list[Prompt], options: argparse.Namespace
) -> dict[str, float]:
    """Change the weights, sync and generate; return the seconds of each part."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1e-5)
    sampling, groups = Sampling(max_tokens=options.completion_tokens), list[list[Completion]]()

    def generate() -> None:
        groups.extend(engine.generate(prompts, options.group, sampling, 0, policy.tokenizer))
        engine.finish_cycle()

    seconds = {}
    parts = (
        engine.wake,
        lambda: engine.load_weights(policy.weights(), len(engine.state.ledger)),
        generate,
        engine.sleep,
    )
    for name, part in zip(PARTS, parts, strict=True):
        start = time.perf_counter()
        part()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    if any(len(completion.token_ids) != options.completion_tokens for group in groups for completion in group):
        raise RuntimeError("a completion does not have its prescribed length")
    return seconds


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table with a row for every number of engines."""
    s, titles = results["settings"], [*PARTS, "whole", "tokens/s", f"whole, {results['settings']['ahead']} in one call"]
    lines = [f"| engines | {' | '.join(titles)} | peak, GiB |", "|---|" + "---:|" * (len(titles) + 1)]
    for run in results["runs"]:
        parts = [statistics.mean(row[part] for row in run["rollouts"]) for part in PARTS]
        tokens = s["prompts"] * s["group"] * s["completion_tokens"] / parts[PARTS.index("generate")]
        cells = [f"{seconds:.3g}" for seconds in (*parts, sum(parts))]
        cells += [f"{tokens:,.0f}", f"{sum(run['ahead'].values()):.3g}", f"{run['peak_gib']:.3g}"]
        lines.append(f"| {run['processes'] or 'in the trainer'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="numbers of processes of a pool; 0 for the trainer's process",
    )
    kinds, best = ["vllm", "embedded"], "vllm" if torch.cuda.is_available() else "embedded"
    parser.add_argument("--engine", choices=kinds, default=best, help="by default vLLM on a GPU, embedded on a CPU")
    parser.add_argument("--prompts", type=int, default=28, help="prompts per rollout")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=320, help="sequences that each vLLM decodes together")
    parser.add_argument(
        "--rollouts", type=int, default=3, help="number of rollouts after the first, which starts the engines"
    )
    parser.add_argument("--ahead", type=int, default=4, help="number of rollouts of the last call")
    parser.add_argument("--profile", type=Path, help="folder for a profile of each process")
    parser.add_argument("--out", type=Path, help="path of the results; by default in tests/benchmarks/results")
    options = parser.parse_args()
    for name in ("prompts", "group", "prompt_tokens", "completion_tokens", "sequences", "rollouts", "ahead"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    if options.profile:
        if options.out is None:
            parser.error("--profile slows generation down: give --out to store its results elsewhere")
        options.profile.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = random_policy(options.shape, options.prompt_tokens + options.completion_tokens)
    machine, packages = machine_name(device), {"torch": "torch", "transformers": "transformers"}
    if options.engine == "vllm":
        packages["vllm"] = packages_distributions()["vllm"][0]  # the package for CPUs may have a different name
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "profile", "processes")}
    settings["profiled"] = options.profile is not None
    results: dict[str, Any] = {"machine": machine, "versions": {name: version(p) for name, p in packages.items()}}
    results |= {"settings": settings, "runs": []}
    out = options.out or RESULTS / f"engines-{slug(machine)}.json"
    for processes in options.processes:
        results["runs"].append(measure(policy, processes, options))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results | {"runs": results["runs"][-1:]}), flush=True)
    print(f"\n{table(results)}\n{out}")


if __name__ == "__main__":
    main()
