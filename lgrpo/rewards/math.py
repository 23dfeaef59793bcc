"""Mathematical answers, compared as mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.rewards.match import last_number
from lgrpo.types import Completion, Prompt

_SAME = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\left": "", "\\right": "", "\\!": "", "\\,": "", "$": ""}


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

    def check_row(self, row: Mapping[str, Any]) -> None:
        if not str(row[self.field]).strip():  # whether it is mathematics is seen when it is needed: parsing takes time
            raise ValueError(f"field {self.field!r} of the data is empty")

    def final_answer(self, text: str) -> str | None:
        boxed, number = last_boxed(text), last_number(text)
        if boxed is not None:
            return normal_form(boxed)
        return None if number is None else f"{number:.12g}"

    def score(self, prompt: Prompt, completion: Completion) -> float:
        gold = parse(f"${prompt.row[self.field]}$")
        if not gold:
            raise ValueError(f"field {self.field!r} of the data is no mathematics: {prompt.row[self.field]!r}")
        return float(equal(gold, parse(from_last_box(completion.text))))


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}`` of a text, braces inside it balanced.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, start = 1, start + len("\\boxed{")
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


def from_last_box(text: str) -> str:
    r"""A text from the line on in which its last ``\boxed`` stands; all of it where there is none.

    Of several boxes math-verify would take whichever it can read: an answer that was taken back is not the answer.

    >>> from_last_box("It is \\boxed{3}.\nNo: it is \\boxed{4}.")
    'No: it is \\boxed{4}.'
    """
    box = text.rfind("\\boxed")
    return text if box < 0 else text[text.rfind("\n", 0, box) + 1 :]


def normal_form(answer: str) -> str:
    r"""A LaTeX answer without what does not change it: spaces, sizes, a full stop.

    >>> normal_form(r" \dfrac{1}{2} \,.") == normal_form(r"\frac{1}{2}")
    True
    """
    for same, form in _SAME.items():
        answer = answer.replace(same, form)
    return "".join(answer.split()).rstrip(".")


def parse(text: str) -> list[Any]:
    """What math-verify reads in a text; nothing where it cannot."""
    from math_verify import parse as read

    return read(text, parsing_timeout=None)  # its own alarm works in a main thread only; Isolated has limits of its own


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two parsed answers are one."""
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))
