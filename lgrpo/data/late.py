"""Groups that wait for scores: rewards may return ``NOT_YET``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lgrpo.data.collate import as_reward_parts, as_rewards, concatenate
from lgrpo.data.micro_batches import TokenBudget
from lgrpo.rewards import FailedScore, Score, notes_of
from lgrpo.types import RolloutBatch

Rescore: TypeAlias = Callable[[Sequence[RolloutBatch]], Sequence[Sequence[Score]]]
"""Asks the reward again for the scores of some groups, in one call."""


@dataclass(kw_only=True)
class LateGroups:
    """Groups that lack scores or did not fit into a rollout, each with the behaviour step it was sampled at."""

    waiting: list[RolloutBatch] = field(default_factory=list)
    num_joined: int = 0
    """Number of late groups that joined the last rollout."""
    num_dropped: int = 0
    """Number of late groups that were too old for the last rollout."""

    @property
    def is_active(self) -> bool:
        """Whether any group is late, or was at the last rollout."""
        return bool(self.waiting or self.num_joined or self.num_dropped)

    def join(
        self,
        batch: RolloutBatch,
        rescore: Rescore,
        oldest_step: int,
        rescore_own: bool,
        budget: TokenBudget | None = None,
    ) -> tuple[RolloutBatch, LateGroups]:
        """Return the rollout with the late groups that are complete by now, and the groups that wait from then on.

        An incomplete group of the rollout is replaced by a late group that is complete, or else by a placeholder
        (rewards NaN, outside the loss). Further complete groups are appended as far as ``budget`` admits; the rest
        waits. Neither ``self`` nor ``batch`` changes, so an interrupt cannot lose or duplicate a group.

        Groups sampled before ``oldest_step`` are dropped. ``rescore_own`` asks for scores of the rollout's groups too,
        because it was sampled some time ago.
        """
        if not self.waiting and not bool(batch.rewards.isnan().any()):
            return batch, LateGroups()
        late = [group for group in self.waiting if bool(is_recent(group, oldest_step).all())]
        num_dropped = len(self.waiting) - len(late)
        own = split_groups(batch)
        asked = [group for group in [*late, *(own if rescore_own else [])] if is_incomplete(group)]
        updated = {id(group): with_scores(group, scores) for group, scores in zip(asked, rescore(asked), strict=True)}
        late, own = ([updated.get(id(group), group) for group in groups] for groups in (late, own))
        complete = [group for group in late if not is_incomplete(group)]
        num_complete = len(complete)
        groups = [
            group if not is_incomplete(group) else complete.pop(0) if complete else placeholder(group) for group in own
        ]
        while complete and (budget is None or budget.admits([*groups, complete[0]])):
            groups.append(complete.pop(0))
        waiting = [*complete, *(group for group in [*late, *own] if is_incomplete(group))]
        remaining = LateGroups(waiting=waiting, num_joined=num_complete - len(complete), num_dropped=num_dropped)
        return replace(concatenate(groups), rollout=batch.rollout, metrics=batch.metrics), remaining


def is_incomplete(group: RolloutBatch) -> bool:
    """Return whether a score of the group is missing."""
    return bool(group.rewards.isnan().any())


def is_recent(group: RolloutBatch, oldest_step: int) -> Tensor:
    """Return [B] bool: completions with a token of ``oldest_step`` or later, and recorded ones, which have no age."""
    return (group.last_step >= oldest_step) | group.is_recorded


def with_scores(group: RolloutBatch, scores: Sequence[Score]) -> RolloutBatch:
    """Return the group with its unknown rewards set to the given scores."""
    unknown = group.rewards.isnan()
    triples = zip(group.notes or [None] * len(group), scores, unknown.tolist(), strict=True)
    notes = [notes_of(score) if is_late else known for known, score, is_late in triples]
    failed = torch.tensor([isinstance(score, FailedScore) for score in scores])
    if group.episode_failed is not None:
        failed |= group.episode_failed
    return replace(
        group,
        rewards=torch.where(unknown, as_rewards(scores), group.rewards),
        failed=torch.where(unknown, failed, group.failed),
        reward_parts=as_reward_parts(scores),
        notes=notes if any(own is not None for own in notes) else None,
    )


def split_groups(batch: RolloutBatch) -> list[RolloutBatch]:
    """Return the groups of a rollout as batches."""
    return [batch.select(rows) for rows in torch.arange(len(batch)).split(batch.group_size)]


def placeholder(group: RolloutBatch) -> RolloutBatch:
    """Return a group of the same shape with unknown rewards, outside the loss."""
    return replace(
        group, rewards=torch.full_like(group.rewards, torch.nan), loss_mask=torch.zeros_like(group.loss_mask)
    )


def padded_to(batch: RolloutBatch, size: int) -> RolloutBatch:
    """Return the rollout with ``size`` rows, placeholders at its end."""
    if len(batch) == size:
        return batch
    num_missing = (size - len(batch)) // batch.group_size
    return concatenate([batch, *[placeholder(split_groups(batch)[0])] * num_missing])
