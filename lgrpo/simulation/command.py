"""``lgrpo simulate``."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from pathlib import Path

from lgrpo.simulation.costs import Costs, Machine, Workload, parse_layout
from lgrpo.simulation.figures import Figures, figures, table
from lgrpo.simulation.loop import Schedule
from lgrpo.simulation.measured import Measured, SimulationError, read_measured
from lgrpo.simulation.picture import draw

ASSUMPTIONS = """\
What is assumed:
  the loop   its own rules, event by event: a sync waits for what is being sampled and is waited for; servers sample
             the next rollout of a cycle while this one trains; with v = 1 and lead 0 nothing overlaps
  generate   a decode step with n completions takes --floor-ms and more with n, on straight lines through what was
             measured; completions are dealt evenly to the engines; the slowest ends the rollout
  update     measured seconds a token, and for every micro-batch the model's bytes three times over the link (FSDP:
             two all-gathers, a reduce-scatter), none of it hidden; the rank with the most tokens ends it
  sync       colocated: as measured, and an all-gather. Servers: an all-gather, --sync-latency and the model's bytes
             over --sync-bandwidth, all servers at once
  the rest   waking and sleeping, whatever was measured beside the stages: once for each generation where GPUs are
             shared, not at all where servers have their own
  not there  memory, tensor parallelism, failures, validation, checkpoints, slow rewards, other users of the network"""


def simulate(args: list[str]) -> None:
    """``lgrpo simulate MEASURED.json --gpus …``."""
    own = _parser().parse_args(args)
    if own.out is not None and (own.out.suffix != ".png" or not own.out.parent.is_dir()):
        raise SystemExit(f"lgrpo: --out {own.out} is to be a .png file in a folder that is there")
    try:
        found, notes = _simulate(own, read_measured(own.measured))
    except SimulationError as error:
        raise SystemExit(f"lgrpo: {error}") from error
    print(table(found))
    for note in notes:
        print(note)
    if own.out is None:
        return
    try:
        draw(found, own.out)
    except ImportError as error:
        warnings.warn(str(error), stacklevel=1)
    except OSError as error:
        raise SystemExit(f"lgrpo: the picture {own.out} cannot be written: {error}") from error
    else:
        print(f"The picture is {own.out}")


def _simulate(own: argparse.Namespace, measured: Measured) -> tuple[list[Figures], list[str]]:
    _check(own)
    if over := [count for count, _ in own.pace if count > own.slots]:
        raise SimulationError(f"--pace {over[0]}:… is more at a time than --slots {own.slots} allows")
    measured = replace(measured, paces=tuple(sorted((dict(measured.paces) | dict(own.pace)).items())))
    model_bytes = measured.model_bytes if own.model_gb is None else own.model_gb * 1e9
    if model_bytes is None:
        raise SimulationError(f"{own.measured} does not say how large the model is: give --model-gb, as it is sent")
    workload = Workload(
        num_prompts=own.prompts or measured.num_prompts,
        group_size=own.group or measured.group_size,
        mean_tokens=own.mean_tokens or measured.completion_tokens,
        spread=own.spread,
        cap_tokens=own.cap_tokens,
        reuse=own.reuse,
        seed=own.seed,
    )
    machine = Machine(
        node=own.node,
        sync_within=own.sync_bandwidth[0] * 1e9,
        sync_between=own.sync_bandwidth[1] * 1e9,
        sync_latency=own.sync_latency,
        link_within=own.link_bandwidth[0] * 1e9,
        link_between=own.link_bandwidth[1] * 1e9,
        floor=own.floor_ms / 1e3,
        slots=own.slots,
    )
    found, notes = [], []
    for num_gpus in own.gpus:
        for name in own.layouts:
            layout = parse_layout(name, num_gpus, own.node)
            if layout is None:
                notes.append(f"{name} is left out on {num_gpus} GPUs: they are too few nodes of {own.node}")
                continue
            costs = Costs(measured=measured, workload=workload, machine=machine, layout=layout, model_bytes=model_bytes)
            for period in own.v:
                schedule = Schedule(
                    period=period,
                    lead=own.lead,
                    generate_ahead=own.generate_ahead,
                    can_overlap=layout.num_servers > 0,
                )
                found.append(figures(costs, schedule, own.rollouts))
    if not found:
        raise SimulationError("no layout is left: " + "; ".join(notes))
    return found, notes


def _check(own: argparse.Namespace) -> None:
    least = {
        "v": 1,
        "lead": 0,
        "prompts": 1,
        "group": 2,
        "mean_tokens": 1,
        "cap_tokens": 1,
        "spread": 0,
        "reuse": 1,
        "node": 1,
        "slots": 1,
        "rollouts": 1,
        "floor_ms": 0,
        "sync_latency": 0,
        "seed": 0,
    }
    for name, smallest in least.items():
        given = getattr(own, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= smallest:
                raise SimulationError(f"--{name.replace('_', '-')} is {value:g}; it must be {smallest} or more")
    for name in ("model_gb", "sync_bandwidth", "link_bandwidth"):
        given = getattr(own, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value > 0:
                raise SimulationError(f"--{name.replace('_', '-')} is {value:g}; it must be more than 0")


def _pace(text: str) -> tuple[int, float]:
    """``448:36500``: completions at a time, and the seconds of a decode step with so many."""
    number, _, speed = text.partition(":")
    try:
        count, tokens = int(number), float(speed)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is to be two numbers, as 448:31760") from None
    if count < 1 or not tokens > 0:
        raise argparse.ArgumentTypeError(f"{text}: both must be more than 0")
    return count, count / tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lgrpo simulate",
        description="Step time and idle share on GPUs you do not have yet, over v and layouts, from what one measured.",
        epilog=ASSUMPTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, pair = parser.add_argument, ("WITHIN", "BETWEEN")
    add("measured", type=Path, help="JSON of tests.benchmarks.step or tests.benchmarks.vllm_stages, made on one GPU")
    add("--gpus", type=int, nargs="+", default=[8], help="how many, in all; several make a comparison (8)")
    add(
        "--layouts",
        nargs="+",
        default=["colocated"],
        help="colocated: every GPU serves and trains in turn; 1+7: on each node 1 GPU serves and 7 train; nodes:1+7: "
        "of every 8 nodes 1 serves and 7 train (colocated)",
    )
    add("--v", type=int, nargs="+", default=[1, 2, 4, 10], help="weight_sync.period (1 2 4 10)")
    add("--lead", type=int, default=0, help="data.lead (0)")
    add("--generate-ahead", action="store_true", help="data.generate_ahead")
    add("--prompts", type=int, help="P, over all ranks; by default as measured")
    add("--group", type=int, help="G; by default as measured")
    add("--reuse", type=int, default=1, help="i (1)")
    add("--mean-tokens", type=float, help="of a completion, before the cap; by default as measured")
    add("--spread", type=float, default=0.0, help="standard deviation of a length's logarithm; 0: equally long (0)")
    add("--cap-tokens", type=int, help="longest completion; by default none")
    add("--model-gb", type=float, help="the weights as they are sent; by default 2 bytes for each parameter measured")
    add("--node", type=int, default=8, help="GPUs of a node (8)")
    add(
        "--sync-bandwidth",
        type=float,
        nargs=2,
        metavar=pair,
        default=[0.78, 0.78],
        help="GB/s from trainers to servers, on a node and between nodes (0.78 0.78: verified files, on one node)",
    )
    add("--sync-latency", type=float, default=0.1, help="seconds a sync with servers takes whatever its size (0.1)")
    add(
        "--link-bandwidth",
        type=float,
        nargs=2,
        metavar=pair,
        default=[300.0, 50.0],
        help="GB/s of each GPU in a collective, on a node and between nodes (300 50)",
    )
    add(
        "--pace",
        type=_pace,
        nargs="+",
        default=[],
        metavar="N:TOKENS",
        help="tokens a second that one GPU generates with N completions at a time, beside those of the file",
    )
    add("--floor-ms", type=float, default=4.0, help="a decode step with one completion, in ms (4; not measured)")
    add("--slots", type=int, default=512, help="max_num_seqs of the engine (512)")
    add("--rollouts", type=int, default=24, help="how many are looked at, or more to fill a cycle (24)")
    add("--seed", type=int, default=0, help="of the lengths (0)")
    add("--out", type=Path, help="a picture, as .png")
    return parser
