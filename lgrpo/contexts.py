"""Contexts of an episode: which of its tokens the model read before each turn.

As a rule a turn's context is everything before it, so the whole episode is one sequence. If observations are dropped,
each leaves the contexts of later turns, which have a short replacement in its place. The episode then consists of
several sequences, and each turn belongs to the one in which it was sampled.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple


class Dropped(NamedTuple):
    """A dropped observation: tokens [start, middle) of a completion, replaced by its tokens [middle, stop)."""

    start: int
    middle: int
    stop: int
    turn: int
    """First turn whose context has the replacement instead of the observation, counted from 0."""


def contexts_of(turns: Sequence[tuple[int, int]], dropped: Sequence[Dropped]) -> list[int]:
    """Return for each token of an episode the contexts that have it, as bits: bit k stands for the k-th context.

    A sampled token is in the context in which it was sampled, its lowest bit, and in all later ones.

    Args:
        turns: Ranges of sampled tokens, [start, stop), in order; the last one ends the episode.
        dropped: Dropped observations.

    >>> turns = [(0, 1), (3, 4), (5, 6)]  # tokens 1 and 2 are an observation and its replacement, 4 is an observation
    >>> contexts_of(turns, [Dropped(1, 2, 3, turn=2)])
    [3, 1, 2, 3, 2, 2]
    """
    first_turns = sorted({one.turn for one in dropped})  # of all contexts but the first
    everything = (2 << len(first_turns)) - 1
    found: list[int] = []
    for turn, (_, stop) in enumerate(turns):
        earlier = (1 << bisect(first_turns, turn)) - 1
        found += [everything & ~earlier] * (stop - len(found))
    for one in dropped:
        earlier = (1 << bisect(first_turns, one.turn)) - 1
        found[one.start : one.middle] = [bits & earlier for bits in found[one.start : one.middle]]
        found[one.middle : one.stop] = [everything & ~earlier] * (one.stop - one.middle)
    return found


def context_lengths(contexts: Sequence[int]) -> list[int]:
    """Return the number of tokens of each context.

    >>> context_lengths([3, 1, 2, 3, 2, 2])
    [3, 5]
    """
    num_contexts = max(contexts).bit_length()
    return [sum(bits >> index & 1 for bits in contexts) for index in range(num_contexts)]


def dropped_of(turns: Sequence[tuple[int, int]], contexts: Sequence[int]) -> tuple[Dropped, ...]:
    """Return the dropped observations of an episode: the inverse of ``contexts_of``.

    >>> dropped_of([(0, 1), (3, 4), (5, 6)], [3, 1, 2, 3, 2, 2])
    (Dropped(start=1, middle=2, stop=3, turn=2),)
    """
    last = max(contexts, default=0).bit_length()
    first_turns: dict[int, int] = {}
    for turn, (start, _) in enumerate(turns):
        first_turns.setdefault(contexts[start] & -contexts[start], turn)
    found = []
    for (_, start), (stop, _) in pairwise(turns):
        middle = next((i for i in range(start, stop) if contexts[i].bit_length() == last), stop)
        if middle > start:
            found.append(Dropped(start, middle, stop, first_turns[1 << contexts[start].bit_length()]))
    return tuple(found)


def ranges(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where a mask is true, as ranges [start, stop).

    >>> ranges([True, False, True, True])
    [(0, 1), (2, 4)]
    """
    found, start = [], 0
    for value, part in groupby(mask):
        stop = start + len(list(part))
        if value:
            found.append((start, stop))
        start = stop
    return found
