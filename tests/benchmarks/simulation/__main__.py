"""``python -m tests.benchmarks.simulation MEASURED.json --gpus 8 64``."""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from lgrpo.checks import check_range
from tests.benchmarks.simulation.costs import Costs, Machine, Workload, parse_layout
from tests.benchmarks.simulation.loop import Schedule
from tests.benchmarks.simulation.measured import Measured, SimulationError, read_measured
from tests.benchmarks.simulation.outcome import Prediction, predict, table
from tests.benchmarks.simulation.picture import draw

ASSUMPTIONS = """\
Assumptions:
  loop       the rules of the real loop, event by event: a sync waits for the current generation and blocks the next;
             servers sample the next rollout of a cycle during an update; with v = 1 and lead 0 nothing overlaps
  generate   the seconds of a decode step with n completions are interpolated between --floor-ms (n = 1) and the
             measured values; completions are distributed evenly over the engines; the slowest ends the rollout
  update     measured seconds per token; for every micro-batch the model's bytes cross the link three times (FSDP: two
             all-gathers, a reduce-scatter), not overlapped; the rank with the most tokens ends the update
  sync       colocated: measured seconds and an all-gather. Servers: an all-gather, --sync-latency and the model's
             bytes over --sync-bandwidth, all servers at once
  rest       measured seconds outside the stages, such as waking and sleeping: once per generation on shared GPUs,
             none with separate servers
  ignored    memory, tensor parallelism, failures, validation, checkpoints, slow rewards, other network traffic"""


def main(args: list[str]) -> None:
    """Print the table of predictions and write the plot."""
    options = _parser().parse_args(args)
    if options.out is not None and (options.out.suffix != ".png" or not options.out.parent.is_dir()):
        raise SystemExit(f"--out {options.out} must be a .png file in an existing folder")
    try:
        predictions, notes = _simulate(options, read_measured(options.measured))
    except SimulationError as error:
        raise SystemExit(str(error)) from error
    print(table(predictions))
    for note in notes:
        print(note)
    if options.out is None:
        return
    try:
        draw(predictions, options.out)
    except ImportError as error:
        warnings.warn(str(error), stacklevel=1)
    except OSError as error:
        raise SystemExit(f"the plot {options.out} cannot be written: {error}") from error
    else:
        print(f"Plot: {options.out}")


def _simulate(options: argparse.Namespace, measured: Measured) -> tuple[list[Prediction], list[str]]:
    """Return a prediction for each number of GPUs, layout and v, and notes on layouts that were left out."""
    _check(options)
    if over := [count for count, _ in options.speed if count > options.slots]:
        raise SimulationError(f"--speed {over[0]}:… has more completions than --slots {options.slots}")
    decode_steps = dict(measured.decode_steps) | dict(options.speed)
    measured = replace(measured, decode_steps=tuple(sorted(decode_steps.items())))
    model_bytes = measured.model_bytes if options.model_gb is None else options.model_gb * 1e9
    if model_bytes is None:
        raise SimulationError(f"{options.measured} does not contain the size of the model: give --model-gb")
    workload = Workload(
        num_prompts=options.prompts or measured.num_prompts,
        group_size=options.group or measured.group_size,
        mean_tokens=options.mean_tokens or measured.completion_tokens,
        spread=options.spread,
        cap_tokens=options.cap_tokens,
        reuse=options.reuse,
        seed=options.seed,
    )
    machine = Machine(
        node=options.node,
        sync_within=options.sync_bandwidth[0] * 1e9,
        sync_between=options.sync_bandwidth[1] * 1e9,
        sync_latency=options.sync_latency,
        link_within=options.link_bandwidth[0] * 1e9,
        link_between=options.link_bandwidth[1] * 1e9,
        floor=options.floor_ms / 1e3,
        slots=options.slots,
    )
    predictions, notes = [], []
    for num_gpus in options.gpus:
        for name in options.layouts:
            layout = parse_layout(name, num_gpus, options.node)
            if layout is None:
                notes.append(f"{name} is left out on {num_gpus} GPUs: too few nodes of {options.node}")
                continue
            costs = Costs(measured=measured, workload=workload, machine=machine, layout=layout, model_bytes=model_bytes)
            for period in options.v:
                schedule = Schedule(
                    period=period,
                    lead=options.lead,
                    generate_ahead=options.generate_ahead,
                    can_overlap=layout.num_servers > 0,
                )
                predictions.append(predict(costs, schedule, options.rollouts))
    if not predictions:
        raise SimulationError("no layout is left: " + "; ".join(notes))
    return predictions, notes


def _check(options: argparse.Namespace) -> None:
    at_least = dict.fromkeys(("lead", "spread", "floor_ms", "sync_latency", "seed"), 0)
    at_least |= dict.fromkeys(("v", "prompts", "mean_tokens", "cap_tokens", "reuse", "node", "slots", "rollouts"), 1)
    bounds = {name: {"at_least": bound} for name, bound in {**at_least, "group": 2}.items()}
    bounds |= {name: {"above": 0} for name in ("model_gb", "sync_bandwidth", "link_bandwidth")}
    for name, bound in bounds.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                try:
                    check_range(f"--{name.replace('_', '-')}", value, **bound)
                except ValueError as error:
                    raise SimulationError(str(error)) from error


def _speed(text: str) -> tuple[int, float]:
    """Parse ``448:36500``: completions decoded together, and tokens per second; return seconds of a decode step."""
    number, _, speed = text.partition(":")
    try:
        count, tokens = int(number), float(speed)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be two numbers, such as 448:31760") from None
    if count < 1 or not tokens > 0:
        raise argparse.ArgumentTypeError(f"{text}: both must be above 0")
    return count, count / tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.simulation",
        description="Predict step time and idle share over v and layouts from the stages measured on one GPU.",
        epilog=ASSUMPTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, pair = parser.add_argument, ("WITHIN", "BETWEEN")
    add(
        "measured",
        type=Path,
        help="file of tests.benchmarks.step (JSONL) or tests.benchmarks.vllm_stages, measured on one GPU",
    )
    add("--gpus", type=int, nargs="+", default=[8], help="total numbers of GPUs to compare (8)")
    add(
        "--layouts",
        nargs="+",
        default=["colocated"],
        help="colocated: every GPU serves and trains in turn; 1+7: on each node 1 GPU serves and 7 train; nodes:1+7: "
        "1 of every 8 nodes serves and 7 train (colocated)",
    )
    add("--v", type=int, nargs="+", default=[1, 2, 4, 10], help="values of weight_sync.period (1 2 4 10)")
    add("--lead", type=int, default=0, help="data.lead (0)")
    add("--generate-ahead", action="store_true", help="data.generate_ahead")
    add("--prompts", type=int, help="prompts per rollout over all ranks; default: as measured")
    add("--group", type=int, help="completions per prompt; default: as measured")
    add("--reuse", type=int, default=1, help="optimizer steps per rollout (1)")
    add("--mean-tokens", type=float, help="mean length of a completion before the cap; default: as measured")
    add(
        "--spread",
        type=float,
        default=0.0,
        help="standard deviation of the logarithm of a length; 0 for equal lengths (0)",
    )
    add("--cap-tokens", type=int, help="maximum length of a completion; default: none")
    add(
        "--model-gb", type=float, help="size of the weights in GB; default: 2 bytes per parameter of the measured model"
    )
    add("--node", type=int, default=8, help="GPUs per node (8)")
    add(
        "--sync-bandwidth",
        type=float,
        nargs=2,
        metavar=pair,
        default=[0.78, 0.78],
        help="GB/s from trainers to servers, within a node and between nodes (0.78 0.78: verified files on one node)",
    )
    add("--sync-latency", type=float, default=0.1, help="constant part of a sync with servers, in seconds (0.1)")
    add(
        "--link-bandwidth",
        type=float,
        nargs=2,
        metavar=pair,
        default=[300.0, 50.0],
        help="GB/s of each GPU in a collective, within a node and between nodes (300 50)",
    )
    add(
        "--speed",
        type=_speed,
        nargs="+",
        default=[],
        metavar="N:TOKENS",
        help="tokens per second of one GPU that decodes N completions together, in addition to the measured speed",
    )
    add("--floor-ms", type=float, default=4.0, help="decode step with one completion, in ms (4; not measured)")
    add("--slots", type=int, default=512, help="max_num_seqs of the engine (512)")
    add("--rollouts", type=int, default=24, help="number of rollouts to evaluate, rounded up to whole cycles (24)")
    add("--seed", type=int, default=0, help="seed of the lengths (0)")
    add("--out", type=Path, help="path of the plot (.png)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
