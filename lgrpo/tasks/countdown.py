"""Countdown: write an equation of given numbers that equals a target."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any, final

from lgrpo.checks import check_count
from lgrpo.rewards import BatchReward, CountdownEquation
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.dataset import RowTask
from lgrpo.tasks.rows import Row, kind_of
from lgrpo.tasks.source import Data
from lgrpo.tasks.template import Template

_TAGGED = Template(
    prompt=(
        "Write an equation with the numbers {nums} that comes to {target}. Use each number once, and +, -, * and / as "
        "often as needed. Think step by step, then write the equation between <answer> and </answer>.\n"
    ),
    example_answer="<answer> {solution} </answer>",
)
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@final
class Countdown(RowTask):
    """Countdown problems of TinyZero, with the fields ``nums`` and ``target``."""

    def __init__(
        self,
        train: Data | None = "Jiayi-Pan/Countdown-Tasks-3to4",
        validation: Data | None = None,
        validation_split: str | None = None,
        num_held_out: int = 1024,
        streaming: bool = False,
        template: Template = _TAGGED,
        reward: BatchReward = CountdownEquation(),  # noqa: B008
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; the default is rows held out of ``train``.
            validation_split: Split of a hub dataset or folder to validate on; the default dataset has none.
            num_held_out: Number of training rows, chosen by the seed, to validate on if there is no other validation
                set and the training set is not a stream.
            streaming: Read training rows when they are needed and keep none.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(
            reward,
            train,
            validation,
            validation_split=validation_split,
            template=template,
            num_held_out=0 if streaming or validation is not None or validation_split is not None else num_held_out,
            streaming=streaming,
            **settings,
        )

    def read(self, row: Row, split: Split) -> Row:
        if "nums" in row and not isinstance(row["nums"], list):
            raise ValueError(f"nums is {kind_of(row['nums'])}, not a list of numbers")
        return row


@final
class GeneratedCountdown(Task):
    """Generated Countdown problems. Each has a solution, one of which is the field ``solution``."""

    def __init__(
        self,
        num_train: int = 10_000,
        num_validation: int = 256,
        num_numbers: list[int] | None = None,
        max_number: int = 99,
        min_target: int = 10,
        max_target: int = 99,
        seed: int = 0,
        template: Template = _TAGGED,
        reward: BatchReward = CountdownEquation(),  # noqa: B008
    ) -> None:
        """
        Args:
            num_train: Number of problems to train on.
            num_validation: Number of other problems to validate on.
            num_numbers: Possible counts of numbers in a problem; the default is 3 and 4.
            max_number: Largest number; the smallest is 1.
            min_target: Smallest target.
            max_target: Largest target.
            seed: Seed of the problems.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion.
        """
        super().__init__(template, reward)
        check_count("num_train", num_train, at_least=1)
        check_count("num_validation", num_validation, at_least=0)
        check_count("max_number", max_number, at_least=1)
        counts = [3, 4] if num_numbers is None else num_numbers
        if not counts or not all(2 <= count <= 6 for count in counts):
            raise ValueError(f"num_numbers is {counts}; a problem must have 2 to 6 numbers")
        if min_target > max_target:
            raise ValueError(f"min_target is {min_target}, above max_target, which is {max_target}")
        rng, num_problems = random.Random(seed), num_train + num_validation
        problems: dict[tuple[int, ...], Row] = {}
        for _ in range(1000 + 100 * num_problems):
            if len(problems) == num_problems:
                break
            nums = [rng.randint(1, max_number) for _ in range(rng.choice(counts))]
            target, solution = _random_equation(nums, rng)
            if min_target <= target <= max_target:
                question = f"Make {target} of {nums}."
                row = {"question": question, "nums": nums, "target": target, "solution": solution}
                problems.setdefault((target, *sorted(nums)), row)
        if len(problems) < num_problems:
            raise ValueError(f"there are too few different problems with these numbers and targets: {len(problems)}")
        rows = list(problems.values())
        self._rows: dict[Split, list[Row]] = {"validation": rows[:num_validation], "train": rows[num_validation:]}

    def rows(self, split: Split) -> Sequence[Row]:
        return self._rows[split]


def _random_equation(nums: Sequence[int], rng: random.Random) -> tuple[int, str]:
    """Return the value of a random equation of all numbers, with integer intermediate values, and the equation."""
    parts = [(number, str(number)) for number in nums]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice([sign for sign in _OPERATIONS if sign != "/" or (b != 0 and a % b == 0)])
        parts.append((_OPERATIONS[sign](a, b), f"({left} {sign} {right})"))
    return parts[0][0], parts[0][1].removeprefix("(").removesuffix(")")
