"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lgrpo.rewards import BatchReward
from lgrpo.tasks.template import Template

Split = Literal["train", "validation"]


class Task(ABC):
    """Rows of data, a template that makes prompts of them, and a reward that scores the answers."""

    def __init__(self, template: Template, reward: BatchReward) -> None:
        self.template = template
        self.reward = reward

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        """The rows of a split, in a fixed order. A field ``solution``, where there is one, serves a warm start."""
