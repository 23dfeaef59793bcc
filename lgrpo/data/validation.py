"""A validation: what is sampled, what is handed to the module, what is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lgrpo.data.collate import collate_rollout, pair_up
from lgrpo.data.evaluation import Evaluation, Evaluator, Samples
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.hooks import call_stage, policy_owner, run_folder
from lgrpo.types import EvaluationBatch, RolloutBatch


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


def held_out_rollout(
    evaluator: Evaluator,
    num_prompts: int,
    group_size: int,
    sampling: Sampling,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    trainer: L.Trainer,
) -> RolloutBatch:
    """Groups of a task's first problems, this rank's share, drawn from the current policy as ``sampling`` says."""
    settings = Evaluation(num_samples=group_size, num_problems=num_prompts, seed=evaluator.settings.seed)
    own = Evaluator("", evaluator.task, settings, evaluator.prompts, evaluator.scorer, sampling)
    weights, where = policy_owner(trainer).policy_weights(), (trainer.global_rank, trainer.world_size)
    samples = own(weights, engine, trainer.global_step, tokenizer, *where, is_shown=False)
    prompts, completions = pair_up(samples.problems, samples.groups)
    return collate_rollout(
        prompts,
        completions,
        samples.rewards.flatten().tolist(),
        group_size=group_size,
        pad_token_id=tokenizer.pad_token_id,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        rollout=-1,
    )


def keep_results(name: str, samples: Samples, form: Literal["jsonl", "parquet"], trainer: L.Trainer) -> None:
    """Writes the problems of all ranks, in their order, into the run folder."""
    tables: list[Any] = [samples.table()] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(tables, tables[0])
    if trainer.is_global_zero and not trainer.sanity_checking:
        table = sorted((row for table in tables for row in table), key=lambda row: row["problem"])
        fitting = trainer.state.fn == TrainerFn.FITTING
        command = "" if fitting else "validate" if trainer.state.fn == TrainerFn.VALIDATING else "test"
        parts = (command, name, f"step={policy_owner(trainer).policy_step}")
        stem = run_folder(trainer) / "evaluations" / "-".join(part for part in parts if part)
        path = stem.with_name(f"{stem.name}.{form}") if fitting else free_path(stem, form)
        write_results(table, path, form)
        if not fitting:
            rank_zero_info(f"Every problem is in {path}")


def free_path(stem: Path, form: str) -> Path:
    """A path that is not taken: an evaluation never overwrites another."""
    names = (stem.name, *(f"{stem.name}-{number}" for number in range(2, 10**4)))
    return next(path for path in (stem.with_name(f"{name}.{form}") for name in names) if not path.exists())


def write_results(table: list[dict[str, Any]], path: Path, form: Literal["jsonl", "parquet"]) -> None:
    """Writes a table, a line or row for each problem. In Parquet the row of data is a string of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table)
        path.write_text("".join(lines), encoding="utf-8")
    else:
        rows = [row | {"row": json.dumps(row["row"], ensure_ascii=False, default=str)} for row in table]
        Dataset.from_list(rows).to_parquet(str(path))
