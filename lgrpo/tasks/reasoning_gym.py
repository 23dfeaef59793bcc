"""The generators of reasoning-gym: problems without end, with a rule that scores any answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lgrpo.rewards import BatchReward
from lgrpo.rewards.reasoning_gym import ReasoningGymScore, generator
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import Row
from lgrpo.tasks.template import Template

_FAR = 2**30
"""Between the seeds of the two sets: a generator makes problem i from seed + i, so that near seeds share problems."""

UNSTABLE = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note")
"""Generators that go through a set of strings, whose order Python draws anew for every process."""


@final
class ReasoningGym(Task):
    """Problems of one of reasoning-gym's generators: ``question``, ``answer`` and ``metadata`` as it makes them."""

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        num_train: PositiveInt = 10_000,
        num_validation: NonNegativeInt = 256,
        seed: int = 0,
        template: Template = Template(  # noqa: B008
            prompt="{question}\n\nThink step by step, then write the final answer between <answer> and </answer>.\n",
            example_answer="<answer>{answer}</answer>",
        ),
        reward: BatchReward | None = None,
    ) -> None:
        """
        Args:
            name: Of the generator.
            config: Its settings, without seed and size. ``composite`` takes ``datasets``: name, weight, config.
            num_train: Problems to train on. None of them is in the validation set.
            num_validation: Problems to validate on.
            seed: Makes the problems.
            template: How a row becomes a prompt.
            reward: How an answer is scored; by default by the generator's own rule.
        """
        if name in UNSTABLE and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise ValueError(
                f"reasoning-gym's {name!r} makes other problems in every process: set PYTHONHASHSEED=0 before the run, "
                "so that ranks and resumed runs see the same"
            )
        super().__init__(template, reward or ReasoningGymScore(name, config))
        generator(name, config, seed=seed, size=1)  # a wrong name or setting is known now, not when the rows are made
        self.name = name
        self.config = config
        self.num_train = num_train
        self.num_validation = num_validation
        self.seed = seed

    def rows(self, split: Split) -> Sequence[Row]:
        return self._train if split == "train" else self._validation

    @cached_property
    def _validation(self) -> list[Row]:
        if not self.num_validation:
            return []
        made = generator(self.name, self.config, seed=self.seed + _FAR, size=self.num_validation)
        return [made[index] for index in range(self.num_validation)]

    @cached_property
    def _train(self) -> list[Row]:
        questions = {row["question"] for row in self._validation}
        size = 100 + 2 * self.num_train
        made = generator(self.name, self.config, seed=self.seed, size=size)
        rows: list[Row] = []
        for index in range(size):
            row = made[index]
            if row["question"] not in questions:
                rows.append(row)
            if len(rows) == self.num_train:
                return rows
        raise ValueError(
            f"of {size} problems of {self.name!r} only {len(rows)} are not in the validation set, but num_train is "
            f"{self.num_train}: lower num_validation, or set config so that there are more different problems"
        )
