"""Scoring of recorded completions by a task, for ``lgrpo score``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lgrpo.data.scorer import GroupScores, Scorer
from lgrpo.recordings.recording import Recording, with_column, write_recording
from lgrpo.recordings.tokens import tokenised
from lgrpo.rewards import FailedScore, NotYet, Score, Scoring, notes_of
from lgrpo.tasks import Task
from lgrpo.types import Prompt

_NUM_GROUPS_AT_ONCE = 256


@dataclass(kw_only=True, slots=True)
class Rescored:
    """Summary of a recording that was scored again."""

    num_completions: int
    num_failed: int
    """Number of completions that could not be scored, or whose episode had failed when it was recorded."""
    num_waiting: int
    """Number of completions whose score is not known yet."""
    before: float | None
    """Mean of the recorded rewards; None if there was none."""
    after: float | None
    """Mean of the new rewards."""


def rescore(path: str, out: Path, task: Task, scoring: Scoring | None, tokenizer: PreTrainedTokenizerBase) -> Rescored:
    """Score every completion of a recording with a task's reward, as a run would, and write the result to ``out``.

    Only the rewards and their notes change; advantages, which belong to the old rewards, become null.
    """
    recording = Recording.read(path)
    recording.check_tokenizer(tokenizer)
    sampling = _shared_sampling(recording)
    # a reward may count tokens; in the file, texts without token ids stay as they were
    with_tokens = dataclasses.replace(recording, table=tokenised(recording, tokenizer))
    task_rows = _TaskRows(task, tokenizer)
    scorer = Scorer(task.reward, scoring)
    scores: dict[int, Score] = {}
    try:
        for first in range(0, len(recording.groups), _NUM_GROUPS_AT_ONCE):
            groups = recording.groups[first : first + _NUM_GROUPS_AT_ONCE]
            prompts = [task_rows.with_row(recording.prompt_of(group, tokenizer), recording.name) for group in groups]
            scores_of = GroupScores(scorer, prompts)
            for index, group in enumerate(groups):
                scores_of(index, with_tokens.completions(group.rows, "task"))
            for group, found in zip(groups, scores_of.result(), strict=True):
                scores |= dict(zip(group.rows, found, strict=True))
    finally:
        scorer.close()
    ordered = [scores[row] for row in range(len(recording.table))]
    episodes = recording.table["episode_failed"].to_pylist()
    failed = [isinstance(score, FailedScore) or bool(ended) for score, ended in zip(ordered, episodes, strict=True)]
    rewards = [None if isinstance(score, NotYet) else float(score) for score in ordered]
    table = with_column(recording.table, "reward", rewards)
    table = with_column(with_column(table, "failed", failed), "advantage", [None] * len(rewards))
    notes = [None if (own := notes_of(score)) is None else json.dumps(own) for score in ordered]
    table = with_column(table, "score_notes", notes)
    scored_by = f"{type(task).__module__}.{type(task).__qualname__}"
    scored = {"scored_by": scored_by, "reward": type(task.reward).__qualname__}
    metadata = _shared(recording.metadata) | sampling | scored
    write_recording(table, metadata, out)
    return Rescored(
        num_completions=len(rewards),
        num_failed=sum(failed),
        num_waiting=rewards.count(None),
        before=_mean(recording.table["reward"].to_pylist()),
        after=_mean(rewards),
    )


class _TaskRows:
    """Rows of a task by prompt text, for recorded prompts without the fields that the reward reads."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.task = task
        self.tokenizer = tokenizer

    def with_row(self, prompt: Prompt, name: str) -> Prompt:
        """Return the prompt with a row that has the required fields."""
        required = self.task.reward.required_fields()
        if not required <= set(prompt.row) and prompt.text in self._by_prompt:
            prompt = dataclasses.replace(prompt, row=self._by_prompt[prompt.text])
        if missing := sorted(required - set(prompt.row)):
            raise ValueError(
                f"the reward reads {missing}, but the recorded row of prompt {prompt.text[:60]!r} in {name} has only "
                f"{sorted(prompt.row)}, and the task has no such prompt"
            )
        try:
            self.task.reward.check_row(prompt.row)
        except ValueError as error:
            raise ValueError(f"no answer to {prompt.text[:60]!r} can be scored: {error}") from error
        return prompt

    @cached_property
    def _by_prompt(self) -> dict[str, Mapping[str, Any]]:
        rows = [row for split in ("validation", "train") for row in self.task.rows(split)]
        return {self.task.template.text(row, self.tokenizer): row for row in rows}


def _shared(metadata: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata that all files have in common."""
    first, *others = metadata or [{}]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _shared_sampling(recording: Recording) -> dict[str, Any]:
    """Return the sampling settings that the files have in common, as metadata; raise if their temperatures differ."""
    settings = [metadata["sampling"] for metadata in recording.metadata if "sampling" in metadata]
    temperatures = sorted({own["temperature"] for own in settings if "temperature" in own})
    if len(temperatures) > 1:
        raise ValueError(
            f"{recording.name} was sampled at the temperatures {', '.join(map(str, temperatures))}, and a scored file "
            "can name only one, which its log-probabilities need: score its files one by one"
        )
    return {"sampling": _shared(settings)} if settings else {}


def _mean(rewards: list[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
