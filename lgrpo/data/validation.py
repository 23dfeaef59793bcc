"""A validation: what is sampled, what is handed to the module, what is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase

from lgrpo.data.evaluation import Evaluator, Samples
from lgrpo.engines import RolloutEngine
from lgrpo.hooks import call_stage, policy_owner, run_folder
from lgrpo.types import EvaluationBatch


def validate(
    evaluator: Evaluator, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, trainer: L.Trainer
) -> EvaluationBatch:
    """Samples of this rank's problems from the current policy, and from a reference not yet measured."""
    module = policy_owner(trainer)
    call_stage(trainer, "validate")
    is_shown = trainer.is_global_zero and trainer.state.fn != TrainerFn.FITTING
    where = engine, trainer.global_step, tokenizer, trainer.global_rank, trainer.world_size, is_shown
    samples = evaluator(module.policy_weights(), *where)
    reference = None
    if module.wants_reference_score(evaluator.name):
        reference = evaluator(module.reference_weights(), *where).correct
    if evaluator.settings.results is not None:
        keep_results(evaluator.name, samples, evaluator.settings.results, trainer)
    return EvaluationBatch(
        task=evaluator.name, correct=samples.correct, answers=samples.answers, reference_correct=reference
    )


def keep_results(name: str, samples: Samples, form: Literal["jsonl", "parquet"], trainer: L.Trainer) -> None:
    """Writes the problems of all ranks, in their order, into the run folder."""
    tables: list[Any] = [samples.table()] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(tables, tables[0])
    if trainer.is_global_zero and not trainer.sanity_checking:
        table = sorted((row for table in tables for row in table), key=lambda row: row["problem"])
        name = "-".join(part for part in (name, f"step={trainer.global_step}") if part)
        write_results(table, run_folder(trainer) / "evaluations" / f"{name}.{form}", form)


def write_results(table: list[dict[str, Any]], path: Path, form: Literal["jsonl", "parquet"]) -> None:
    """Writes a table, a line or row for each problem. In Parquet the row of data is a string of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table)
        path.write_text("".join(lines), encoding="utf-8")
    else:
        rows = [row | {"row": json.dumps(row["row"], ensure_ascii=False, default=str)} for row in table]
        Dataset.from_list(rows).to_parquet(str(path))
