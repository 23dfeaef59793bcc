"""A readable table of completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lgrpo.callbacks.jsonl import append_lines
from lgrpo.checks import check_count
from lgrpo.functional.sync_cycle import is_selected
from lgrpo.hooks import RolloutCallback, Stage, policy_owner, rollout_owner
from lgrpo.run.loggers import attempt
from lgrpo.types import RolloutBatch

PER_ARTIFACT = 100
"""Number of logged rollouts in one table of MLflow, which rewrites a table whenever rows are added to it."""
COLUMNS = (
    *("rollout", "step", "prompt", "completion", "reward", "advantage", "live", "behaviour_step", "lag", "version"),
    *("spans", "turns", "dropped", "notes"),
)
"""Columns of the table. ``behaviour_step``, ``lag`` and ``version`` are those of the first token; ``spans`` lists
number of tokens and behaviour step of each part of a completion that was sampled from several versions; ``turns`` lists
reward and advantage of each turn of an episode, and ``advantage`` is their mean over the sampled tokens. ``dropped`` is
the number of observations that later turns did not see; ``completion`` has them, but not what replaced them. ``notes``
is what the reward noted about the score, such as a judge's answer, as text."""


class RolloutLog(RolloutCallback):
    """Writes some groups of one in n rollouts to ``completions.jsonl`` in the run folder, and to the logger."""

    def __init__(self, every: int = 10, num_groups: int = 1) -> None:
        """
        Args:
            every: Average number of rollouts from one that is written to the next. Rollout 0 is written, later ones at
                varying offsets, so that all lags occur.
            num_groups: Number of groups of each rollout, with all their siblings.
        """
        check_count("RolloutLog.every", every, at_least=1)
        check_count("RolloutLog.num_groups", num_groups, at_least=1)
        self.every = every
        self.num_groups = num_groups
        self._batch: RolloutBatch | None = None

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        if is_selected(batch.rollout, self.every) and trainer.is_global_zero:
            self._batch = batch

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Write before the update, when all callbacks have changed the mask."""
        if stage != "update" or self._batch is None:
            return
        batch, self._batch = self._batch, None
        table = [self._row(trainer, batch, i) for i in range(min(self.num_groups * batch.group_size, len(batch)))]
        append_lines(trainer, "completions.jsonl", table, "rollout")
        count_failure = partial(policy_owner(trainer).add_metric, "fault/logger_writes", 1.0)
        for logger in trainer.loggers:
            attempt(logger, count_failure, self._log_table, logger, table, trainer.global_step)

    def _row(self, trainer: L.Trainer, batch: RolloutBatch, i: int) -> dict[str, Any]:
        data = rollout_owner(trainer)
        tokenizer = data.tokenizer
        own, advantage = batch.columns(i), batch.mean_advantage(i)
        prompt = batch.attention_mask[i].clone()
        prompt[own] = False
        behaviour_step = None if bool(batch.is_recorded[i]) else int(batch.first_step[i])
        spans, dropped = batch.spans(i), batch.dropped(i)
        token_ids = batch.tokens[i][own].tolist()
        for one in reversed(dropped):
            del token_ids[one.middle : one.stop]
        versions: dict[int | None, int] = {record.step: record.version for record in data.engine.state.ledger}
        notes = None if batch.notes is None else batch.notes[i]
        values = (
            batch.rollout,
            trainer.global_step,
            tokenizer.decode(batch.tokens[i][prompt]),
            tokenizer.decode(token_ids),
            None if bool(batch.rewards[i].isnan()) else round(float(batch.rewards[i]), 6),
            None if advantage is None else round(advantage, 6),
            bool(batch.loss_mask[i].any()),
            behaviour_step,
            None if behaviour_step is None else trainer.global_step - behaviour_step,
            versions.get(behaviour_step),
            spans if len(spans) > 1 else None,
            None if (turns := batch.turns(i)) is None else [[round(number, 6) for number in turn] for turn in turns],
            len(dropped) or None,
            None if notes is None else "\n".join(_lines(notes)),
        )
        return dict(zip(COLUMNS, values, strict=True))

    def _log_table(self, logger: Logger, table: list[dict[str, Any]], step: int) -> None:
        """Write a table to a logger that can show one."""
        if isinstance(logger, TensorBoardLogger):
            lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
            lines += [" | ".join(str(row[c]).replace("|", "\\|").replace("\n", " ") for c in COLUMNS) for row in table]
            logger.experiment.add_text("rollout/completions", "\n".join(lines), step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(
                "rollout/completions", columns=list(COLUMNS), data=[list(r.values()) for r in table], step=step
            )
        elif isinstance(logger, MLFlowLogger) and logger.run_id is not None:
            columns = {name: [row[name] for row in table] for name in COLUMNS}
            first = table[0]["rollout"] // (self.every * PER_ARTIFACT) * self.every * PER_ARTIFACT
            logger.experiment.log_table(logger.run_id, columns, f"completions/from_rollout_{first}.json")  # appends


def _lines(notes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield notes as lines of text.

    >>> list(_lines({"style": {"scores": [0.7, None], "answers": [["Fine.\\nRating: 7"], ["?"]]}}))
    ['style.scores: [0.7, null]', 'style.answers: Fine.\\nRating: 7', 'style.answers: ?']
    """
    for name, value in notes.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        elif isinstance(value, list) and all(isinstance(item, list) for item in value):
            yield from (line for item in value for line in _lines({name: item}, prefix))
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            yield from (f"{prefix}{name}: {item}" for item in value)
        else:
            yield f"{prefix}{name}: {value if isinstance(value, str) else json.dumps(value)}"
