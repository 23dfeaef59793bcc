"""Seconds of each stage on several GPUs, computed from the seconds measured on one."""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from tests.benchmarks.simulation.measured import Measured, SimulationError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A rollout of P prompts × G completions whose lengths have a log-normal distribution."""

    num_prompts: int
    group_size: int
    mean_tokens: float
    """Mean length before the cap."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a length; 0 for equal lengths."""
    cap_tokens: int | None = None
    reuse: int = 1
    seed: int = 0

    def lengths(self, rollout: int) -> np.ndarray:
        """Return the tokens of each completion, [P, G]; independent of layout and v."""
        draw = np.random.default_rng((self.seed, rollout)).standard_normal((self.num_prompts, self.group_size))
        lengths = self.mean_tokens * np.exp(self.spread * draw - self.spread**2 / 2)
        return np.asarray(np.clip(lengths, 1, self.cap_tokens or math.inf))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The links between GPUs and the limits of an engine. Bandwidths are bytes per second and GPU."""

    node: int = 8
    sync_within: float = 0.78e9
    sync_between: float = 0.78e9
    sync_latency: float = 0.1
    link_within: float = 300e9
    link_between: float = 50e9
    floor: float = 0.004
    """Seconds of a decode step with a single completion."""
    slots: int = 512
    """Completions that an engine decodes together (``max_num_seqs``)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The numbers of GPUs that serve and that train."""

    name: str
    num_trainers: int
    num_servers: int = 0
    """0 if every GPU serves and trains in turn."""
    syncs_between: bool = False
    """Whether syncs send the weights between nodes."""

    @property
    def num_gpus(self) -> int:
        return self.num_trainers + self.num_servers


def parse_layout(text: str, num_gpus: int, node: int) -> Layout | None:
    """Parse ``colocated``, ``s+t`` (on each node s GPUs serve and t train) or ``nodes:s+t`` (whole nodes do).

    Return None if there are too few GPUs for whole nodes of each kind.
    """
    if num_gpus < 1:
        raise SimulationError(f"--gpus is {num_gpus}; it must be at least 1")
    if num_gpus > node and num_gpus % node:
        raise SimulationError(f"--gpus {num_gpus} is not a multiple of the {node} GPUs of a node: change it or --node")
    if text == "colocated":
        return Layout(name=text, num_trainers=num_gpus)
    parts = re.fullmatch(r"(nodes:)?(\d+)\+(\d+)", text)
    if parts is None:
        raise SimulationError(
            f"--layouts {text}: it must be colocated, 1+7 (of each node's GPUs) or nodes:1+7 (of the nodes)"
        )
    whole_nodes, serve, train = parts[1] is not None, int(parts[2]), int(parts[3])
    if not serve or not train:
        raise SimulationError(
            f"--layouts {text}: at least 1 must serve and 1 must train; colocated is the layout without servers"
        )
    if whole_nodes:
        if num_gpus < (serve + train) * node:
            return None
        unit = (serve + train) * node
    else:
        unit = min(node, num_gpus)
        if serve + train != unit:
            raise SimulationError(
                f"--layouts {text} has {serve + train} GPUs per node, but with --gpus {num_gpus} a node has {unit}: "
                f"{serve} that serve leave {max(0, unit - serve)} to train"
            )
    if num_gpus % unit:
        raise SimulationError(f"--layouts {text} requires a multiple of {unit} GPUs, not --gpus {num_gpus}")
    share = num_gpus // (serve + train)
    return Layout(name=text, num_trainers=train * share, num_servers=serve * share, syncs_between=whole_nodes)


def decode_seconds(lengths: np.ndarray, step_seconds: np.ndarray) -> float:
    """Return the seconds in which one engine decodes completions in order, ``len(step_seconds)`` at a time.

    ``step_seconds[n - 1]`` is the time of a decode step with n running completions. A finished completion is replaced
    by the next waiting one; at the end the number of running completions falls to 1.
    """
    slots = len(step_seconds)
    waiting: list[float] = lengths.tolist()  # Python floats are faster in a heap
    ends, full = waiting[:slots], 0.0
    if len(waiting) > slots:
        heapq.heapify(ends)
        for length in waiting[slots:]:
            full = ends[0]
            heapq.heapreplace(ends, full + length)
    tail = np.diff(np.sort(np.asarray(ends) - full), prepend=0.0)
    return float(full * step_seconds[-1] + tail @ step_seconds[: len(ends)][::-1])


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of every stage under one layout. A stage of several GPUs ends with the slowest."""

    measured: Measured
    workload: Workload
    machine: Machine
    layout: Layout
    model_bytes: float
    _known: dict[range, tuple[float, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.workload.num_prompts % self.layout.num_trainers:
            raise SimulationError(
                f"--prompts {self.workload.num_prompts} is not a multiple of the {self.layout.num_trainers} training "
                f"GPUs of {self.layout.name} on {self.layout.num_gpus}: every rank trains on the same number of whole "
                f"groups. Try {math.ceil(self.workload.num_prompts / self.layout.num_trainers)} × "
                f"{self.layout.num_trainers} prompts"
            )

    @cached_property
    def decode_steps(self) -> np.ndarray:
        """Seconds of a decode step with 1, 2, … completions, interpolated between the floor and measured values."""
        measured = {count: seconds for count, seconds in self.measured.decode_steps if count <= self.machine.slots}
        if not measured.keys() - {1}:
            raise SimulationError(
                f"--slots {self.machine.slots} is less than the {self.measured.decode_steps[-1][0]} completions that "
                "were decoded together in the measurement"
            )
        points = sorted(({1: self.machine.floor} | measured).items())
        for (few, quick), (many, slow) in pairwise(points):
            if slow < quick:
                raise SimulationError(
                    f"a decode step would take {slow * 1e3:.3g} ms with {many} completions and {quick * 1e3:.3g} ms "
                    f"with only {few}: --floor-ms {self.machine.floor * 1e3:g} is too high, or a --speed is wrong"
                )
        counts, seconds = np.array(points, dtype=float).T
        running = np.arange(1.0, self.machine.slots + 1)
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        beyond = np.maximum(running - counts[-1], 0) * slope
        return np.asarray(np.interp(running, counts, seconds) + beyond)

    def generate(self, rollouts: range) -> tuple[float, float]:
        """Return the seconds of sampling and scoring the rollouts in one call: of the slowest engine, and the mean."""
        if rollouts not in self._known:
            engines = self.layout.num_servers or self.layout.num_trainers
            calls = [np.array_split(self.workload.lengths(k), engines) for k in rollouts]
            each = [
                decode_seconds(np.concatenate(part, axis=None), self.decode_steps) for part in zip(*calls, strict=True)
            ]
            share = self.workload.num_prompts * self.workload.group_size / self.layout.num_trainers
            score = self.measured.score * share / self.measured.num_completions * len(rollouts)
            self._known[rollouts] = max(each) + score, float(np.mean(each)) + score
        return self._known[rollouts]

    def update(self, rollout: int) -> tuple[float, float]:
        """Return the seconds of all passes over a rollout: of the rank with the most tokens, and the mean."""
        ranks = self.layout.num_trainers
        tokens = self.workload.lengths(rollout).reshape(ranks, -1) + self.measured.prompt_tokens
        seconds = tokens.sum(1) * self.measured.update_seconds_per_token
        per_micro_batch = self.measured.num_completions / self.measured.micro_batches
        transfers = 3 * math.ceil(tokens.shape[1] / per_micro_batch) * self._transfer
        reuse = self.workload.reuse
        return float(seconds.max() + transfers) * reuse, float(seconds.mean() + transfers) * reuse

    @property
    def sync(self) -> float:
        """Seconds of an all-gather of the weights and their transfer to the engines."""
        if not self.layout.num_servers:
            return self.measured.sync + self._transfer
        speed = self.machine.sync_between if self.layout.syncs_between else self.machine.sync_within
        return self._transfer + self.machine.sync_latency + self.model_bytes / speed

    @property
    def overhead(self) -> float:
        """Seconds of waking and putting to sleep an engine that shares its GPU with the trainer."""
        return 0.0 if self.layout.num_servers else self.measured.rest

    @property
    def _transfer(self) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of the model over all training GPUs."""
        ranks = self.layout.num_trainers
        speed = self.machine.link_within if self.layout.num_gpus <= self.machine.node else self.machine.link_between
        return self.model_bytes * (ranks - 1) / ranks / speed
