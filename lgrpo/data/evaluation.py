"""Evaluation of the current policy on the validation sets of the run's task and of benchmarks.

:class:`Evaluator` samples and scores one validation set. Its method ``evaluate`` makes the batch for
``validation_step``, and writes the results if asked; ``held_out_rollout`` makes a rollout for callbacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.data.collate import Group, as_rewards, collate_rollout
from lgrpo.data.prompts import Prompts, prompts_at
from lgrpo.data.scorer import GroupScores, Scorer
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.hooks import call_stage, policy_owner
from lgrpo.rewards import FailedScore, Notes, notes_of
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.run.folder import run_folder
from lgrpo.tasks import Task
from lgrpo.types import Completion, EvaluationBatch, Prompt, RolloutBatch
from lgrpo.weights import PolicyWeights


@dataclass(kw_only=True, frozen=True)
class Evaluation:
    """Settings of a validation of the current policy. It does not affect the sync cycle."""

    num_samples: int = 8
    """Completions of each problem."""
    num_problems: int | None = None
    """Number of problems, from the start of the validation set; by default all."""
    sampling: Sampling | None = None
    """Sampling settings; by default those of training."""
    success_reward: float = 1.0
    """Lowest reward of a correct completion."""
    seed: int = 0
    """Seed of the samples: the same in every validation, so that differences are due to the policy."""
    results: Literal["jsonl", "parquet"] | None = None
    """Format of files in evaluations/ of the run folder with every problem, its completions and rewards; by default
    none are written."""

    def __post_init__(self) -> None:
        check_count("evaluation.num_samples", self.num_samples, at_least=1)
        check_count("evaluation.num_problems", self.num_problems, at_least=1)

    def positions(self, num_available: int, rank: int, world_size: int) -> range:
        """Return the positions of a rank's problems."""
        num_problems = min(self.num_problems or num_available, num_available)
        if num_problems < world_size:
            raise ValueError(f"{num_problems} validation problems cannot be divided among {world_size} ranks")
        return range(rank, num_problems, world_size)


@dataclass(kw_only=True, frozen=True)
class Benchmark(Evaluation):
    """Another task to validate on, with its evaluation settings."""

    task: Task
    """Task whose validation set is used."""


@dataclass(kw_only=True, slots=True)
class Samples:
    """A rank's problems, their completions and scores."""

    problems: list[Prompt]
    groups: list[list[Completion]]
    rewards: Tensor
    """[problems, samples] float32; NaN for scores that are not known yet."""
    correct: Tensor
    """[problems, samples] bool."""
    failed: Tensor
    """[problems, samples] bool: samples that could not be scored."""
    final_answers: list[list[str | None]]
    notes: list[list[Notes | None]]
    """Notes of the reward about each sample."""

    @property
    def answers(self) -> Tensor:
        """[problems, samples] int64: number of the final answer, equal for equal answers; -1 if there is none."""
        numbers = []
        for answers in self.final_answers:
            known = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
            numbers.append([-1 if answer is None else known[answer] for answer in answers])
        return torch.tensor(numbers)

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each problem."""
        return [
            {
                "problem": prompt.position,
                "prompt": prompt.text,
                "row": dict(prompt.row),
                "completions": [completion.text for completion in group],
                "final_answers": answers,
                "rewards": [None if reward != reward else reward for reward in rewards.tolist()],
                "correct": correct.tolist(),
                "num_tokens": [completion.num_sampled for completion in group],
                "finish_reasons": [completion.finish_reason for completion in group],
                **({"notes": notes} if any(notes) else {}),
            }
            for prompt, group, answers, rewards, correct, notes in zip(
                self.problems, self.groups, self.final_answers, self.rewards, self.correct, self.notes, strict=True
            )
        ]


@dataclass(kw_only=True)
class Evaluator:
    """A validation set with its settings."""

    name: str
    task: Task
    settings: Evaluation
    prompts: Prompts
    scorer: Scorer
    sampling: Sampling
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    trainer: L.Trainer

    def evaluate(self) -> EvaluationBatch:
        """Evaluate the current policy, and the reference if its score on the task is not known yet."""
        module = policy_owner(self.trainer)
        call_stage(self.trainer, "validate")
        show_progress = self.trainer.is_global_zero and self.trainer.state.fn != TrainerFn.FITTING
        samples = self.sample(module.policy_weights(), show_progress)
        reference = None
        if module.needs_reference_score(self.name):
            reference = self.sample(module.reference_weights(), show_progress).correct
        if self.settings.results is not None:
            write_results(self.name, samples, self.settings.results, self.trainer)
        return EvaluationBatch(
            task=self.name,
            correct=samples.correct,
            answers=samples.answers,
            reference_correct=reference,
            failed=samples.failed if self.scorer.reward.can_fail else None,
        )

    def held_out_rollout(self, num_prompts: int, group_size: int, sampling: Sampling) -> RolloutBatch:
        """Return this rank's part of groups for the first problems, sampled from the current policy."""
        settings = Evaluation(num_samples=group_size, num_problems=num_prompts, seed=self.settings.seed)
        evaluator = replace(self, name="", settings=settings, sampling=sampling)
        samples = evaluator.sample(policy_owner(self.trainer).policy_weights())
        parts = zip(samples.problems, samples.groups, samples.rewards.tolist(), strict=True)
        return collate_rollout([Group(*part) for part in parts], self.tokenizer.pad_token_id, sampling, rollout=-1)

    def sample(self, weights: PolicyWeights, show_progress: bool = False) -> Samples:
        """Sample and score this rank's problems with the given weights; show a progress bar in a terminal."""
        settings = self.settings
        ranks = self.trainer.global_rank, self.trainer.world_size
        problems = prompts_at(self.prompts, settings.positions(len(self.prompts), *ranks))
        scores_of = GroupScores(self.scorer, problems)
        disable = None if show_progress else True  # None: only in a terminal
        bar = tqdm(total=len(problems), desc=self.name or "validation", unit="problem", disable=disable)

        def on_group(index: int, completions: list[Completion]) -> None:
            scores_of(index, completions)
            bar.update()

        with self.engine.holding(weights, self.trainer.global_step), bar:
            groups = self.engine.generate(
                problems, settings.num_samples, self.sampling, settings.seed, self.tokenizer, on_group
            )
        scores = scores_of.result()
        self.scorer.reward.report()  # drop metrics that do not belong to a rollout
        rewards = torch.stack([as_rewards(group) for group in scores])
        return Samples(
            problems=problems,
            groups=groups,
            rewards=rewards,
            correct=rewards >= settings.success_reward,
            failed=torch.tensor([[isinstance(score, FailedScore) for score in group] for group in scores]),
            final_answers=[[self.task.final_answer(c.text) for c in group] for group in groups],
            notes=[[notes_of(score) for score in group] for group in scores],
        )


def check_names(benchmarks: Mapping[str, Benchmark]) -> None:
    """Raise an error if the name of a benchmark cannot be part of a metric's name."""
    if bad := [name for name in benchmarks if not name or "/" in name]:
        raise ValueError(f"data.benchmarks has {bad}: metrics are logged under the name, so it must have no slash")


def skip_validation(trainer: L.Trainer, stage: str) -> None:
    """Train without validation, because there is no task to validate on; another stage than ``fit`` is an error."""
    reason = "the task has no validation set, and data.benchmarks names no other task"
    if stage != "fit":
        raise ValueError(f"there is nothing to validate on: {reason}. Add one of the two")
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    monitored = [getattr(callback, "monitor", None) or "" for callback in callbacks]
    if name := next((name for name in monitored if name.startswith("val/")), None):
        raise ValueError(f"a callback monitors {name}, but {reason}. Add one of the two, or monitor another metric")
    if trainer.limit_val_batches:
        rank_zero_warn(f"the run is not validated: {reason}")
        trainer.limit_val_batches = 0


def write_results(name: str, samples: Samples, form: Literal["jsonl", "parquet"], trainer: L.Trainer) -> None:
    """Write the problems of all ranks, in order, into the run folder."""
    tables = gather_ranks(trainer, samples.table())
    if trainer.is_global_zero and not trainer.sanity_checking:
        table = sorted((row for table in tables for row in table), key=lambda row: row["problem"])
        fitting = trainer.state.fn == TrainerFn.FITTING
        command = "" if fitting else "validate" if trainer.state.fn == TrainerFn.VALIDATING else "test"
        parts = (command, name, f"step={policy_owner(trainer).policy_step}")
        stem = run_folder(trainer) / "evaluations" / "-".join(part for part in parts if part)
        path = stem.with_name(f"{stem.name}.{form}") if fitting else _unused_path(stem, form)
        _write_table(table, path, form)
        if not fitting:
            rank_zero_info(f"Wrote every problem to {path}")


def _unused_path(stem: Path, form: str) -> Path:
    """Return a path that does not exist, so that an evaluation never overwrites another."""
    names = (stem.name, *(f"{stem.name}-{number}" for number in range(2, 10**4)))
    return next(path for path in (stem.with_name(f"{name}.{form}") for name in names) if not path.exists())


def _write_table(table: list[dict[str, Any]], path: Path, form: Literal["jsonl", "parquet"]) -> None:
    """Write one line or row for each problem. In Parquet the dataset row and the notes are JSON strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table)
        path.write_bytes(text.encode("utf-8", errors="backslashreplace"))  # a lone surrogate as its JSON escape
    else:
        from datasets import Dataset  # slow to import

        rows = [row | {"row": json.dumps(row["row"], ensure_ascii=False, default=str)} for row in table]
        if any("notes" in row for row in rows):
            rows = [row | {"notes": _notes_as_text(row)} for row in rows]
        Dataset.from_list(rows).to_parquet(str(path))


def _notes_as_text(row: Mapping[str, Any]) -> list[str | None]:
    """Return the notes about each sample of a problem as JSON: their types may differ."""
    notes = row.get("notes") or [None] * len(row["completions"])
    return [None if own is None else json.dumps(own) for own in notes]
