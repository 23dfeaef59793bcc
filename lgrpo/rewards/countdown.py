"""Reward for Countdown: an equation of given numbers that reaches a target."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, final

from lgrpo.checks import check_range
from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EXPONENT = re.compile(r"e([+-]?\d+)\s*$", re.IGNORECASE)
_MAX_LENGTH = 200
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@final
class CountdownEquation(Reward):
    """1 if the answer is an equation of +, -, * and / that uses each given number once and equals the target.

    The answer is the content of the last ``<answer>…</answer>``, or else the last line, up to ``=``. It is parsed and
    computed with exact fractions, never executed as code.
    """

    is_inline = True

    def __init__(self, numbers_field: str = "nums", target_field: str = "target", partial: float = 0.0) -> None:
        """
        Args:
            numbers_field: Field of the dataset row with the numbers.
            target_field: Field with the target.
            partial: Score of an equation that uses each number once and misses the target.
        """
        check_range("partial", partial, at_least=0, below=1)
        self.numbers_field = numbers_field
        self.target_field = target_field
        self.partial = partial

    def required_fields(self) -> set[str]:
        return {self.numbers_field, self.target_field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        numbers, target = row[self.numbers_field], row[self.target_field]
        try:
            as_fraction(target), [int(number) for number in numbers]
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"numbers {str(numbers)[:200]} and target {str(target)[:200]} are not a Countdown problem"
            ) from error

    def final_answer(self, text: str) -> str | None:
        return final_equation(text) or None

    def score(self, prompt: Prompt, completion: Completion) -> float:
        try:
            value, used = evaluate(final_equation(completion.text))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return 0.0
        if used != Counter(int(number) for number in prompt.row[self.numbers_field]):
            return 0.0
        return 1.0 if value == as_fraction(prompt.row[self.target_field]) else self.partial


def as_fraction(target: object) -> Fraction:
    """Return a target as an exact number; raise a ``ValueError`` if it is none, or too long to compute with.

    >>> as_fraction("2.5"), as_fraction(1e22)
    (Fraction(5, 2), Fraction(10000000000000000000000, 1))
    """
    text = str(target)
    exponent = _EXPONENT.search(text)
    if len(text) > _MAX_LENGTH or (exponent and abs(int(exponent[1])) > _MAX_LENGTH):
        raise ValueError(f"{text[:40]} is too long")  # the exact value of 1e999999999 would fill the memory
    return Fraction(text)


def final_equation(text: str) -> str:
    """Return the equation at the end of a completion.

    >>> final_equation("Let me see. <answer> (53 + 21) - 29 = 45 </answer>")
    '(53 + 21) - 29'
    """
    tagged = _TAGGED.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    answer = tagged[-1] if tagged else (lines[-1] if lines else "")
    return answer.split("=")[0].strip()


def evaluate(expression: str) -> tuple[Fraction, Counter[int]]:
    """Return the value of an arithmetic expression and the numbers in it.

    >>> evaluate("(53 + 21) - 29")
    (Fraction(45, 1), Counter({53: 1, 21: 1, 29: 1}))
    >>> evaluate("2 ** 9")
    Traceback (most recent call last):
    ValueError: only whole numbers and + - * / are allowed
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the equation has {len(expression)} characters; at most {_MAX_LENGTH} are allowed")
    used: Counter[int] = Counter()

    def walk(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                used[value] += 1
                return Fraction(value)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
                return _OPERATIONS[type(sign)](walk(left), walk(right))
        raise ValueError("only whole numbers and + - * / are allowed")

    return walk(ast.parse(expression, mode="eval").body), used
