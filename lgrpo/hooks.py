"""Where module, data and callbacks meet: the moments of a rollout, and what each may ask of the others.

They never import each other. What one needs of another it takes from the Trainer, under one of the two protocols here.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal, Protocol, cast

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.settings import Settings
from lgrpo.tasks import Task
from lgrpo.types import PolicyWeights, Prompt, RolloutBatch

Stage = Literal["sync", "generate", "score", "update", "validate"]


class PolicyOwner(Protocol):
    """What the data module and callbacks ask of the Lightning module."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def context_length(self) -> int: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_behaviour(self) -> str | None: ...

    @property
    def policy_step(self) -> int: ...

    def wants_reference_score(self, task: str) -> bool: ...

    def policy_logprobs(self, batch: RolloutBatch) -> Tensor: ...

    def policy_weights(self) -> PolicyWeights: ...

    def reference_weights(self) -> PolicyWeights: ...

    def refresh_reference(self, decay: float = 0.0) -> None: ...

    def note(self, name: str, value: float) -> None: ...


class PromptPlaces(Protocol):
    """The training prompts, laid out over the run."""

    def at(self, position: int) -> Prompt: ...


class RolloutOwner(Protocol):
    """What callbacks ask of the data module."""

    engine: RolloutEngine
    lead: int
    reuse: int
    behaviour_logprobs: Literal["engine", "policy"]
    tokenizer: PreTrainedTokenizerBase
    task: Task
    train_prompts: PromptPlaces
    sampling: Sampling
    micro_batch_tokens: int | None
    seed: int

    def resume_settings(self) -> Settings: ...

    @property
    def rollout(self) -> RolloutBatch | None: ...

    def sampled(self) -> list[RolloutBatch]: ...

    def sample_held_out(self, num_prompts: int) -> RolloutBatch: ...


def policy_owner(trainer: L.Trainer) -> PolicyOwner:
    """The Trainer's module, as what it is here."""
    return cast(PolicyOwner, trainer.lightning_module)


def rollout_owner(trainer: L.Trainer) -> RolloutOwner:
    """The Trainer's data module, as what it is here."""
    return cast(RolloutOwner, trainer.datamodule)  # type: ignore[attr-defined]


class RolloutCallback(L.Callback):
    """A Lightning callback that also hears of rollouts. Subclass it to extend a run.

    The one thing such a callback may change is a batch's ``loss_mask``, and only by turning entries off: then no order
    of callbacks can change a result. What needs more is an advantage, a reward or a loss. In these hooks a figure is
    logged by ``pl_module.note(name, value)``: Lightning's ``self.log`` works in Lightning's own hooks only.
    """

    order: int = 2
    """Of those told of a rollout's start, the lower the sooner: what may fail does so while nothing has changed."""

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        """Rollout k is about to be generated; ``trainer.global_step`` updates have been made."""

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        """The rollout is sampled, scored and whole; its first pass is about to begin."""

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """The run turns to another kind of work. For displays."""

    def resume_settings(self) -> Settings:
        """What a run that goes on from a checkpoint is told of where it differs; see ``lgrpo.settings``."""
        return {}


def rollout_callbacks(trainer: L.Trainer) -> list[RolloutCallback]:
    """Those of the Trainer's callbacks that hear of rollouts."""
    return [callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback)]  # type: ignore[attr-defined]


def call_rollout_start(trainer: L.Trainer, rollout: int) -> None:
    """Tells every rollout callback that rollout k is about to be generated."""
    for callback in sorted(rollout_callbacks(trainer), key=lambda callback: callback.order):
        callback.on_rollout_start(trainer, trainer.lightning_module, rollout)


def call_rollout_end(trainer: L.Trainer, batch: RolloutBatch) -> None:
    """Shows every rollout callback the whole rollout, and holds them to shrinking its loss mask."""
    for callback in rollout_callbacks(trainer):
        before, written = batch.loss_mask.clone(), _versions(batch)
        callback.on_rollout_end(trainer, trainer.lightning_module, batch)
        if changed := [name for name, version in _versions(batch).items() if version != written[name]]:
            raise RuntimeError(
                f"{type(callback).__name__}.on_rollout_end wrote to {', '.join(changed)}; a rollout callback may only "
                "turn entries of loss_mask off. Advantages, rewards and losses are classes of their own"
            )
        if bool((batch.loss_mask & ~before).any()):
            raise RuntimeError(
                f"{type(callback).__name__}.on_rollout_end turned entries of loss_mask on; a callback may only turn "
                "them off, or the order of callbacks would decide the result"
            )


def _versions(batch: RolloutBatch) -> dict[str, tuple[int, int]]:
    """Which tensor each field but the mask is, and how often it was written to."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "loss_mask"}
    return {name: (id(value), value._version) for name, value in tensors.items() if isinstance(value, Tensor)}


@torch.no_grad()
def log_ratios(trainer: L.Trainer, batch: RolloutBatch) -> Tensor:
    """log π_θ/π_α [B, T] of a rollout's tokens, π_θ as it is now; a pass in as many pieces as a step has."""
    policy, found = policy_owner(trainer), torch.zeros_like(batch.behaviour_logprobs)
    for rows in torch.arange(len(batch)).chunk(trainer.accumulate_grad_batches):
        piece = batch.select(rows)
        found[rows, : piece.tokens.shape[1]] = policy.policy_logprobs(piece) - piece.behaviour_logprobs
    return torch.where(batch.completion_mask, found, 0.0)


def log_figures(trainer: L.Trainer, figures: dict[str, float], step: int) -> None:
    """To the loggers, and to callbacks that monitor a figure. They must be reduced over ranks already."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in figures.items()})
    for logger in trainer.loggers:
        logger.log_metrics(figures, step=step)
        logger.save()


def run_folder(trainer: L.Trainer) -> Path:
    """Where a run's own files go: the root the user gave the Trainer, or else the logger's folder."""
    root = Path(trainer.default_root_dir)
    return root if root.resolve() != Path.cwd() or trainer.log_dir is None else Path(trainer.log_dir)


def call_stage(trainer: L.Trainer, stage: Stage) -> None:
    """Tells every rollout callback what the run is busy with."""
    for callback in rollout_callbacks(trainer):
        callback.on_stage(trainer, trainer.lightning_module, stage)
