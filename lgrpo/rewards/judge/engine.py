"""The interface of judges in the trainer's process, and the answers of all judges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from lgrpo.rewards.base import NotedError
from lgrpo.rewards.judge.templates import Messages


class JudgeError(NotedError):
    """The judge did not answer, or its answer cannot be read."""


class Answer(NamedTuple):
    """A judge's answer to a question."""

    text: str
    is_complete: bool = True
    """Whether it ended by itself, not at ``max_tokens``."""


class JudgeEngine(ABC):
    """A model that answers a judge's questions in the trainer's process."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the model, different for different weights: verdicts are kept by it."""

    @abstractmethod
    def answers(
        self, questions: Sequence[Messages], num_answers: int, temperature: float, max_tokens: int
    ) -> list[list[Answer] | JudgeError]:
        """Return ``num_answers`` answers to each question, or why there are none. Called from any thread.

        The answers to a question depend on nothing else, such as the other questions.
        """

    def close(self) -> None:  # noqa: B027
        """Release memory. The next call of ``answers`` loads the model again."""
