"""When weights are synced and rollouts sampled: the rule that WeightSync, the data module and the simulation share.

Rollouts k = 0, 1, 2, … are sampled and trained in order. Rollout k + ``lead`` is sampled before rollout k is trained.
A cycle is the rollouts sampled from one set of weights; ``cycle_end`` is the first rollout after it (None: unknown;
``ENDLESS`` or later: there is no further sync).
"""

from __future__ import annotations

GOLDEN_RATIO = (5**0.5 - 1) / 2
ENDLESS = 2**62
"""Number of rollouts that no run reaches."""
MAX_AHEAD = 16
"""Most rollouts of an endless cycle that are sampled in one call."""


def is_sync_due(rollout: int, period: int | None, lead: int = 0) -> bool:
    """Return whether the engine is synced before rollout k is sampled; a period of None syncs before rollout 0 only.

    >>> [k for k in range(10) if is_sync_due(k, period=3, lead=2)]
    [0, 2, 5, 8]
    """
    num_trained = rollout - lead
    return rollout == 0 or (period is not None and num_trained >= 0 and num_trained % period == 0)


def num_rollouts_in_cycle(rollout: int, period: int | None, lead: int = 0) -> int:
    """Return how many rollouts are sampled from weights synced before rollout k; ``ENDLESS`` if the period is None.

    >>> [num_rollouts_in_cycle(k, period=3, lead=2) for k in (0, 2, 5, 6)]
    [2, 3, 3, 2]
    """
    if period is None:
        return ENDLESS
    return lead if rollout < lead else period - (rollout - lead) % period


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


def rollout_in_background(rollout: int, lead: int, cycle_end: int | None, run_end: int) -> int | None:
    """Return the rollout that may be sampled while rollout k is trained; None if it needs a sync first.

    >>> [rollout_in_background(k, lead=0, cycle_end=3, run_end=9) for k in range(3)]
    [1, 2, None]
    """
    following = rollout + lead + 1
    return following if cycle_end is not None and following < min(cycle_end, run_end) else None


def is_selected(rollout: int, every: int) -> bool:
    """Return whether rollout k is the one of ``every`` rollouts that is logged or measured.

    It is rollout 0, and then one in each ``every`` rollouts at varying offsets, so that all lags occur whatever the
    period of syncs is.

    >>> [k for k in range(50) if is_selected(k, every=10)]
    [0, 16, 22, 38, 44]
    """
    window, offset = divmod(rollout, every)
    return offset == int(window * GOLDEN_RATIO % 1 * every)
