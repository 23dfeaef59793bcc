"""Base class of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from lgrpo.environments import Environment
from lgrpo.rewards import BatchReward, as_reward
from lgrpo.tasks.rows import Row, RowStream
from lgrpo.tasks.template import Template

Split = Literal["train", "validation"]


class Task(ABC):
    """Rows of data, a template that turns them into prompts, and a reward that scores completions."""

    environment: Environment | None = None
    """Environment that answers each turn of an episode; None if completions have one turn."""

    def __init__(self, template: Template, reward: BatchReward) -> None:
        self._template = template
        self.reward = as_reward(reward)

    @property
    def template(self) -> Template:
        """Template that turns a row into a prompt."""
        return self._template

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split, in a fixed order; an empty list if there is no validation set.

        A warm start trains on the field ``solution`` if the rows have one.
        """

    def locations(self, split: Split) -> Sequence[str] | None:
        """Return where each row is in the data (``train.jsonl, line 7``), for messages; None if unknown."""
        return None

    def train_stream(self) -> RowStream | None:
        """Return a stream of training rows that are too many to keep; None if ``rows`` has them."""
        return None

    def final_answer(self, text: str) -> str | None:
        """Return the final answer of a completion as the reward reads it, or None."""
        return self.reward.final_answer(text)
