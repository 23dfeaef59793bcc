"""Calls of tools, and the base class of their parsers."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lgrpo.environments.base import TurnError

JSON = json.JSONDecoder(strict=False)
"""Decoder that allows line breaks in strings, which models write mostly in code."""
_THOUGHTS = re.compile(r"\s*(?:<think>)?.*?</think>", re.DOTALL)


@dataclass(kw_only=True, frozen=True, slots=True)
class Call:
    """Call of a tool, as a model wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name."""
    positional: tuple[Any, ...] = ()
    """Arguments without names, in Python calls only."""
    are_texts: bool = False
    """Whether the values are texts without quotes, whose types only the tool knows."""
    id: str | None = None
    """Identifier that the message with the result must repeat, in formats that have one."""


class CallParser(ABC):
    """Reader of the tool calls in the text of a model. Subclasses read one format each."""

    @abstractmethod
    def read(self, text: str) -> Iterator[Call | TurnError]:
        """Yield the calls and the errors of a text without thoughts, in their order."""

    def parse(self, text: str) -> list[Call | TurnError]:
        """Return the calls in a text, and an error for each that cannot be read, in their order.

        Text around calls is ignored, and so are thoughts: text up to ``</think>``.
        """
        match = _THOUGHTS.match(text)
        text = text[match.end() :] if match else text
        if (opened := text.find("<think>")) >= 0 and not match:  # the thought is cut off
            text = text[:opened]
        try:
            return list(self.read(text))
        except RecursionError:
            return [malformed("a call is nested too deeply", text)]


def malformed(reason: str, text: str) -> TurnError:
    """Return the error of a call that cannot be read, with the beginning of its text."""
    return TurnError("malformed_call", f"{reason}: {text.strip()[:200]}")


def unreadable(error: Exception, text: str) -> TurnError:
    """Return the error of a call whose JSON cannot be read; positions in the whole text would not help the model."""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return malformed(f"the JSON of a call cannot be read ({reason})", text)
