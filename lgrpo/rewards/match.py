"""Rewards that compare the completion with the answer in the data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][+-]?\d+)?")


@final
class ExactMatch(Reward):
    """1 if the completion, without surrounding white space, is exactly the answer, else 0."""

    is_inline = True

    def __init__(self, field: str = "answer") -> None:
        """
        Args:
            field: Field of the dataset row that holds the answer.
        """
        self.field = field

    def required_fields(self) -> set[str]:
        return {self.field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        answer = row[self.field]
        if not isinstance(answer, str | int):
            raise ValueError(
                f"field {self.field!r} of the data is {answer!r}, and ExactMatch would compare completions with "
                f"{str(answer)!r}: write answers as text or integers, or use NumericMatch"
            )

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.text.strip() == str(prompt.row[self.field]).strip())


@final
class NumericMatch(Reward):
    """1 if the last number in the completion equals the answer, else 0."""

    is_inline = True

    def __init__(self, field: str = "answer", tolerance: float = 1e-6) -> None:
        """
        Args:
            field: Field of the dataset row that holds the answer.
            tolerance: Largest difference that still counts as equal.
        """
        self.field = field
        self.tolerance = tolerance

    def required_fields(self) -> set[str]:
        return {self.field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._gold(row)

    def final_answer(self, text: str) -> str | None:
        found = last_number(text)
        return None if found is None else f"{found:.12g}"

    def score(self, prompt: Prompt, completion: Completion) -> float:
        gold, found = self._gold(prompt.row), last_number(completion.text)
        return float(found is not None and abs(found - gold) <= self.tolerance)

    def _gold(self, row: Mapping[str, Any]) -> float:
        gold = last_number(str(row[self.field]))
        if gold is None:
            raise ValueError(f"field {self.field!r} of the data holds no number: {row[self.field]!r}")
        if math.isinf(gold):
            raise ValueError(
                f"field {self.field!r} of the data holds a number beyond the range of floating point, "
                f"{str(row[self.field])[:40]!r}…, which equals no other: compare it as text (ExactMatch)"
            )
        return gold


def last_number(text: str) -> float | None:
    """Return the last number in a text, which may have thousands separators, or None.

    >>> [last_number(text) for text in ("12 apples cost $1,340.50.", "10-4", "so -4", "1,2", "2e3", ".5", "none")]
    [1340.5, 4.0, -4.0, 2.0, 2000.0, 0.5, None]
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
