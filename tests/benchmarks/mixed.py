"""A task of mixed difficulty for the study on curricula: sort two to six digits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, final

from lgrpo.rewards import ExactMatch
from lgrpo.tasks import Split, Task, Template

LENGTHS = range(2, 7)
NUM_TRAIN, NUM_HELD_OUT = 256, 32
"""Largest number of training problems of each length, and number of held-out ones."""


@final
class SortMixed(Task):
    """Write the digits of a number in ascending order; equally many numbers of every length."""

    def __init__(self) -> None:
        super().__init__(Template(prompt="{question}>"), ExactMatch())
        self._rows: dict[Split, list[dict[str, Any]]] = {"train": [], "validation": []}
        for length in LENGTHS:
            count = min(NUM_TRAIN + NUM_HELD_OUT, 10**length)
            numbers = random.Random(length).sample(range(10**length), count)
            rows = [_row(f"{number:0{length}d}") for number in numbers]
            self._rows["validation"] += rows[:NUM_HELD_OUT]
            self._rows["train"] += rows[NUM_HELD_OUT:]

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return self._rows[split]


def _row(question: str) -> dict[str, Any]:
    answer = "".join(sorted(question))
    return {"question": question, "answer": answer, "solution": answer, "level": len(question)}
