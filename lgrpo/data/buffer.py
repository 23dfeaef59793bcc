"""The loaders Lightning iterates over: micro-batches of the current rollout, and evaluation batches.

Both have a length. From a loader without one Lightning fetches a batch ahead, which would make v = 1 off-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L

from lgrpo.data.late import LateGroups
from lgrpo.data.micro_batches import micro_batches
from lgrpo.data.prepare import RolloutPreparation
from lgrpo.data.schedule import RolloutSchedule
from lgrpo.hooks import call_stage
from lgrpo.types import EvaluationBatch, RolloutBatch


class RolloutBuffer:
    """The current rollout, pass after pass, micro-batch after micro-batch.

    Rollout, pass and micro-batch follow from counters that the Trainer keeps and restores, so a resumed run cannot
    disagree with them. A rollout is prepared when its first micro-batch is requested.
    """

    def __init__(
        self, trainer: L.Trainer, schedule: RolloutSchedule, prepare: RolloutPreparation, rollouts_per_epoch: int
    ) -> None:
        self.rollout: RolloutBatch | None = None
        """Current rollout; None before the first."""
        self._trainer = trainer
        self._schedule = schedule
        self._prepare = prepare
        self._rollouts_per_epoch = rollouts_per_epoch
        self._late = LateGroups()
        self._step = -1
        """Optimizer step for which the micro-batches were made."""
        self.micro_batches: list[RolloutBatch] = []
        """Pieces of the current rollout, masked for the current pass; without empty ones."""
        self._step_batches: list[RolloutBatch] = []
        """Micro-batches of an optimizer step for Lightning: empty ones, if some are left over, then the pieces."""

    def __len__(self) -> int:
        return self._rollouts_per_epoch * self._schedule.reuse * self._trainer.accumulate_grad_batches

    def __iter__(self) -> Iterator[RolloutBatch]:
        self._check_epoch()
        for index in range(self._trainer.fit_loop.batch_idx + 1, len(self)):
            self._advance_to(self._trainer.global_step)
            yield self._step_batches[index % self._trainer.accumulate_grad_batches]

    def _check_epoch(self) -> None:
        """Raise an error if an epoch ends inside an optimizer step, where Lightning would step with a part of it."""
        batches, each = self._trainer.num_training_batches, self._trainer.accumulate_grad_batches
        if batches % each and not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise ValueError(
                f"an epoch of {batches} batches is not a whole number of optimizer steps of {each} micro-batches: "
                "change trainer.limit_train_batches"
            )

    def _advance_to(self, step: int) -> None:
        """Make the rollout of an optimizer step the current one, including its hooks, and begin the step's pass."""
        rollout = step // self._schedule.reuse
        if self.rollout is None or self.rollout.rollout != rollout:
            self._hold(*self._prepare(rollout, self._late))  # after all steps: a checkpoint never has half a rollout
            call_stage(self._trainer, "update")
            self._schedule.release(self._trainer, rollout)
        elif step != self._step:
            self._prepare.next_pass(self._step_batches)
        self._step = step

    def _hold(self, batch: RolloutBatch, late: LateGroups) -> None:
        self.rollout, self._late = batch, late
        self.micro_batches = micro_batches(batch, self._trainer, self._prepare.budget)
        num_left = self._trainer.accumulate_grad_batches - len(self.micro_batches)
        empty = [batch.empty() for _ in range(num_left)]
        # the optimizer steps, and gradients are reduced over ranks, after the last micro-batch: it has rows
        self._step_batches = empty + self.micro_batches
        if self._trainer.fast_dev_run:  # type: ignore[attr-defined]  # it ends after the first
            self._step_batches = self.micro_batches + empty

    def rollout_state(self) -> dict[str, Any]:
        """Return this rank's current rollout, late groups and curriculum, for the data module's checkpoint."""
        curriculum = self._prepare.curriculum
        return {
            "curriculum": curriculum and curriculum.state_dict(),
            "rollout": self.rollout and self.rollout.state_dict(),
            "late": [group.state_dict() for group in self._late.waiting],
        }

    def restore_rollout(self, state: dict[str, Any]) -> None:
        """Restore what ``rollout_state`` returned."""
        if self._prepare.curriculum is not None and state.get("curriculum") is not None:
            self._prepare.curriculum.load_state_dict(state["curriculum"])
        if state["rollout"] is not None:
            late = LateGroups(waiting=[RolloutBatch.from_state_dict(group) for group in state["late"]])
            self._hold(RolloutBatch.from_state_dict(state["rollout"]), late)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module saves the state of every rank.

        Lightning takes the method as the sign that this loader can resume within an epoch.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see ``state_dict``."""


@dataclass
class EvaluationBuffer:
    """One batch for each task: all samples of this rank's problems, drawn when the batch is requested."""

    sample: Callable[[int], EvaluationBatch]
    num_tasks: int

    def __len__(self) -> int:
        return self.num_tasks

    def __iter__(self) -> Iterator[EvaluationBatch]:
        yield from map(self.sample, range(self.num_tasks))
