"""A task whose training set is the prompts of recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.recordings.recording import Recording
from lgrpo.rewards import BatchReward, Score, WrappedReward
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import Row
from lgrpo.tasks.template import Template
from lgrpo.types import Completion, Prompt

_TEXT = "recorded_prompt"


@final
class RecordedPrompts(Task):
    """The prompts of a recording as training set, each once in a pass; the rest is another task's."""

    def __init__(self, path: str | list[str], task: Task, min_completions: int = 1) -> None:
        """
        Args:
            path: Recording, as for ``ReplayEngine``.
            task: Task with the validation set, and the reward of completions without a recorded one.
            min_completions: Lowest number of recorded completions of a prompt; others are left out.
        """
        check_count("data.task.min_completions", min_completions, at_least=1)
        super().__init__(task.template, _RecordedReward(task.reward))
        self.path = path
        self.task = task
        self.environment = task.environment
        self.min_completions = min_completions

    @property
    def template(self) -> Template:
        return _RecordedTemplate(self.task.template, self._first_rows)

    def rows(self, split: Split) -> Sequence[Row]:
        return self._rows if split == "train" else self.task.rows(split)

    def locations(self, split: Split) -> Sequence[str] | None:
        return None if split == "train" else self.task.locations(split)

    def final_answer(self, text: str) -> str | None:
        return self.task.final_answer(text)

    @cached_property
    def _recording(self) -> Recording:
        return Recording.read(self.path)

    @cached_property
    def _first_rows(self) -> dict[str, dict[str, Any]]:
        """First recorded row of every prompt, in the order of the files."""
        counts: dict[str, int] = {}
        first: dict[str, int] = {}
        for group in self._recording.groups:
            counts[group.prompt] = counts.get(group.prompt, 0) + len(group.rows)
            first.setdefault(group.prompt, group.rows[0])
        kept = [row for prompt, row in first.items() if counts[prompt] >= self.min_completions]
        if not kept:
            raise ValueError(
                f"no prompt in {self._recording.name} has {self.min_completions} recorded completions "
                f"(task.min_completions); the most is {max(counts.values())}"
            )
        rows = self._recording.table.select(["prompt", "prompt_token_ids", "row"]).take(kept).to_pylist()
        return {row["prompt"]: row for row in rows}

    @cached_property
    def _rows(self) -> list[Row]:
        return [{**self._recording.row_of(row), _TEXT: prompt} for prompt, row in self._first_rows.items()]


class _RecordedReward(WrappedReward):
    """The other task's reward, which requires fields of a recorded row only when it scores a completion of it."""

    def required_fields(self) -> set[str]:
        return set()

    def check_row(self, row: Mapping[str, Any]) -> None:
        missing = sorted(self.reward.required_fields() - set(row))
        if _TEXT in row and missing:
            return
        if missing:
            raise ValueError(f"the reward reads {missing}, but the row has only {sorted(row)}")
        self.reward.check_row(row)

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return _RecordedReward(self.reward.map_leaves(change))

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[Score]:
        required = self.reward.required_fields()
        for prompt in prompts:
            if missing := sorted(required - set(prompt.row)):
                raise ValueError(
                    f"the reward reads {missing}, but the recorded prompt {prompt.text[:60]!r} has only "
                    f"{sorted(set(prompt.row) - {_TEXT})}, so no new completion of it can be scored: add the fields to "
                    "the recording, or train on recorded rewards only"
                )
        return self.reward(prompts, completions)


class _RecordedTemplate(Template):
    """Recorded prompts with their recorded tokens; rows of the other task with its template."""

    def __init__(self, template: Template, recorded: Mapping[str, Mapping[str, Any]]) -> None:
        self.inner = template
        self.recorded = recorded

    def fields(self) -> set[str]:
        return set()

    def render(
        self,
        row: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        max_characters: float = math.inf,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[str, list[int] | None]:
        if _TEXT not in row:
            return self.inner.render(row, tokenizer, max_characters, tools)
        text = row[_TEXT]
        if token_ids := self.recorded[text]["prompt_token_ids"]:
            return text, token_ids
        return text, None if len(text) > max_characters else tokenizer(text).input_ids

    def chat_arguments(self, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
        return self.inner.chat_arguments(tools)

    def text(
        self, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        return row[_TEXT] if _TEXT in row else self.inner.text(row, tokenizer, tools)
