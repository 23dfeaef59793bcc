"""Task over the generators of reasoning-gym, which make any number of problems and score answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from lgrpo.checks import check_count
from lgrpo.rewards import BatchReward
from lgrpo.rewards.reasoning_gym import ReasoningGymScore, generator
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import Row
from lgrpo.tasks.template import Template

_SEED_OFFSET = 2**30
"""Distance between the seeds of the two sets. A generator makes problem i from seed + i: near seeds share problems."""

UNSTABLE = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note")
"""Generators that iterate over a set of strings, whose order differs between Python processes."""


@final
class ReasoningGym(Task):
    """Problems of a generator of reasoning-gym, with its fields ``question``, ``answer`` and ``metadata``."""

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        num_train: int = 10_000,
        num_validation: int = 256,
        seed: int = 0,
        template: Template = Template(  # noqa: B008
            prompt="{question}\n\nThink step by step, then write the final answer between <answer> and </answer>.\n",
            example_answer="<answer>{answer}</answer>",
        ),
        reward: BatchReward | None = None,
    ) -> None:
        """
        Args:
            name: Name of the generator.
            config: Settings of the generator, without seed and size. ``composite`` has ``datasets``: name, weight,
                config.
            num_train: Number of problems to train on. None of them is in the validation set.
            num_validation: Number of problems to validate on.
            seed: Seed of the problems.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion; the default is the generator's score.
        """
        check_count("num_train", num_train, at_least=1)
        check_count("num_validation", num_validation, at_least=0)
        if name in UNSTABLE and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise ValueError(
                f"reasoning-gym's {name!r} makes different problems in every process: set PYTHONHASHSEED=0 before the "
                "run, so that all ranks and resumed runs have the same problems"
            )
        super().__init__(template, reward or ReasoningGymScore(name, config))
        generator(name, config, seed=seed, size=1)  # check name and settings now, not at the first row
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
        made = generator(self.name, self.config, seed=self.seed + _SEED_OFFSET, size=self.num_validation)
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
            f"{self.num_train}: lower num_validation, or change config to allow more problems"
        )
