"""Tasks made on the spot, for demonstrations and tests: no data, no network, and answers that are surely right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

from lgrpo.rewards import BatchReward, ExactMatch
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.template import Template


def _held_out(rows: list[dict[str, Any]], num_held_out: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows in a seeded order, the first ones kept for validation."""
    if not 0 < num_held_out < len(rows):
        raise ValueError(
            f"num_held_out is {num_held_out}; of {len(rows)} problems, some must train and some be held out"
        )
    random.Random(seed).shuffle(rows)
    return {"validation": rows[:num_held_out], "train": rows[num_held_out:]}


@final
class SortDigits(Task):
    """Write the digits of a number in ascending order: ``4821>`` wants ``1248``."""

    def __init__(
        self,
        num_digits: int = 4,
        num_held_out: int = 256,
        seed: int = 0,
        template: Template = Template(prompt="{question}>"),  # noqa: B008
        reward: BatchReward = ExactMatch(),  # noqa: B008
    ) -> None:
        """
        Args:
            num_digits: Digits of each number, 2 to 6.
            num_held_out: Numbers kept for validation.
            seed: Chooses which ones.
            template: How a prompt is written.
            reward: How an answer is scored.
        """
        super().__init__(template, reward)
        if not 2 <= num_digits <= 6:
            raise ValueError(f"num_digits is {num_digits}; it goes from 2 to 6")
        numbers = (f"{n:0{num_digits}d}" for n in range(10**num_digits))
        rows = [{"question": n, "answer": (a := "".join(sorted(n))), "solution": a} for n in numbers]
        self._rows = _held_out(rows, num_held_out, seed)

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return self._rows[split]


@final
class Arithmetic(Task):
    """Work out a sum, a difference or a product of two numbers: ``12+34=`` wants ``46``."""

    def __init__(
        self,
        num_digits: int = 2,
        operations: list[Literal["+", "-", "*"]] | None = None,
        num_held_out: int = 256,
        seed: int = 0,
        template: Template = Template(prompt="{question}="),  # noqa: B008
        reward: BatchReward = ExactMatch(),  # noqa: B008
    ) -> None:
        """
        Args:
            num_digits: Most digits of each number, 1 to 3.
            operations: Which ones; by default sums only.
            num_held_out: Problems kept for validation.
            seed: Chooses which ones.
            template: How a prompt is written.
            reward: How an answer is scored.
        """
        super().__init__(template, reward)
        if not 1 <= num_digits <= 3:
            raise ValueError(f"num_digits is {num_digits}; it goes from 1 to 3")
        results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
        numbers = range(10**num_digits)
        rows = [
            {"question": f"{a}{op}{b}", "answer": (r := str(results[op](a, b))), "solution": r}
            for op in operations or ["+"]
            for a in numbers
            for b in numbers
        ]
        self._rows = _held_out(rows, num_held_out, seed)

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return self._rows[split]
