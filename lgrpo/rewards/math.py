"""Reward that compares mathematical answers by their values."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.rewards.match import last_number
from lgrpo.types import Completion, Prompt

_NORMAL_FORMS = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\left": "", "\\right": "", "\\!": "", "\\,": "", "$": ""}


@final
class MathVerify(Reward):
    """1 if ``math-verify`` finds the completion's final answer equal to the one in the data, else 0.

    It reads LaTeX, ``\\boxed{…}`` first, and plain expressions: 1/2, 0.5 and \\frac{1}{2} are equal.
    """

    def __init__(self, field: str = "answer") -> None:
        """
        Args:
            field: Field of the dataset row that holds the answer.
        """
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError("MathVerify needs math-verify: pip install 'lgrpo[math]'")
        self.field = field

    def required_fields(self) -> set[str]:
        return {self.field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        answer = str(row[self.field])  # parsing every row would take too long
        if not answer.strip():
            raise ValueError(f"field {self.field!r} of the data is empty")
        limit = sys.get_int_max_str_digits()
        if re.search(rf"\d{{{limit + 1},}}", answer):
            raise ValueError(
                f"field {self.field!r} of the data holds a number of more than {limit} digits, which math-verify "
                "cannot read: compare it as text (ExactMatch)"
            )

    def final_answer(self, text: str) -> str | None:
        boxed, number = last_boxed(text), last_number(text)
        if boxed is not None:
            return normal_form(boxed)
        return None if number is None else f"{number:.12g}"

    def score(self, prompt: Prompt, completion: Completion) -> float:
        from math_verify import parse, verify

        # no timeouts: they work in the main thread only, and Isolated has one, too
        gold = parse(f"${prompt.row[self.field]}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"field {self.field!r} of the data is not mathematics: {prompt.row[self.field]!r}")
        answer = parse(from_last_box(completion.text), parsing_timeout=None)
        return float(verify(gold, answer, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}`` of a text, with balanced braces, or None.

    >>> last_boxed(r"so \boxed{3}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, start = 1, start + len("\\boxed{")
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def from_last_box(text: str) -> str:
    r"""Return a text from the line of its last ``\boxed`` on, or all of it if there is none.

    Of several boxes math-verify would take any it can read, even one that the completion corrects later.

    >>> from_last_box("It is \\boxed{3}.\nNo: it is \\boxed{4}.")
    'No: it is \\boxed{4}.'
    """
    box = text.rfind("\\boxed")
    return text if box < 0 else text[text.rfind("\n", 0, box) + 1 :]


def normal_form(answer: str) -> str:
    r"""Remove from a LaTeX answer what does not change its value: spaces, sizes, a full stop.

    >>> normal_form(r" \dfrac{1}{2} \,.") == normal_form(r"\frac{1}{2}")
    True
    """
    for variant, form in _NORMAL_FORMS.items():
        answer = answer.replace(variant, form)
    return "".join(answer.split()).rstrip(".")
