"""Engines alone: a rollout's way through one or more of them on one device: ``python -m tests.benchmarks.engines``.

Random weights and prescribed lengths, no update: the engines wake, take weights in, generate, and sleep, as they do for
every rollout at v = 1; at last they generate a cycle of rollouts in one call. vLLM on a GPU, the embedded engine on a
CPU. The first rollout, which starts the engines, is left out. Results are written to
``tests/benchmarks/results/engines-MACHINE.json``.

    python -m tests.benchmarks.engines                                  # 1.5B, 448 × 512 tokens, one to three processes
    python -m tests.benchmarks.engines --processes 2 --profile FOLDER --out OUT.json    # where Python's time goes
    python -m tests.benchmarks.engines --shape demo --completion-tokens 32 --prompt-tokens 6      # on a CPU
    python -m tests.benchmarks.engines --shape tiny --engine vllm --processes 1                   # vLLM there
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
from tests.benchmarks.stages import forget_peak_memory, peak_memory
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
    """In the trainer's process, or in several."""
    longest, count = options.prompt_tokens + options.completion_tokens, max(1, processes)
    blocks = -(-longest // 128)  # of so many tokens is vLLM's cache made, on a CPU; on a GPU of fewer
    one: PrescribedVLLM | PrescribedEmbedded = PrescribedEmbedded()
    if options.engine == "vllm":
        at_a_time = min(options.sequences, -(-options.ahead * options.prompts // count) * options.group)
        one = PrescribedVLLM(
            dtype="bfloat16" if torch.cuda.is_available() else None,
            max_model_len=longest,
            max_num_seqs=options.sequences,
            gpu_memory_utilization=0.5 / count,
            kv_cache_gib=cache_gib(policy.model.config, at_a_time * blocks * 128),
        )
    rollouts = 1 + options.rollouts + options.ahead
    one.given, one.group = [options.completion_tokens] * (rollouts * options.prompts * options.group), options.group
    one.profile = options.profile
    return EnginePool(one, processes) if processes else one


def measure(policy: CausalPolicy, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every part of every rollout after the first, and of a cycle in one call, per rollout."""
    engine, rows, first = make_engine(policy, processes, options), list[dict[str, float]](), 0
    for call, count in enumerate([1] * (1 + options.rollouts) + [options.ahead]):
        if call == 1:
            forget_peak_memory()
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
    """Other weights, and completions of them; seconds of every part."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1e-5)
    sampling, groups = Sampling(max_tokens=options.completion_tokens), list[list[Completion]]()

    def generate() -> None:
        groups.extend(engine.generate(prompts, options.group, sampling, 0, policy.tokenizer))
        engine.spent = True

    seconds = {}
    parts = (engine.wake, lambda: engine.load_weights(policy.weights(), len(engine.ledger)), generate, engine.rest)
    for name, part in zip(PARTS, parts, strict=True):
        start = time.perf_counter()
        part()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    if any(len(completion.token_ids) != options.completion_tokens for group in groups for completion in group):
        raise RuntimeError("a completion has another length than it was to have")
    return seconds


def table(results: dict[str, Any]) -> str:
    """A row for every number of engines."""
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
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3], help="of a pool; 0: the trainer's")
    kinds, best = ["vllm", "embedded"], "vllm" if torch.cuda.is_available() else "embedded"
    parser.add_argument("--engine", choices=kinds, default=best, help="by default vLLM on a GPU, embedded on a CPU")
    parser.add_argument("--prompts", type=int, default=28, help="P")
    parser.add_argument("--group", type=int, default=16, help="G")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=320, help="that each vLLM decodes at a time")
    parser.add_argument("--rollouts", type=int, default=3, help="after the first, which starts the engines")
    parser.add_argument("--ahead", type=int, default=4, help="rollouts in one call, at last")
    parser.add_argument("--profile", type=Path, help="a folder: write where the time of each process goes")
    parser.add_argument("--out", type=Path, help="the results; by default kept beside the others")
    options = parser.parse_args()
    for name in ("prompts", "group", "prompt_tokens", "completion_tokens", "sequences", "rollouts", "ahead"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be above 0")
    if options.profile:
        if options.out is None:
            parser.error("--profile slows generating down: such results are kept where --out says, not beside others")
        options.profile.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = random_policy(options.shape, options.prompt_tokens + options.completion_tokens)
    machine, packages = machine_name(device), {"torch": "torch", "transformers": "transformers"}
    if options.engine == "vllm":
        packages["vllm"] = packages_distributions()["vllm"][0]  # of a CPU it may have another name
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
