"""A loop small enough to run hundreds of times: a policy of one layer and a reward that varies from the start."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lgrpo import (
    CausalPolicy,
    ClippedLoss,
    Completion,
    GRPOModule,
    Prompt,
    RolloutBatch,
    RolloutCallback,
    RolloutDataModule,
    Sampling,
    WeightSync,
)
from lgrpo.rewards import Reward
from lgrpo.tasks import SortDigits

CHARACTERS = "0123456789>"
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


class LowDigits(Reward):
    """The share of digits below five, which varies between siblings of an untrained model."""

    is_inline = True

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return sum(c in "01234" for c in completion.text) / 6


class Recorder(RolloutCallback):
    """Record rollouts, lags and gradients."""

    def __init__(self) -> None:
        self.rollouts: list[RolloutBatch] = []
        self.started: list[tuple[int, int]] = []
        self.lags: list[Any] = []
        self.num_rows: list[int] = []
        """Rows of each micro-batch."""
        self.gradients: list[dict[str, Tensor]] = []

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        self.started.append((rollout, trainer.global_step))

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        self.rollouts.append(batch)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch, batch_idx: int) -> None:
        self.num_rows.append(len(batch))
        if batch_idx % trainer.accumulate_grad_batches == 0:
            rollout = trainer.datamodule.rollout  # type: ignore[attr-defined]
            lags = sorted(set(rollout.lag(trainer.global_step).int().tolist()))
            self.lags += lags if len(lags) == 1 else [tuple(lags)]  # several lags, if late groups joined the rollout

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.policy.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


@dataclass
class Run:
    trainer: L.Trainer
    module: GRPOModule
    data: RolloutDataModule
    recorder: Recorder
    logged: list[dict[str, float]] = field(default_factory=list)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.policy.named_parameters()}


class Logged(L.Callback):
    """Record every row of metrics that the module logs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.first: int | None = None  # above 0 in a resumed run

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._take(trainer)

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._take(trainer)

    def _take(self, trainer: L.Trainer) -> None:
        if self.first is None:
            self.first = trainer.global_step
        if len(self.rows) < trainer.global_step - self.first:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def tiny_policy(**settings: Any) -> CausalPolicy:
    return CausalPolicy(**{"config": MODEL, "characters": CHARACTERS} | settings)


def build(
    *,
    v: int | None = 1,
    i: int = 1,
    rollouts: int = 4,
    epochs: int = 1,
    loss: Any = None,
    policy: CausalPolicy | None = None,
    learning_rate: float = 1e-2,
    callbacks: Sequence[L.Callback] = (),
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    seed: int = 0,
    optimizer: Any = torch.optim.SGD,
) -> Run:
    """Return a module, a data module and a Trainer, not yet connected."""
    L.seed_everything(seed, verbose=False)
    policy = policy or tiny_policy()
    policy.build()  # now, so that the weights depend on the seed only
    module = GRPOModule(
        policy,
        loss or ClippedLoss(),
        optimizer=lambda parameters: optimizer(parameters, lr=learning_rate),
    )
    settings: dict[str, Any] = {
        "task": SortDigits(num_digits=2, num_held_out=20, reward=LowDigits()),
        "num_prompts": 4,
        "group_size": 4,
        "reuse": i,
        "num_rollouts": rollouts,
        "sampling": Sampling(max_tokens=6),
        "seed": seed,
    }
    recorder, logged = Recorder(), Logged()
    sync = [WeightSync(v)] if v != 0 else []
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": temporary_folder(),
        "limit_val_batches": 0,
        "callbacks": [*sync, *callbacks, recorder, logged],
    }
    run = Run(L.Trainer(**options | (trainer or {})), module, RolloutDataModule(**settings | (data or {})), recorder)
    run.logged = logged.rows
    return run


def temporary_folder() -> str:
    """Return a folder that is removed when this process, but not a fork of it, exits."""
    folder, owner = tempfile.mkdtemp(prefix="lgrpo-test-"), os.getpid()
    atexit.register(lambda: owner == os.getpid() and shutil.rmtree(folder, ignore_errors=True))
    return folder


def fit(**settings: Any) -> Run:
    """``build``, then train."""
    ckpt_path = settings.pop("ckpt_path", None)
    run = build(**settings)
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=ckpt_path)
    return run


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def a_batch(size: int = 8, width: int = 10, group_size: int = 4, seed: int = 0) -> RolloutBatch:
    """Return a rollout of random tokens with rows of different lengths."""
    g = torch.Generator().manual_seed(seed)
    starts = torch.randint(1, 4, (size, 1), generator=g)
    ends = starts + torch.randint(1, width - 3, (size, 1), generator=g)
    column = torch.arange(width)
    attention_mask, completion_mask = column < ends, (column < ends) & (column >= starts)
    return RolloutBatch(
        tokens=torch.randint(2, 13, (size, width), generator=g),
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        loss_mask=completion_mask.clone(),
        behaviour_logprobs=torch.where(completion_mask, -torch.rand(size, width, generator=g), 0.0),
        rewards=torch.randint(0, 2, (size,), generator=g).float(),
        advantages=torch.where(completion_mask, torch.randn(size, 1, generator=g), 0.0),
        behaviour_step=torch.zeros(size, dtype=torch.int64),
        positions=torch.arange(size) // group_size,
        truncated=torch.zeros(size, dtype=torch.bool),
        failed=torch.zeros(size, dtype=torch.bool),
        rows=torch.arange(size),
        group_size=group_size,
        temperature=1.0,
        max_tokens=width,
        rollout=0,
    )
