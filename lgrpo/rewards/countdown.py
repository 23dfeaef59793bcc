"""Countdown: an equation out of given numbers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LONGEST = 200


@final
class CountdownEquation(Reward):
    """1 where the answer is an equation of +, -, * and / that uses each given number once and comes to the target.

    The answer is what stands in the last ``<answer>…</answer>``, or else the last line; what follows ``=`` is left out.
    It is parsed, never evaluated as code, in exact fractions.
    """

    is_inline = True

    def __init__(self, numbers_field: str = "nums", target_field: str = "target", partial: float = 0.0) -> None:
        """
        Args:
            numbers_field: Field of the dataset row with the numbers.
            target_field: Field with the target.
            partial: Score of an equation that uses the numbers rightly and misses the target.
        """
        if not 0 <= partial < 1:
            raise ValueError(f"partial is {partial}; it is a score from 0 up to, not including, 1")
        self.numbers_field = numbers_field
        self.target_field = target_field
        self.partial = partial

    def required_fields(self) -> set[str]:
        return {self.numbers_field, self.target_field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        numbers, target = row[self.numbers_field], row[self.target_field]
        try:
            Fraction(str(target)), [int(number) for number in numbers]
        except (ValueError, TypeError) as error:
            raise ValueError(f"numbers {numbers!r} and target {target!r} are no Countdown problem") from error

    def final_answer(self, text: str) -> str | None:
        return final_equation(text) or None

    def score(self, prompt: Prompt, completion: Completion) -> float:
        try:
            value, used = evaluate(final_equation(completion.text))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return 0.0
        if used != Counter(int(number) for number in prompt.row[self.numbers_field]):
            return 0.0
        return 1.0 if value == Fraction(str(prompt.row[self.target_field])) else self.partial


def final_equation(text: str) -> str:
    """The equation an answer ends in.

    >>> final_equation("Let me see. <answer> (53 + 21) - 29 = 45 </answer>")
    '(53 + 21) - 29'
    """
    tagged = _TAGGED.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    answer = tagged[-1] if tagged else (lines[-1] if lines else "")
    return answer.split("=")[0].strip()


def evaluate(expression: str) -> tuple[Fraction, Counter[int]]:
    """The value of an arithmetic expression and the numbers in it.

    >>> evaluate("(53 + 21) - 29")
    (Fraction(45, 1), Counter({53: 1, 21: 1, 29: 1}))
    >>> evaluate("2 ** 9")
    Traceback (most recent call last):
    ValueError: only whole numbers and + - * / are arithmetic here
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an equation of {len(expression)} characters is no equation")
    used: Counter[int] = Counter()

    def walk(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                used[value] += 1
                return Fraction(value)
            case ast.BinOp(left, ast.Add(), right):
                return walk(left) + walk(right)
            case ast.BinOp(left, ast.Sub(), right):
                return walk(left) - walk(right)
            case ast.BinOp(left, ast.Mult(), right):
                return walk(left) * walk(right)
            case ast.BinOp(left, ast.Div(), right):
                return walk(left) / walk(right)
        raise ValueError("only whole numbers and + - * / are arithmetic here")

    return walk(ast.parse(expression, mode="eval").body), used
