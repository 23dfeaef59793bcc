"""The prompts of recorded rollouts as a training set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

from jsonargparse.typing import PositiveInt
from transformers import PreTrainedTokenizerBase

from lgrpo.rewards import BatchReward, Score
from lgrpo.rewards.base import WrappedReward
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.recording import Recording
from lgrpo.tasks.rows import Row
from lgrpo.tasks.template import Template
from lgrpo.types import Completion, Prompt

_TEXT = "recorded_prompt"


@final
class RecordedPrompts(Task):
    """Trains on the very prompts of a recording, each once in a pass; all else is another task's."""

    def __init__(self, path: str | list[str], task: Task, min_completions: PositiveInt = 1) -> None:
        """
        Args:
            path: As for ``ReplayEngine``.
            task: Its reward scores what has no recorded reward, and its validation set is validated on.
            min_completions: Prompts with fewer recorded completions are left out.
        """
        super().__init__(task.template, _OfRecorded(task.reward))
        self.path = path
        self.task = task
        self.min_completions = min_completions

    @property
    def template(self) -> Template:
        return _AsRecorded(self.task.template, self._token_ids)

    def rows(self, split: Split) -> Sequence[Row]:
        return self._rows if split == "train" else self.task.rows(split)

    def places(self, split: Split) -> Sequence[str] | None:
        return None if split == "train" else self.task.places(split)

    def final_answer(self, text: str) -> str | None:
        return self.task.final_answer(text)

    @cached_property
    def _recording(self) -> Recording:
        return Recording.read(self.path)

    @cached_property
    def _first_rows(self) -> dict[str, dict[str, Any]]:
        """Of every prompt the first recorded row, in the order of the files."""
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
        found = self._recording.table.select(["prompt", "prompt_token_ids", "row"]).take(kept).to_pylist()
        return {one["prompt"]: one for one in found}

    @cached_property
    def _rows(self) -> list[Row]:
        return [{**self._recording.row_of(one), _TEXT: prompt} for prompt, one in self._first_rows.items()]

    @cached_property
    def _token_ids(self) -> dict[str, list[int] | None]:
        return {prompt: one["prompt_token_ids"] for prompt, one in self._first_rows.items()}


class _OfRecorded(WrappedReward):
    """The other task's reward. Of a recorded row it wants what it reads only when it is asked to score it."""

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
        return _OfRecorded(self.reward.map_leaves(change))

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[Score]:
        wanted = self.reward.required_fields()
        for prompt in prompts:
            if missing := sorted(wanted - set(prompt.row)):
                raise ValueError(
                    f"the reward reads {missing}, but the recorded prompt {prompt.text[:60]!r} came with "
                    f"{sorted(set(prompt.row) - {_TEXT})} only, so nothing new can be scored for it: add the fields to "
                    "the recording, or train on recorded rewards alone"
                )
        return self.reward(prompts, completions)


class _AsRecorded(Template):
    """Prompts as they were recorded, to the token; rows of the other task by its own template."""

    def __init__(self, template: Template, token_ids: Mapping[str, list[int] | None]) -> None:
        self.inner = template
        self.token_ids = token_ids

    def fields(self) -> set[str]:
        return set()

    def render(self, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
        if _TEXT not in row:
            return self.inner.render(row, tokenizer)
        text = row[_TEXT]
        return text, self.token_ids[text] or tokenizer(text).input_ids
