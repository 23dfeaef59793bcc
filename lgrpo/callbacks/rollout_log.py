"""A table of completions people can read."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lgrpo.callbacks.lines import append_lines
from lgrpo.hooks import RolloutCallback, Stage, policy_owner, rollout_owner
from lgrpo.loggers import attempt
from lgrpo.types import RolloutBatch

COLUMNS = ("rollout", "step", "prompt", "completion", "reward", "advantage", "live", "behaviour_step", "lag", "version")


class RolloutLog(RolloutCallback):
    """Writes some groups of every n-th rollout to ``completions.jsonl`` in the run folder, and to the logger."""

    def __init__(self, every: PositiveInt = 10, num_groups: PositiveInt = 1) -> None:
        """
        Args:
            every: Which rollouts: 0, every, 2 · every, …
            num_groups: Groups of each, all siblings of a group.
        """
        self.every = every
        self.num_groups = num_groups
        self._batch: RolloutBatch | None = None

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        if batch.rollout % self.every == 0 and trainer.is_global_zero:
            self._batch = batch

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Writes before the update, when every callback has had its say on the mask."""
        if stage != "update" or self._batch is None:
            return
        batch, self._batch = self._batch, None
        table = [self._row(trainer, batch, i) for i in range(min(self.num_groups * batch.group_size, len(batch)))]
        append_lines(trainer, "completions.jsonl", table, "rollout")
        for logger in trainer.loggers:
            attempt(logger, partial(_log_table, logger, table, trainer.global_step), partial(_count, trainer))

    def _row(self, trainer: L.Trainer, batch: RolloutBatch, i: int) -> dict[str, Any]:
        data = rollout_owner(trainer)
        tokenizer = data.tokenizer
        sampled = batch.completion_mask[i]
        behaviour_step = None if bool(batch.is_recorded[i]) else int(batch.behaviour_step[i])
        versions: dict[int | None, int] = {record.step: record.version for record in data.engine.ledger}
        values = (
            batch.rollout,
            trainer.global_step,
            tokenizer.decode(batch.tokens[i][batch.attention_mask[i] & ~sampled]),
            tokenizer.decode(batch.tokens[i][sampled]),
            None if bool(batch.rewards[i].isnan()) else round(float(batch.rewards[i]), 6),
            round(float(batch.advantages[i][sampled][0]), 6),
            bool(batch.loss_mask[i].any()),
            behaviour_step,
            None if behaviour_step is None else trainer.global_step - behaviour_step,
            versions.get(behaviour_step),
        )
        return dict(zip(COLUMNS, values, strict=True))


def _count(trainer: L.Trainer) -> None:
    policy_owner(trainer).note("fault/logger_writes", 1.0)


def _log_table(logger: Logger, table: list[dict[str, Any]], step: int) -> None:
    """Into loggers that can show a table; the file has it in any case."""
    if isinstance(logger, TensorBoardLogger):
        lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
        lines += [" | ".join(str(row[c]).replace("|", "\\|").replace("\n", " ") for c in COLUMNS) for row in table]
        logger.experiment.add_text("rollout/completions", "\n".join(lines), step)
    elif isinstance(logger, WandbLogger):
        logger.log_table(
            "rollout/completions", columns=list(COLUMNS), data=[list(r.values()) for r in table], step=step
        )
