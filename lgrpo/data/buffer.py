"""What Lightning iterates over: the rollout being trained on, and the samples being validated.

Both are sized. From an unsized loader Lightning fetches one batch ahead, which would make v = 1 off-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import lightning as L

from lgrpo.types import EvaluationBatch, RolloutBatch


class RolloutSource(Protocol):
    """What the buffer asks of its data module."""

    trainer: L.Trainer | None
    reuse: int

    def rollouts_per_epoch(self) -> int:
        """Rollouts in a stage."""
        ...

    def micro_batches(self, rollout: int) -> list[RolloutBatch]:
        """The micro-batches of rollout k, sampled when first asked for."""
        ...


class RolloutBuffer:
    """The rollout being trained on, pass after pass, micro-batch after micro-batch.

    It has no cursor of its own: rollout, pass and micro-batch follow from counters the Trainer already keeps and
    restores, so a resumed run cannot disagree with them.
    """

    def __init__(self, source: RolloutSource) -> None:
        self.source = source

    def __len__(self) -> int:
        trainer = _trainer(self.source)
        return self.source.rollouts_per_epoch() * self.source.reuse * trainer.accumulate_grad_batches

    def __iter__(self) -> Iterator[RolloutBatch]:
        trainer = _trainer(self.source)
        for index in range(trainer.fit_loop.batch_idx + 1, len(self)):
            micro_batches = self.source.micro_batches(trainer.global_step // self.source.reuse)
            yield micro_batches[index % trainer.accumulate_grad_batches]

    def state_dict(self) -> dict[str, Any]:
        """Empty: the state is the data module's. That the method exists tells Lightning this loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class EvaluationBuffer:
    """A batch for each task: all samples of this rank's problems, drawn when they are asked for."""

    def __init__(self, sample: Callable[[int], EvaluationBatch], num_tasks: int) -> None:
        self.sample = sample
        self.num_tasks = num_tasks

    def __len__(self) -> int:
        return self.num_tasks

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for index in range(self.num_tasks):
            yield self.sample(index)


def _trainer(source: RolloutSource) -> L.Trainer:
    if source.trainer is None:
        raise RuntimeError("a RolloutBuffer is driven by a Trainer: call trainer.fit(module, datamodule=…)")
    return source.trainer
