"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from lgrpo.rewards import BatchReward
from lgrpo.tasks.rows import Row, RowStream
from lgrpo.tasks.template import Template

Split = Literal["train", "validation"]


class Task(ABC):
    """Rows of data, a template that makes prompts of them, a reward that scores the answers and reads the final one."""

    def __init__(self, template: Template, reward: BatchReward) -> None:
        self._template = template
        self.reward = reward

    @property
    def template(self) -> Template:
        """How a row becomes a prompt."""
        return self._template

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Row]:
        """The rows of a split, in a fixed order. A field ``solution``, where there is one, serves a warm start.

        There may be none to validate on; a set that is there and empty is an error.
        """

    def places(self, split: Split) -> Sequence[str] | None:
        """Where each of the rows stands in the data, in words, for messages; None where that says nothing."""
        return None

    def train_stream(self) -> RowStream | None:
        """The training rows one by one, where there are too many to keep; None: ``rows`` has them."""
        return None

    def final_answer(self, text: str) -> str | None:
        """The answer a completion ends in, as the reward reads it; None where there is none."""
        return self.reward.final_answer(text)
