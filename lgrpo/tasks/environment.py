"""Task whose completions are episodes of an environment."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, final

from lgrpo.checks import check_count
from lgrpo.environments import Environment, Observation
from lgrpo.rewards import BatchReward, EnvironmentReward
from lgrpo.rewards.base import run_anywhere
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import Row, RowStream
from lgrpo.tasks.template import Template


@final
class EnvironmentTask(Task):
    """Episodes of an environment: one that generates its own rows, such as a game, or any with the rows of a task.

    It needs an ``EnvironmentEngine``, which takes the environment from here. A template that reads ``{observation}``
    shows what ``reset`` returns for the row; ``reset`` then also runs in the trainer's process.
    """

    def __init__(
        self,
        environment: Environment,
        source: Task | None = None,
        num_rows: int = 1024,
        num_held_out: int = 128,
        seed: int = 0,
        template: Template | None = None,
        reward: BatchReward | None = None,
        solution: list[str] | None = None,
    ) -> None:
        """
        Args:
            environment: Environment that answers each turn.
            source: Task with the rows; by default the environment, such as a game, generates them.
            num_rows: Number of generated rows.
            num_held_out: Number of generated rows that are kept for validation.
            seed: Seed of the generated rows.
            template: Template that turns a row into a prompt; by default that of the source, or the field question.
            reward: Reward of an episode; by default that of the source, or the environment's.
            solution: Templates of the policy's turns in an episode, such as ``["{answer}"]``, for a warm start; by
                default the field ``solution`` of the rows.
        """
        generate_rows = getattr(environment, "generate_rows", None)
        if source is None and generate_rows is None:
            raise ValueError(
                f"{type(environment).__name__} does not generate rows: set data.task.source to a task that has them"
            )
        if template is None:
            template = Template(prompt="{question}") if source is None else source.template
        if reward is None:
            reward = EnvironmentReward() if source is None else source.reward
        super().__init__(template, reward)
        self.environment: Environment = environment
        self.source = source
        self.solution = solution
        check_count("num_held_out", num_held_out, above=0, below=num_rows, reason="the number of rows")
        self._rows: dict[str, Sequence[Row]] = {}
        if source is None and generate_rows is not None:
            rows = generate_rows(num_rows, seed)
            held_out = rows[:num_held_out]
            train = [row for row in rows[num_held_out:] if row not in held_out]
            if not train:
                raise ValueError(
                    f"{type(environment).__name__} has only {num_held_out} different rows, which are all held out: "
                    "lower num_held_out, or add levels"
                )
            self._rows = {"validation": held_out, "train": train}

    def rows(self, split: Split) -> Sequence[Row]:
        rows = self._rows[split] if self.source is None else self.source.rows(split)
        if "observation" in self.template.fields():
            rows = [self._with_observation(row) for row in rows]
        return rows if self.solution is None else [self._with_solution(row) for row in rows]

    def locations(self, split: Split) -> Sequence[str] | None:
        return None if self.source is None else self.source.locations(split)

    def train_stream(self) -> RowStream | None:
        return None if self.source is None else self.source.train_stream()

    def final_answer(self, text: str) -> str | None:
        return self.reward.final_answer(text) if self.source is None else self.source.final_answer(text)

    def _with_solution(self, row: Mapping[str, Any]) -> Row:
        try:
            return {**row, "solution": [text.format_map(row) for text in self.solution or ()]}
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(
                f"data.task.solution cannot be filled in ({type(error).__name__}: {error}). It reads fields of the row "
                f"in braces, {', '.join(sorted(row))}; literal braces are doubled"
            ) from error

    def _with_observation(self, row: Mapping[str, Any]) -> Row:
        observation = copy.deepcopy(self.environment).reset(row)  # this one is sent to other processes later
        if inspect.isawaitable(observation):
            observation = run_anywhere(_awaited(observation))
        return {**row, "observation": observation}


async def _awaited(observation: Awaitable[Observation | None]) -> Observation | None:
    return await observation
