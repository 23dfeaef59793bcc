"""When weights are synced and rollouts sampled: the rule that WeightSync, the data module and the simulation share.

Rollouts k = 0, 1, 2, … are sampled and trained in order. Rollout k + ``lead`` is sampled before rollout k is trained.
A cycle is the rollouts sampled from one set of weights; ``cycle_end`` is the first rollout after it (None: unknown;
``ENDLESS`` or later: there is no further sync).
"""

from __future__ import annotations

from typing import TypeAlias

Period: TypeAlias = int | dict[int, int | None] | None
"""v; or, by the first rollout for which each holds, several of them. They are counted from that rollout."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
ENDLESS = 2**62
"""Number of rollouts that no run reaches."""
MAX_AHEAD = 16
"""Most rollouts that are sampled in one call in the background, or without an end of their cycle."""


def is_sync_due(rollout: int, period: Period, lead: int = 0) -> bool:
    """Return whether the engine is synced before rollout k is sampled; a period of None syncs at its beginning only.

    >>> [k for k in range(10) if is_sync_due(k, period=3, lead=2)]
    [0, 2, 5, 8]
    >>> [k for k in range(10) if is_sync_due(k, period={0: 1, 3: 4})]
    [0, 1, 2, 3, 7]
    """
    num_trained = rollout - lead
    if rollout == 0 or num_trained < 0:
        return rollout == 0
    start, v, _ = _segment(num_trained, period)
    return num_trained == start > 0 if v is None else (num_trained - start) % v == 0


def num_rollouts_in_cycle(rollout: int, period: Period, lead: int = 0) -> int:
    """Return how many rollouts are sampled from weights synced before rollout k; ``ENDLESS`` if none follows.

    >>> [num_rollouts_in_cycle(k, period=3, lead=2) for k in (0, 2, 5, 6)]
    [2, 3, 3, 2]
    >>> [num_rollouts_in_cycle(k, period={0: 2, 3: 4}) for k in (0, 2, 3)]
    [2, 1, 4]
    """
    num_trained = max(rollout - lead, 0)
    start, v, end = _segment(num_trained, period)
    if v is None:
        return ENDLESS if end is None else end + lead - rollout
    if rollout < lead:
        return lead
    return min(v - (num_trained - start) % v, ENDLESS if end is None else end - num_trained)


def _segment(num_trained: int, period: Period) -> tuple[int, int | None, int | None]:
    """Return the first rollout of the period that holds now, the period, and the first rollout of the next one."""
    if not isinstance(period, dict):
        return 0, period, None
    start = max(first for first in period if first <= num_trained)
    return start, period[start], min((first for first in period if first > num_trained), default=None)


def value_at(setting: float | dict[int, float], rollout: int) -> float:
    """Return the value for rollout k of a setting that is one value, or several by their first rollouts.

    >>> value_at(0.2, 7), value_at({0: 0.2, 50: 0.4}, 49), value_at({0: 0.2, 50: 0.4}, 50)
    (0.2, 0.2, 0.4)
    """
    return setting[max(first for first in setting if first <= rollout)] if isinstance(setting, dict) else setting


def rollouts_to_sample(
    rollout: int, cycle_end: int | None, run_end: int, generate_ahead: bool, per_epoch: int = ENDLESS
) -> range:
    """Return the rollouts that one call of the engine samples, beginning with rollout k.

    With ``generate_ahead`` these are the rest of the cycle. If it has no end, they are the rest of the epoch, but not
    more than ``MAX_AHEAD``: they wait in memory and are part of every checkpoint.

    >>> rollouts_to_sample(4, cycle_end=8, run_end=7, generate_ahead=True)
    range(4, 7)
    >>> rollouts_to_sample(4, cycle_end=ENDLESS, run_end=20, generate_ahead=True, per_epoch=5)
    range(4, 5)
    """
    if cycle_end is not None and cycle_end >= ENDLESS:
        cycle_end = min((rollout // per_epoch + 1) * per_epoch, rollout + MAX_AHEAD)
    end = min(cycle_end, run_end) if generate_ahead and cycle_end is not None else rollout + 1
    return range(rollout, max(end, rollout + 1))


def rollout_in_background(
    rollout: int, lead: int, cycle_end: int | None, run_end: int, requested: int = 0, ahead: int = 0
) -> int | None:
    """Return the rollout from which on more may be sampled while rollout k is trained; None if that must wait.

    It needs no sync, it is the first that is not ``requested`` yet, and at most ``lead`` or ``ahead`` others, whichever
    is more, have been requested and not been trained on: a slow trainer does not make them pile up.

    >>> [rollout_in_background(k, lead=0, cycle_end=3, run_end=9) for k in range(3)]
    [1, 2, None]
    >>> [rollout_in_background(k, lead=0, cycle_end=99, run_end=99, requested=8, ahead=4) for k in range(5)]
    [None, None, None, 8, 8]
    """
    following = max(rollout + lead + 1, requested)
    is_enough = following - rollout - 1 > max(lead, ahead)
    return following if not is_enough and cycle_end is not None and following < min(cycle_end, run_end) else None


def is_selected(rollout: int, every: int) -> bool:
    """Return whether rollout k is the one of ``every`` rollouts that is logged or measured.

    It is rollout 0, and then one in each ``every`` rollouts at varying offsets, so that all lags occur whatever the
    period of syncs is.

    >>> [k for k in range(50) if is_selected(k, every=10)]
    [0, 16, 22, 38, 44]
    """
    window, offset = divmod(rollout, every)
    return offset == int(window * GOLDEN_RATIO % 1 * every)
