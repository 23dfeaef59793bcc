"""What each stage costs on some GPUs, from what it cost on one."""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lgrpo.simulation.measured import Measured, SimulationError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A rollout: P prompts × G completions, of log-normal length."""

    num_prompts: int
    group_size: int
    mean_tokens: float
    """Before the cap."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a length; 0: all equally long."""
    cap_tokens: int | None = None
    reuse: int = 1
    seed: int = 0

    def lengths(self, rollout: int) -> np.ndarray:
        """Tokens of each completion, [P, G]: the same for every layout and v."""
        draw = np.random.default_rng((self.seed, rollout)).standard_normal((self.num_prompts, self.group_size))
        lengths = self.mean_tokens * np.exp(self.spread * draw - self.spread**2 / 2)
        return np.asarray(np.clip(lengths, 1, self.cap_tokens or math.inf))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What joins the GPUs, and how an engine decodes. Bandwidths are bytes a second and GPU."""

    node: int = 8
    sync_within: float = 0.78e9
    sync_between: float = 0.78e9
    sync_latency: float = 0.1
    link_within: float = 300e9
    link_between: float = 50e9
    floor: float = 0.004
    """Seconds of a decode step with a single completion."""
    slots: int = 512
    """Completions an engine decodes at a time: its max_num_seqs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which GPUs serve and which train."""

    name: str
    num_trainers: int
    num_servers: int = 0
    """0: every GPU does both, in turn."""
    syncs_between: bool = False
    """Whether the weights go from node to node to reach the servers."""

    @property
    def num_gpus(self) -> int:
        return self.num_trainers + self.num_servers


def parse_layout(text: str, num_gpus: int, node: int) -> Layout | None:
    """``colocated``, ``s+t`` (on each node s GPUs serve and t train) or ``nodes:s+t`` (whole nodes do).

    None where the GPUs are too few for whole nodes of each kind.
    """
    if num_gpus < 1:
        raise SimulationError(f"--gpus {num_gpus}: there must be 1 or more")
    if num_gpus > node and num_gpus % node:
        raise SimulationError(f"--gpus {num_gpus} are no whole nodes of {node}: set --node, or another number")
    if text == "colocated":
        return Layout(name=text, num_trainers=num_gpus)
    parts = re.fullmatch(r"(nodes:)?(\d+)\+(\d+)", text)
    if parts is None:
        raise SimulationError(f"--layouts {text}: say colocated, 1+7 (of each node's GPUs) or nodes:1+7 (of the nodes)")
    whole_nodes, serve, train = parts[1] is not None, int(parts[2]), int(parts[3])
    if not serve or not train:
        raise SimulationError(
            f"--layouts {text}: at least 1 serves and 1 trains; colocated is the layout without servers"
        )
    if whole_nodes:
        if num_gpus < (serve + train) * node:
            return None
        unit = (serve + train) * node
    else:
        unit = min(node, num_gpus)
        if serve + train != unit:
            raise SimulationError(
                f"--layouts {text} names {serve + train} GPUs of a node, and with --gpus {num_gpus} it has {unit}: "
                f"{serve} serving GPUs leave {max(0, unit - serve)} to train"
            )
    if num_gpus % unit:
        raise SimulationError(f"--layouts {text} wants a multiple of {unit} GPUs, not --gpus {num_gpus}")
    share = num_gpus // (serve + train)
    return Layout(name=text, num_trainers=train * share, num_servers=serve * share, syncs_between=whole_nodes)


def decode_seconds(lengths: np.ndarray, paces: np.ndarray) -> float:
    """One engine works off completions in order, as many at a time as there are ``paces``.

    ``paces[n - 1]`` is the time of a decode step with n running: a completion that ends makes room for the next one,
    and when none is left the engine empties, down to the longest.
    """
    slots = len(paces)
    waiting: list[float] = lengths.tolist()  # plain numbers are quicker in a heap
    ends, full = waiting[:slots], 0.0
    if len(waiting) > slots:
        heapq.heapify(ends)
        for length in waiting[slots:]:
            full = ends[0]
            heapq.heapreplace(ends, full + length)
    tail = np.diff(np.sort(np.asarray(ends) - full), prepend=0.0)
    return float(full * paces[-1] + tail @ paces[: len(ends)][::-1])


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of every stage, under one layout. Stages that several GPUs share end with the slowest."""

    measured: Measured
    workload: Workload
    machine: Machine
    layout: Layout
    model_bytes: float
    _known: dict[range, tuple[float, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.workload.num_prompts % self.layout.num_trainers:
            raise SimulationError(
                f"--prompts {self.workload.num_prompts}, which the {self.layout.num_trainers} training GPUs of "
                f"{self.layout.name} on {self.layout.num_gpus} do not divide: every rank trains on whole groups, the "
                f"same number each. {math.ceil(self.workload.num_prompts / self.layout.num_trainers)} × "
                f"{self.layout.num_trainers} prompts would do"
            )

    @cached_property
    def paces(self) -> np.ndarray:
        """Seconds of a decode step with 1, 2, … completions: straight lines through the floor and what was measured."""
        measured = {count: pace for count, pace in self.measured.paces if count <= self.machine.slots}
        if not measured.keys() - {1}:
            raise SimulationError(
                f"--slots {self.machine.slots} is less than the {self.measured.paces[-1][0]} completions that were "
                "decoded at a time when it was measured"
            )
        points = sorted(({1: self.machine.floor} | measured).items())
        for (few, quick), (many, slow) in pairwise(points):
            if slow < quick:
                raise SimulationError(
                    f"a decode step would take {slow * 1e3:.3g} ms with {many} completions and {quick * 1e3:.3g} ms "
                    f"with only {few}: --floor-ms {self.machine.floor * 1e3:g} is too high, or a --pace is wrong"
                )
        counts, seconds = np.array(points, dtype=float).T
        running = np.arange(1.0, self.machine.slots + 1)
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        beyond = np.maximum(running - counts[-1], 0) * slope
        return np.asarray(np.interp(running, counts, seconds) + beyond)

    def generate(self, rollouts: range) -> tuple[float, float]:
        """All of them in one call, what is left of scoring included: until the last engine is done, and the mean."""
        if rollouts not in self._known:
            engines = self.layout.num_servers or self.layout.num_trainers
            calls = [np.array_split(self.workload.lengths(k), engines) for k in rollouts]
            each = [decode_seconds(np.concatenate(own, axis=None), self.paces) for own in zip(*calls, strict=True)]
            share = self.workload.num_prompts * self.workload.group_size / self.layout.num_trainers
            score = self.measured.score * share / self.measured.num_completions * len(rollouts)
            self._known[rollouts] = max(each) + score, float(np.mean(each)) + score
        return self._known[rollouts]

    def update(self, rollout: int) -> tuple[float, float]:
        """All passes over a rollout: until the rank with the most tokens is done, and the mean."""
        ranks = self.layout.num_trainers
        tokens = self.workload.lengths(rollout).reshape(ranks, -1) + self.measured.prompt_tokens
        seconds = tokens.sum(1) * self.measured.update_seconds_per_token
        at_a_time = self.measured.num_completions / self.measured.micro_batches
        transfers = 3 * math.ceil(tokens.shape[1] / at_a_time) * self._transfer
        reuse = self.workload.reuse
        return float(seconds.max() + transfers) * reuse, float(seconds.mean() + transfers) * reuse

    @property
    def sync(self) -> float:
        """The weights made whole out of their shards, and handed to the engines."""
        if not self.layout.num_servers:
            return self.measured.sync + self._transfer
        speed = self.machine.sync_between if self.layout.syncs_between else self.machine.sync_within
        return self._transfer + self.machine.sync_latency + self.model_bytes / speed

    @property
    def around(self) -> float:
        """What goes with each generation where engine and trainer share a GPU: waking up, going to sleep."""
        return 0.0 if self.layout.num_servers else self.measured.rest

    @property
    def _transfer(self) -> float:
        """The model's bytes once around all training GPUs: an all-gather, or a reduce-scatter."""
        ranks = self.layout.num_trainers
        speed = self.machine.link_within if self.layout.num_gpus <= self.machine.node else self.machine.link_between
        return self.model_bytes * (ranks - 1) / ranks / speed
