"""Groups whose scores are not all there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.data.collate import as_rewards, concatenate
from lgrpo.engines import Sampling, text_before_stop
from lgrpo.rewards import FailedScore, Score
from lgrpo.types import Completion, RolloutBatch

Ask: TypeAlias = Callable[[Sequence[RolloutBatch]], Sequence[Sequence[Score]]]


@dataclass(kw_only=True)
class LateGroups:
    """Groups that wait for the rest of their scores, each with the behaviour step it was sampled at."""

    waiting: list[RolloutBatch] = field(default_factory=list)
    num_joined: int = 0
    """Groups that came to join the last rollout."""
    num_dropped: int = 0
    """Groups that grew too old for the last rollout."""

    @property
    def in_play(self) -> bool:
        """Whether anything is late at all."""
        return bool(self.waiting or self.num_joined or self.num_dropped)

    def join(self, batch: RolloutBatch, ask: Ask, oldest_step: int, asks_own: bool) -> tuple[RolloutBatch, LateGroups]:
        """A rollout with the late groups that are complete by now, and who waits from then on.

        A group of the rollout itself that is not complete leaves its place, which stays empty (its rewards NaN, out of
        the loss) unless one that has come takes it. Nothing here is changed: an interrupt loses and doubles nothing.

        Args:
            batch: The rollout, as sampled; unknown rewards are NaN.
            ask: The scores of groups, asked for once more, all at a time.
            oldest_step: A group sampled before this optimizer step is dropped.
            asks_own: Ask for the rollout's own groups too: it was sampled a while ago.
        """
        if not self.waiting and not bool(batch.rewards.isnan().any()):
            return batch, LateGroups()
        young = [group for group in self.waiting if bool(is_young(group, oldest_step).all())]
        own = split_groups(batch)
        asked = [*young, *(group for group in own if asks_own and is_incomplete(group))]
        answered = {id(group): with_scores(group, scores) for group, scores in zip(asked, ask(asked), strict=True)}
        young, own = ([answered.get(id(group), group) for group in groups] for groups in (young, own))
        come = [group for group in young if not is_incomplete(group)]
        waiting = [group for group in [*young, *own] if is_incomplete(group)]
        late = LateGroups(waiting=waiting, num_joined=len(come), num_dropped=len(self.waiting) - len(young))
        places = [group if not is_incomplete(group) else come.pop(0) if come else emptied(group) for group in own]
        return replace(concatenate([*places, *come]), rollout=batch.rollout, metrics=batch.metrics), late


def is_incomplete(group: RolloutBatch) -> bool:
    """Whether a score of it is not there yet."""
    return bool(group.rewards.isnan().any())


def is_young(group: RolloutBatch, oldest_step: int) -> Tensor:
    """[B] bool: completions sampled at this optimizer step or later. Recorded ones have no lag, and never grow old."""
    return (group.behaviour_step >= oldest_step) | group.is_recorded


def with_scores(group: RolloutBatch, scores: Sequence[Score]) -> RolloutBatch:
    """A group with the scores that have come since."""
    unknown = group.rewards.isnan()
    failed = torch.tensor([isinstance(score, FailedScore) for score in scores])
    return replace(
        group,
        rewards=torch.where(unknown, as_rewards(scores), group.rewards),
        failed=torch.where(unknown, failed, group.failed),
    )


def join_late(
    late: LateGroups, batch: RolloutBatch, ask: Ask, oldest_step: int, asks_own: bool, trainer: L.Trainer
) -> tuple[RolloutBatch, LateGroups]:
    """``LateGroups.join`` on every rank, all of them with rollouts of one size afterwards."""
    batch, late = late.join(batch, ask, oldest_step, asks_own)
    most = torch.tensor([len(batch), int(late.in_play)], device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        most = trainer.strategy.reduce(most, reduce_op="max")
    size, in_play = most.tolist()
    if in_play:
        counts = {"waiting": len(late.waiting), "joined": late.num_joined, "dropped": late.num_dropped}
        batch.metrics |= {f"rollout/late_{name}": float(count) for name, count in counts.items()}
        if "reward/failures" in batch.metrics:  # late scores may fail too
            batch.metrics["reward/failures"] = float(batch.failed[batch.is_known].sum())
    return filled_up(batch, size), late


def split_groups(batch: RolloutBatch) -> list[RolloutBatch]:
    """A rollout's groups, each by itself."""
    return [batch.select(rows) for rows in torch.arange(len(batch)).split(batch.group_size)]


def emptied(group: RolloutBatch) -> RolloutBatch:
    """A place with nobody in it."""
    return replace(
        group,
        rewards=torch.full_like(group.rewards, torch.nan),
        loss_mask=torch.zeros_like(group.loss_mask),
    )


def filled_up(batch: RolloutBatch, size: int) -> RolloutBatch:
    """A rollout of ``size`` rows: with empty places at its end, where it has fewer."""
    if len(batch) == size:
        return batch
    place = emptied(split_groups(batch)[0])
    places = (size - len(batch)) // batch.group_size
    return concatenate([batch, *[place] * places])


def completions_of(group: RolloutBatch, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[Completion]:
    """A group's completions, as the engine gave them."""
    completions = []
    for row in range(len(group)):
        sampled = group.completion_mask[row]
        token_ids = group.tokens[row][sampled].tolist()
        completions.append(
            Completion(
                token_ids=token_ids,
                logprobs=group.behaviour_logprobs[row][sampled].tolist(),
                text=text_before_stop(tokenizer.decode(token_ids, skip_special_tokens=True), sampling.stop or []),
                finish_reason="length" if bool(group.truncated[row]) else "stop",
                behaviour_step=int(group.behaviour_step[row]),
            )
        )
    return completions
