"""What a reward is, and what is accepted from one."""

from __future__ import annotations

import asyncio
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, final

from lgrpo.types import Completion, Prompt


class NotYet(enum.Enum):
    """The type of ``NOT_YET``."""

    NOT_YET = "not yet"


NOT_YET = NotYet.NOT_YET
"""What a reward answers when the score will come later: the group waits, and is asked for again before each rollout."""

Score: TypeAlias = float | NotYet
Failure: TypeAlias = Literal["timeouts", "crashes", "memory", "output", "errors"]
"""How scoring fails: in time, by dying, by taking too much memory, by writing too much, by raising."""


@final
class FailedScore(float):
    """The score of a completion whose scoring failed, how, and why."""

    kind: Failure
    why: str

    def __new__(cls, value: float, kind: Failure, why: str) -> FailedScore:
        score = super().__new__(cls, value)
        score.kind, score.why = kind, why
        return score


class BatchReward(ABC):
    """Scores the completions of a group together: the siblings of one prompt."""

    is_inline = False
    """Whether it is called in the trainer's process. For rewards that surely end, soon; others are given workers."""

    @abstractmethod
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[Score]:
        """One finite number for each completion, or ``NOT_YET``; ``prompts[i]`` is the prompt of ``completions[i]``."""

    def required_fields(self) -> set[str]:
        """Fields of a dataset row this reward reads, checked before the run starts."""
        return set()

    def check_row(self, row: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises ValueError where the row's answer is of no use. Asked for every row before the run starts."""

    def final_answer(self, text: str) -> str | None:
        """The answer a completion ends in, in a form in which equal answers are equal strings. For maj@k."""
        return text.strip() or None

    def report(self) -> dict[str, float]:
        """Means to log (``reward/…``) over what was scored since the last report; always the same names."""
        return {}

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        """This reward, with every reward it is made of changed; where it is made of none, itself changed."""
        return change(self)

    def close(self) -> None:  # noqa: B027
        """Ends what it started."""


class Reward(BatchReward):
    """Scores one completion at a time."""

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """A finite number, or ``NOT_YET``; for pass@k, 1 and more is right."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        return [self.score(p, c) for p, c in zip(prompts, completions, strict=True)]


class AsyncReward(BatchReward):
    """Scores one completion at a time, many at once: for scores that are waited for, as from a server."""

    concurrency: int = 64
    """Completions that may be waited for at once, in each worker."""

    @abstractmethod
    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """A finite number, or ``NOT_YET``; for pass@k, 1 and more is right."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        async def all_scores() -> list[Score]:
            free = asyncio.Semaphore(self.concurrency)

            async def one(prompt: Prompt, completion: Completion) -> Score:
                async with free:
                    return await self.score(prompt, completion)

            return await asyncio.gather(*(one(p, c) for p, c in zip(prompts, completions, strict=True)))

        return run_anywhere(all_scores())


class WrappedReward(BatchReward):
    """A reward around another one. What is not its own business it passes on."""

    def __init__(self, reward: BatchReward) -> None:
        self.reward = reward

    @property
    def is_inline(self) -> bool:  # type: ignore[override]
        return self.reward.is_inline

    def required_fields(self) -> set[str]:
        return self.reward.required_fields()

    def check_row(self, row: Mapping[str, Any]) -> None:
        self.reward.check_row(row)

    def final_answer(self, text: str) -> str | None:
        return self.reward.final_answer(text)

    def report(self) -> dict[str, float]:
        return self.reward.report()

    def close(self) -> None:
        self.reward.close()


def run_anywhere(work: Coroutine[Any, Any, list[Score]]) -> list[Score]:
    """The result of a coroutine, also where an event loop is running already, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def combined(value: float, parts: Sequence[Score]) -> Score:
    """A number made of several scores: late where one of them is late, failed where one of them failed."""
    if any(part is NOT_YET for part in parts):
        return NOT_YET
    failed = [part for part in parts if isinstance(part, FailedScore)]
    return FailedScore(value, failed[0].kind, failed[0].why) if failed else value


def checked_rewards(reward: BatchReward, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
    """The reward's numbers, one for each completion and all of them finite, or an error that names the culprit."""
    name = type(reward).__name__
    values = list(reward(prompts, completions))
    if len(values) != len(completions):
        raise ValueError(f"{name} returned {len(values)} rewards for {len(completions)} completions")
    return [
        checked_score(name, value, prompt, completion)
        for value, prompt, completion in zip(values, prompts, completions, strict=True)
    ]


def checked_score(name: str, value: object, prompt: Prompt, completion: Completion) -> Score:
    """A score, or an error that says whose it is."""
    if value is NOT_YET or isinstance(value, FailedScore):
        return value
    try:
        number = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 1e38:  # what float32 holds; false for NaN too
        raise ValueError(
            f"{name} returned {value!r}, not a finite number, for completion {completion.text[:200]!r} of prompt "
            f"{prompt.text[:200]!r}"
        )
    return number
