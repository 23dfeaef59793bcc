"""Interfaces between module, data module and callbacks: two protocols, :class:`RolloutCallback` and its dispatch.

The three packages never import each other. What one needs from another it takes from the Trainer, as one of the two
protocols defined here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Literal, Protocol, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.advantages import Advantage
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.engines.in_flight import SyncPause
from lgrpo.losses import PolicyLoss
from lgrpo.metrics import StepMetrics
from lgrpo.policy import CausalPolicy
from lgrpo.run.resume import ResumeSettings
from lgrpo.tasks import Task
from lgrpo.types import Prompt, RolloutBatch
from lgrpo.weights import PolicyWeights

Stage = Literal["sync", "generate", "score", "update", "validate"]


class PolicyOwner(Protocol):
    """Part of the Lightning module that the data module and callbacks use."""

    policy: CausalPolicy
    loss: PolicyLoss
    step_metrics: StepMetrics

    @property
    def policy_step(self) -> int: ...

    def needs_reference_score(self, task: str) -> bool: ...

    def policy_logprobs(self, batch: RolloutBatch) -> Tensor: ...

    def policy_weights(self) -> PolicyWeights: ...

    def reference_weights(self) -> PolicyWeights: ...

    def refresh_reference(self, decay: float = 0.0) -> None: ...

    def add_metric(self, name: str, value: float) -> None: ...


class TrainPrompts(Protocol):
    """Training prompts by their position in the run."""

    def at(self, position: int) -> Prompt: ...

    @property
    def longest(self) -> int: ...


class SamplingSchedule(Protocol):
    """Part of the schedule of rollouts that callbacks use."""

    pause: SyncPause

    def paused(self) -> AbstractContextManager[None]: ...


class RolloutOwner(Protocol):
    """Part of the data module that the module and callbacks use."""

    engine: RolloutEngine
    advantage: Advantage
    lead: int
    reuse: int
    generate_ahead: bool
    overlap: bool
    partial: object | None
    schedule: SamplingSchedule
    max_lag: int | None
    behaviour_logprobs: Literal["engine", "policy"]
    tokenizer: PreTrainedTokenizerBase
    task: Task
    train_prompts: TrainPrompts
    sampling: Sampling
    micro_batch_tokens: int | None
    seed: int

    def resume_settings(self) -> ResumeSettings: ...

    @property
    def rollout(self) -> RolloutBatch | None: ...

    @property
    def micro_batches(self) -> list[RolloutBatch]: ...

    def sampled(self) -> list[RolloutBatch]: ...

    def sample_held_out(self, num_prompts: int) -> RolloutBatch: ...


def policy_owner(trainer: L.Trainer) -> PolicyOwner:
    """Return the Trainer's module, typed as a :class:`PolicyOwner`."""
    return cast(PolicyOwner, trainer.lightning_module)


def rollout_owner(trainer: L.Trainer) -> RolloutOwner:
    """Return the Trainer's data module, typed as a :class:`RolloutOwner`."""
    return cast(RolloutOwner, trainer.datamodule)  # type: ignore[attr-defined]


class RolloutCallback(L.Callback):
    """A Lightning callback with hooks for rollouts. Subclass it to extend a run.

    For rollout k the hooks are called in this order: ``on_rollout_start`` before it is generated, ``on_rollout_end``
    when it is sampled and scored, before its first optimizer step. Rollouts may be generated several ahead of training.

    A callback may change only the batch's ``loss_mask``, and only by turning entries off, so that the order of
    callbacks cannot change a result. Anything else is an advantage, a reward or a loss. To log a metric from these
    hooks call ``pl_module.add_metric(name, value)``: ``self.log`` works in Lightning's hooks only.

    Lightning's ``on_train_batch_start`` and ``on_train_batch_end`` run for each micro-batch. With
    ``data.micro_batch_tokens`` the first ones of a step may have no rows; in a development run these are the last.
    """

    order: int = 2
    """Position in the calls of ``on_rollout_start``, lowest first: callbacks that may fail run before any state has
    changed."""

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        """Run before rollout k is generated, after ``trainer.global_step`` optimizer steps."""

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        """Run with the complete rollout, sampled and scored, before its first optimizer step."""

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Run when the trainer enters another stage, for progress displays."""

    def resume_settings(self) -> ResumeSettings:
        """Return the settings to compare with those of a checkpoint when a run resumes; see ``lgrpo.run.resume``."""
        return {}


def rollout_callbacks(trainer: L.Trainer) -> list[RolloutCallback]:
    """Return the Trainer's rollout callbacks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback)]  # type: ignore[attr-defined]


@contextmanager
def _named_log_errors(callback: RolloutCallback) -> Iterator[None]:
    """Replace Lightning's error about ``log`` outside of its hooks by one that says what to call."""
    try:
        yield
    except MisconfigurationException as error:
        if "self.log" not in str(error):
            raise
        raise RuntimeError(
            f"{type(callback).__name__} calls log in a rollout hook, which works in Lightning's hooks only: call "
            "pl_module.add_metric(name, value) instead"
        ) from error


def call_rollout_start(trainer: L.Trainer, rollout: int) -> None:
    """Call ``on_rollout_start`` of every rollout callback, by ``order``."""
    for callback in sorted(rollout_callbacks(trainer), key=lambda callback: callback.order):
        with _named_log_errors(callback):
            callback.on_rollout_start(trainer, trainer.lightning_module, rollout)


def call_rollout_end(trainer: L.Trainer, batch: RolloutBatch) -> None:
    """Call ``on_rollout_end`` of every rollout callback; raise an error if one does more than shrink the loss mask."""
    overriding = [c for c in rollout_callbacks(trainer) if type(c).on_rollout_end is not RolloutCallback.on_rollout_end]
    before = copy.deepcopy(batch) if overriding else batch
    for callback in overriding:
        mask = batch.loss_mask.clone()
        with _named_log_errors(callback):
            callback.on_rollout_end(trainer, trainer.lightning_module, batch)
        if changed := [field.name for field in fields(batch) if not _is_same(batch, before, field.name)]:
            raise RuntimeError(
                f"{type(callback).__name__}.on_rollout_end wrote to {', '.join(changed)}; a rollout callback may only "
                "turn entries of loss_mask off. Write an advantage, a reward or a loss instead"
            )
        if bool((batch.loss_mask & ~mask).any()):
            raise RuntimeError(
                f"{type(callback).__name__}.on_rollout_end turned entries of loss_mask on; a callback may only turn "
                "them off, or the order of callbacks would decide the result"
            )


def call_stage(trainer: L.Trainer, stage: Stage) -> None:
    """Call ``on_stage`` of every rollout callback."""
    for callback in rollout_callbacks(trainer):
        callback.on_stage(trainer, trainer.lightning_module, stage)


def _is_same(batch: RolloutBatch, before: RolloutBatch, name: str) -> bool:
    """Return whether a field other than the loss mask is unchanged, bit by bit."""
    value, old = getattr(batch, name), getattr(before, name)
    if name == "loss_mask" or not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return name == "loss_mask" or value == old
    same_kind = value.shape == old.shape and value.dtype == old.dtype
    return same_kind and torch.equal(*(tensor.flatten().contiguous().view(torch.uint8) for tensor in (value, old)))
