"""Mathematical answers, compared as mathematics."""

from __future__ import annotations

from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt


@final
class MathVerify(Reward):
    """1 where ``math-verify`` finds the completion's final answer equal to the one in the data; else 0.

    It reads LaTeX, ``\\boxed{…}`` first, and plain expressions: 1/2, 0.5 and \\frac{1}{2} are one answer.
    """

    def __init__(self, field: str = "answer") -> None:
        """
        Args:
            field: Field of the dataset row that holds the answer.
        """
        try:
            import math_verify
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("MathVerify needs math-verify: pip install 'lgrpo[math]'") from error
        self.field = field
        self._library = math_verify.__name__

    def required_fields(self) -> set[str]:
        return {self.field}

    def score(self, prompt: Prompt, completion: Completion) -> float:
        gold = parse(f"${prompt.row[self.field]}$")
        if not gold:
            raise ValueError(f"field {self.field!r} of the data is no mathematics: {prompt.row[self.field]!r}")
        return float(equal(gold, parse(completion.text)))


def parse(text: str) -> list[Any]:
    """What math-verify reads in a text; nothing where it cannot."""
    from math_verify import parse as read

    return read(text, parsing_timeout=None)  # its own alarm works in a main thread only; Isolated has limits of its own


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two parsed answers are one."""
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))
