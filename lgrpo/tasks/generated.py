"""Generated tasks for demonstrations and tests, which need no data and no network."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

from lgrpo.checks import check_count
from lgrpo.rewards import BatchReward, ExactMatch
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.template import Template


class _Enumerated(Task):
    """Task whose problems are all known. Some of them, chosen by a seed, are kept for validation."""

    def __init__(
        self, rows: list[dict[str, Any]], num_held_out: int, seed: int, template: Template, reward: BatchReward
    ) -> None:
        super().__init__(template, reward)
        check_count("num_held_out", num_held_out, above=0, below=len(rows), reason="the number of problems")
        random.Random(seed).shuffle(rows)
        self._rows = {"validation": rows[:num_held_out], "train": rows[num_held_out:]}

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return self._rows[split]


@final
class SortDigits(_Enumerated):
    """Write the digits of a number in ascending order: the answer to ``4821>`` is ``1248``."""

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
            num_digits: Number of digits, 2 to 6.
            num_held_out: Number of problems kept for validation.
            seed: Seed that chooses the problems kept for validation.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion.
        """
        check_count("num_digits", num_digits, at_least=2, at_most=6)
        numbers = (f"{n:0{num_digits}d}" for n in range(10**num_digits))
        rows = [{"question": n, "answer": (a := "".join(sorted(n))), "solution": a} for n in numbers]
        super().__init__(rows, num_held_out, seed, template, reward)


@final
class Arithmetic(_Enumerated):
    """Compute a sum, a difference or a product of two numbers: the answer to ``12+34=`` is ``46``."""

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
            num_digits: Largest number of digits of each number, 1 to 3.
            operations: Operations; the default is sums only.
            num_held_out: Number of problems kept for validation.
            seed: Seed that chooses the problems kept for validation.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion.
        """
        check_count("num_digits", num_digits, at_least=1, at_most=3)
        results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
        numbers = range(10**num_digits)
        rows = [
            {"question": f"{a}{op}{b}", "answer": (r := str(results[op](a, b))), "solution": r}
            for op in operations or ["+"]
            for a in numbers
            for b in numbers
        ]
        super().__init__(rows, num_held_out, seed, template, reward)
