"""Time weight syncs into engines, checksums included: ``python -m tests.benchmarks.sync``.

Random weights are changed before every sync, as by an optimizer step; the engines sleep in between, and waking is not
counted. vLLM on a GPU, the embedded engine on a CPU. The first sync starts the engines and is left out. Results are
written to ``tests/benchmarks/results/sync-MACHINE.json``.

    python -m tests.benchmarks.sync                                     # 1.5B, in the trainer's process and in two
    python -m tests.benchmarks.sync --processes 0 --profile sync.txt    # profile of one sync in this process
    python -m tests.benchmarks.sync --shape demo                        # a small model, on a CPU too
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lgrpo import CausalPolicy
from lgrpo.engines import EnginePool, RolloutEngine, TransformersEngine, VLLMEngine
from tests.benchmarks.step import RESULTS, machine_name, slug
from tests.benchmarks.workload import SHAPES, random_policy


def make_engine(processes: int) -> RolloutEngine:
    """Return an engine in the trainer's process, or a pool of ``processes``."""
    one: RolloutEngine = TransformersEngine()
    if torch.cuda.is_available():
        memory = {"gpu_memory_utilization": 0.2 / max(1, processes), "kv_cache_gib": 1.0}
        one = VLLMEngine(dtype="bfloat16", max_model_len=1024, enforce_eager=True, **memory)
    return EnginePool(one, processes) if processes else one


def measure(policy: CausalPolicy, processes: int, syncs: int, profile: Path | None) -> dict[str, Any]:
    """Return the seconds of every sync after the first; an additional one is profiled."""
    engine, profiler = make_engine(processes), cProfile.Profile()
    for step in range(syncs + 1 + (profile is not None)):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(1e-3)
        if step > syncs:
            profiler.enable()
        engine.load_weights(policy.weights(), step, num_rollouts=1)
        profiler.disable()
        engine.finish_cycle()
        engine.sleep()
    if profile:
        with profile.open("w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(40)
    engine.close()
    seconds = [record.seconds for record in engine.state.ledger[1 : syncs + 1]]
    return {"processes": processes, "num_bytes": engine.state.ledger[-1].num_bytes, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[0, 2],
        help="numbers of processes of an EnginePool; 0 for the trainer's process",
    )
    parser.add_argument(
        "--syncs", type=int, default=6, help="number of syncs after the first, which starts the engines"
    )
    parser.add_argument("--profile", type=Path, help="path for a profile of one additional sync in this process")
    parser.add_argument("--out", type=Path, help="path of the results; by default in tests/benchmarks/results")
    options = parser.parse_args()
    if options.syncs < 1:
        parser.error(f"--syncs is {options.syncs}; it must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = random_policy(options.shape, 1024)
    machine, packages = machine_name(device), ("torch", "transformers", *(["vllm"] if device == "cuda" else []))
    results: dict[str, Any] = {"machine": machine, "versions": {name: version(name) for name in packages}}
    results |= {"shape": options.shape, "runs": []}
    out = options.out or RESULTS / f"sync-{slug(machine)}.json"
    for processes in options.processes:
        found = measure(policy, processes, options.syncs, options.profile)
        results["runs"].append(found)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        where = f"{processes} processes" if processes else "the trainer's process"
        print(f"{where}: {found['num_bytes']:,} bytes in {min(found['seconds']):.3f} to {max(found['seconds']):.3f} s")
    print(out)


if __name__ == "__main__":
    main()
