"""Choice of recorded completions by absolute advantage and age."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import TypeVar

from lgrpo.recordings.recording import RecordedGroup, Recording

T = TypeVar("T")
MIN_PRIORITY = 1e-6
"""Added to absolute advantages, so that a completion without one can be drawn, too."""


def recorded_priorities(recording: Recording, used: Sequence[int]) -> list[float]:
    """Return the absolute advantage of each completion in its recorded run, above 0. Those ``used`` must have one."""
    columns = zip(*(recording.table[name].to_pylist() for name in ("advantage", "token_ids")), strict=True)
    found = [0.0 if advantage is None and not tokens else advantage for advantage, tokens in columns]
    if lacking := sum(found[row] is None for row in used):
        raise ValueError(
            f"data.engine.priority needs the advantages of the recorded run, but {lacking} of {len(used)} completions "
            f"in {recording.name} have none (lgrpo score removes them, other programs do not write them): set it to 0"
        )
    return [abs(advantage or 0.0) + MIN_PRIORITY for advantage in found]


def recent_groups(recording: Recording, max_age: int | None) -> list[RecordedGroup]:
    """Return the groups of the last rollouts of a recording; all of them if there is no limit."""
    if max_age is None:
        return recording.groups
    rollouts = recording.table["rollout"].to_pylist()
    if None in rollouts:
        raise ValueError(
            f"data.engine.max_age is {max_age}, but {recording.name} does not say in which rollout completions were "
            "sampled: remove the limit"
        )
    oldest = max(rollouts) - max_age
    return [group for group in recording.groups if rollouts[group.rows[0]] >= oldest]


def draw(items: Sequence[T], weights: Sequence[float], number: int, generator: random.Random) -> list[T]:
    """Return different items, drawn one after the other with chances proportional to their weights.

    >>> [draw("abc", [1e-9, 1.0, 1e9], 2, random.Random(seed)) for seed in range(3)]
    [['c', 'b'], ['c', 'b'], ['c', 'b']]
    """
    # the item whose exponential waiting time, of rate weight, is shortest comes first
    times = [-math.log(1 - generator.random()) / weight for weight in weights]
    return [items[i] for i in heapq.nsmallest(number, range(len(items)), key=times.__getitem__)]
