"""Base class of environments, with which a model interacts over several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat: an object with ``role`` and ``content``."""
Observation: TypeAlias = str | Sequence[Message]
"""Text for the model: as plain text, the message of a user in a chat, or messages of a chat."""


class Turn(NamedTuple):
    """Answer of an environment to the text of a model."""

    observation: Observation = ""
    """Text that the model sees next. Not shown if the episode is over."""
    reward: float = 0.0
    """Reward of this turn; the reward of an episode is the sum over its turns."""
    done: bool = False
    """Whether the episode is over."""


class Environment(ABC):
    """A partner in a conversation with a model: ``reset`` begins an episode, and ``step`` answers each text.

    An instance holds one episode at a time, and is reused for others. Every episode has an instance to itself, in a
    worker process with limits. ``reset`` must depend only on the row: an interrupted episode begins again.

    >>> class Echo(Environment):
    ...     def reset(self, row):
    ...         return row["question"]
    ...     def step(self, text):
    ...         return Turn(observation=f"You said {text}.", reward=1.0, done="bye" in text)
    >>> environment = Echo()
    >>> environment.reset({"question": "Hello?"})
    'Hello?'
    >>> environment.step("bye")
    Turn(observation='You said bye.', reward=1.0, done=True)
    """

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> Observation | None | Awaitable[Observation | None]:
        """Begin an episode, and return its first observation; None if the prompt of the task is all the model needs."""

    @abstractmethod
    def step(self, text: str) -> Turn | Awaitable[Turn]:
        """Answer a text of the model, without special tokens and stop strings."""
