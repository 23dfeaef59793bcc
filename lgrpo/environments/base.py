"""Base class of environments, with which a model interacts over several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat: an object with ``role`` and ``content``."""
Observation: TypeAlias = str | Sequence[Message]
"""Text for the model: as plain text, the message of a user in a chat, or messages of a chat."""


class TurnError(NamedTuple):
    """Mistake of a model in its text, such as a tool call that cannot be read. The model sees it as an observation."""

    kind: str
    """Short name by which errors are counted, such as ``unknown_tool``."""
    text: str
    """Description of this error, for the model and the user."""


class Turn(NamedTuple):
    """Answer of an environment to the text of a model."""

    observation: Observation = ""
    """Text that the model sees next. Not shown if the episode is over."""
    reward: float = 0.0
    """Reward of this turn; the reward of an episode is the sum over its turns."""
    done: bool = False
    """Whether the episode is over."""
    errors: Sequence[TurnError] = ()
    """Errors in the model's text, for the user: counted by kind, with an example each."""


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
    Turn(observation='You said bye.', reward=1.0, done=True, errors=())
    """

    keeps_special_tokens: bool = False
    """Whether ``step`` receives the text with its special tokens, apart from the token that ends a turn."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> Observation | Awaitable[Observation | None] | None:
        """Begin an episode, and return its first observation; None if the prompt of the task is all the model needs."""

    @abstractmethod
    def step(self, text: str) -> Turn | Awaitable[Turn]:
        """Answer a text of the model. Stop strings are removed, and special tokens unless ``keeps_special_tokens``."""

    def truncate(self) -> float | Awaitable[float]:
        """Return the last reward of an episode that a limit ends after an answer that was not ``done``; 0 by default.

        Called instead of the next ``step``, once at most.
        """
        return 0.0

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, for the argument ``tools`` of a chat template; no tools by default."""
        return []

    def use_chat_template(self, chat_template: str | None) -> None:  # noqa: B027
        """Receive the source of the chat template, None if there is none, once before the first episode.

        It determines the format of tool calls. It is ignored by default.
        """
