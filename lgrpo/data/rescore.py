"""Scores for recorded completions that have none, or have others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from lgrpo.data.scorer import Scorer
from lgrpo.engines.recorded import tokenised
from lgrpo.rewards import FailedScore, NotYet, Score, Scoring
from lgrpo.tasks import Recording, Task
from lgrpo.tasks.recording import RecordedGroup, write_recording
from lgrpo.types import RECORDED, Completion, Prompt

_GROUPS_AT_A_TIME = 256


@dataclass(kw_only=True, slots=True)
class Rescored:
    """What became of a recording's scores."""

    num_completions: int
    num_failed: int
    """That could not be scored, and have ``scoring.failure_score``."""
    num_waiting: int
    """Whose score is not there yet; they have none."""
    before: float | None
    """Mean reward as it was, of those that had one."""
    after: float | None


def rescore(path: str, out: Path, task: Task, scoring: Scoring | None, tokenizer: PreTrainedTokenizerBase) -> Rescored:
    """Scores every completion of a recording with a task's reward, as a run would, and writes all of it to ``out``.

    What was recorded stays, but for the reward, and for the advantage, which was that of the old one.
    """
    recording = Recording.read(path)
    recording.check_tokenizer(tokenizer)
    with_tokens = tokenised(recording, tokenizer)  # a reward may count them; a text from elsewhere stays a text
    known = _Rows(task, tokenizer)
    scorer = Scorer(task.reward, scoring)
    scores: dict[int, Score] = {}
    try:
        for some in _slices(recording.groups):
            prompts = [known.with_row(recording.prompt_of(group, tokenizer), recording.name) for group in some]
            following = scorer.follow(prompts)
            for place, group in enumerate(some):
                following(place, _completions(with_tokens, group))
            for group, found in zip(some, following.result(), strict=True):
                scores |= dict(zip(group.rows, found, strict=True))
    finally:
        scorer.close()
    ordered = [scores[row] for row in range(len(recording.table))]
    failed = [isinstance(score, FailedScore) for score in ordered]
    rewards = [None if isinstance(score, NotYet) else float(score) for score in ordered]
    table = _with_column(recording.table, "reward", rewards)
    table = _with_column(_with_column(table, "failed", failed), "advantage", [None] * len(rewards))
    scored_by = f"{type(task).__module__}.{type(task).__qualname__}"
    facts = _shared(recording.facts) | {"scored_by": scored_by, "reward": type(task.reward).__qualname__}
    write_recording(table, facts, out)
    return Rescored(
        num_completions=len(rewards),
        num_failed=sum(failed),
        num_waiting=rewards.count(None),
        before=_mean(recording.table["reward"].to_pylist()),
        after=_mean(rewards),
    )


class _Rows:
    """The rows of a task by their prompts, for recorded prompts that came without what the reward reads."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.task = task
        self.tokenizer = tokenizer

    def with_row(self, prompt: Prompt, name: str) -> Prompt:
        wanted = self.task.reward.required_fields()
        if not wanted <= set(prompt.row) and prompt.text in self._by_prompt:
            prompt = dataclasses.replace(prompt, row=self._by_prompt[prompt.text])
        if missing := sorted(wanted - set(prompt.row)):
            raise ValueError(
                f"the reward reads {missing}, but the recorded row of prompt {prompt.text[:60]!r} in {name} has only "
                f"{sorted(prompt.row)}, and the task has no such prompt"
            )
        try:
            self.task.reward.check_row(prompt.row)
        except ValueError as error:
            raise ValueError(f"no answer to {prompt.text[:60]!r} could be scored: {error}") from error
        return prompt

    @cached_property
    def _by_prompt(self) -> dict[str, Mapping[str, Any]]:
        rows = [row for split in ("validation", "train") for row in self.task.rows(split)]
        return {self.task.template.render(row, self.tokenizer)[0]: row for row in rows}


def _slices(groups: list[RecordedGroup]) -> Iterator[list[RecordedGroup]]:
    for first in range(0, len(groups), _GROUPS_AT_A_TIME):
        yield groups[first : first + _GROUPS_AT_A_TIME]


def _completions(table: pa.Table, group: RecordedGroup) -> list[Completion]:
    return [
        Completion(
            token_ids=one["token_ids"],
            logprobs=one["logprobs"] or [],
            text=one["completion"],
            finish_reason=one["finish_reason"],
            behaviour_step=RECORDED,
        )
        for one in table.take(group.rows).to_pylist()
    ]


def _with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def _shared(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all files say alike."""
    first, *others = facts or [{}]
    return {name: value for name, value in first.items() if all(fact.get(name) == value for fact in others)}


def _mean(rewards: list[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
