"""Base classes of rewards, and the check of the scores they return."""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, final

from lgrpo.checks import finite_number, printable
from lgrpo.types import Completion, Prompt


class NotYet(enum.Enum):
    """Type of ``NOT_YET``."""

    NOT_YET = "not yet"


NOT_YET = NotYet.NOT_YET
"""Returned by a reward whose score comes later: the group waits and is scored again before each rollout."""

_T = TypeVar("_T")
Score: TypeAlias = float | NotYet
Parts: TypeAlias = tuple[tuple[float, float], ...]
"""Scores and their weights."""
Failure: TypeAlias = Literal["timeouts", "crashes", "memory", "output", "errors"]
"""Kinds of scoring failures: too slow, worker ended, too much memory, too much output, exception."""


Notes: TypeAlias = dict[str, Any]
"""Notes of a reward about a score: plain JSON of at most ``MAX_NOTES`` characters."""
MAX_NOTES = 2**16


@final
class NotedScore(float):
    """A score with notes, such as a judge's verdict, which recordings and the table of completions show."""

    notes: Notes

    def __new__(cls, value: float, notes: Mapping[str, Any]) -> NotedScore:
        score = super().__new__(cls, value)
        score.notes = _plain(notes)
        return score

    def __getnewargs__(self) -> tuple[float, Notes]:  # type: ignore[override]
        """Return the arguments of ``__new__``, for copies: recorded scores are sent to workers."""
        return float(self), self.notes


class NotedError(RuntimeError):
    """Reason why a completion cannot be scored, with notes as those of a ``NotedScore``."""

    def __init__(self, message: str, notes: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.notes: Notes | None = None if notes is None else _plain(notes)


def _plain(notes: Mapping[str, Any]) -> Notes:
    """Return notes as plain containers, which checkpoints need, unless they are too long.

    Numbers that are not finite become None: JSON has none, and other programs would not read the files.
    """
    text = json.dumps(dict(notes), default=str)
    if len(text) > MAX_NOTES:
        return {"dropped": f"{len(text)} characters of notes"}
    plain: Notes = json.loads(text, parse_constant=lambda name: None)
    return plain


@final
class FailedScore(float):
    """Score of a completion whose scoring failed, with the kind of failure and the reason."""

    kind: Failure
    why: str
    notes: Notes | None
    parts: Parts = ()
    """Parts of a sum; none if it is not one."""
    is_reported: bool = False
    """Whether the user has been warned of it already."""

    def __new__(cls, value: float, kind: Failure, why: str, notes: Notes | None = None) -> FailedScore:
        score = super().__new__(cls, value)
        score.kind, score.why, score.notes = kind, why, notes
        return score

    def __getnewargs__(self) -> tuple[float, Failure, str]:  # type: ignore[override]
        """Return the arguments of ``__new__``, for copies, which get the other attributes afterwards."""
        return float(self), self.kind, self.why


@final
class SumScore(float):
    """Sum of several scores, with each of them and its weight."""

    parts: Parts
    notes: Notes | None
    """Notes of each score that has some, by its name."""

    def __new__(cls, value: float, parts: Parts, notes: Notes | None = None) -> SumScore:
        score = super().__new__(cls, value)
        score.parts, score.notes = parts, notes
        return score

    def __getnewargs__(self) -> tuple[float, Parts]:  # type: ignore[override]
        """Return the arguments of ``__new__``, for copies, which get the other attributes afterwards."""
        return float(self), self.parts


def notes_of(score: Score) -> Notes | None:
    """Return the notes of a score; None if it has none."""
    return score.notes if isinstance(score, NotedScore | FailedScore | SumScore) else None


class BatchReward(ABC):
    """Scores the completions of one prompt together."""

    is_inline = False
    """Whether it runs in the trainer's process, for rewards that always return quickly; others run in workers."""

    @abstractmethod
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[Score]:
        """Return a finite number or ``NOT_YET`` for each completion; ``prompts[i]`` belongs to ``completions[i]``."""

    @property
    def can_fail(self) -> bool:
        """Whether scoring may fail, which metrics count; that of rewards in workers may."""
        return not self.is_inline

    @property
    def turn_weight(self) -> float:
        """Weight of the environment's rewards of turns in it; 0 if it does not contain them."""
        return 0.0

    def required_fields(self) -> set[str]:
        """Return the fields of a dataset row this reward reads; they are checked before the run starts."""
        return set()

    def check_row(self, row: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise a ``ValueError`` if the row's answer is unusable. Called for every row before the run starts."""

    def final_answer(self, text: str) -> str | None:
        """Return the final answer of a completion, normalised so that equal answers are equal strings, for maj@k."""
        return text.strip() or None

    def report(self) -> dict[str, float]:
        """Return metrics (``reward/…``) of the scores since the last report; always the same names."""
        return {}

    def observe(self, scores: Sequence[Score]) -> None:  # noqa: B027
        """Take notice of scores that another process computed with it, for ``report``."""

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        """Return a copy with ``change`` applied to every reward it contains, or to itself if it contains none."""
        return change(self)

    def close(self) -> None:  # noqa: B027
        """End the processes it started."""


class Reward(BatchReward):
    """Scores one completion at a time."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.iscoroutinefunction(cls.score):
            raise TypeError(f"{cls.__name__}.score is async, but {cls.__name__} is a Reward: subclass AsyncReward")

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Return a finite number or ``NOT_YET``; for pass@k, a completion is right at 1 or above."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        return [self.score(p, c) for p, c in zip(prompts, completions, strict=True)]


class AsyncReward(BatchReward):
    """Scores completions one by one, many concurrently: for scores that wait, for example for a server."""

    concurrency: int = 64
    """Number of concurrent completions in each worker; a class attribute or an attribute of the instance."""
    max_retries: int = 0
    """Number of further attempts if ``score`` raises; ``scoring.timeout`` applies to all attempts together."""
    retry_delay: float = 0.5
    """Seconds before the second attempt, doubled before each later one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(cls.score) and not inspect.iscoroutinefunction(inspect.unwrap(cls.score)):
            raise TypeError(f"{cls.__name__}.score is not async, but {cls.__name__} is an AsyncReward: write async def")

    @abstractmethod
    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Return a finite number or ``NOT_YET``; for pass@k, a completion is right at 1 or above."""

    async def score_with_retries(self, prompt: Prompt, completion: Completion) -> Score:
        """Return the score of the first attempt that does not raise; the last attempt's error otherwise."""
        for attempt in range(self.max_retries):
            try:
                return await self.score(prompt, completion)
            except Exception:
                await asyncio.sleep(self.retry_delay * 2**attempt)
        return await self.score(prompt, completion)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        async def all_scores() -> list[Score]:
            free = asyncio.Semaphore(self.concurrency)

            async def one(prompt: Prompt, completion: Completion) -> Score:
                async with free:
                    return await self.score_with_retries(prompt, completion)

            with _cancellable(self):
                return await asyncio.gather(*(one(p, c) for p, c in zip(prompts, completions, strict=True)))

        return run_anywhere(all_scores())

    def close(self) -> None:
        """Cancel the scores that other threads wait for."""
        for cancel in list(_CANCEL.get(id(self), ())):
            with suppress(RuntimeError):  # its event loop has ended meanwhile
                cancel()


class WrappedReward(BatchReward):
    """Reward around another one, to which it delegates every method by default."""

    def __init__(self, reward: BatchReward) -> None:
        from lgrpo.rewards.function import as_reward  # which imports this module

        self.reward = as_reward(reward)

    @property
    def is_inline(self) -> bool:  # type: ignore[override]
        return self.reward.is_inline

    @property
    def can_fail(self) -> bool:
        return self.reward.can_fail

    @property
    def turn_weight(self) -> float:
        return self.reward.turn_weight

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


_CANCEL: dict[int, set[Callable[[], object]]] = {}
"""Functions that cancel the current calls of a reward, by its id. It has no attribute for them: it is pickled."""


@contextmanager
def _cancellable(reward: AsyncReward) -> Iterator[None]:
    """Let ``reward.close``, in another thread, cancel the current task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel = partial(loop.call_soon_threadsafe, task.cancel)
    own = _CANCEL.setdefault(id(reward), set())
    own.add(cancel)
    try:
        yield
    finally:
        own.discard(cancel)


def run_anywhere(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine, even if an event loop is already running, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def combined(value: float, parts: Sequence[Score]) -> Score:
    """Return ``value``, computed from several scores: ``NOT_YET`` or failed if one of them is; the first notes stay."""
    if any(part is NOT_YET for part in parts):
        return NOT_YET
    notes = next((own for part in parts if (own := notes_of(part)) is not None), None)
    failed = [part for part in parts if isinstance(part, FailedScore)]
    if failed:
        return FailedScore(value, failed[0].kind, failed[0].why, notes)
    return value if notes is None else NotedScore(value, notes)


def checked_rewards(reward: BatchReward, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
    """Return the reward's scores; raise a ``ValueError`` unless there is one valid score for each completion."""
    name = type(reward).__name__
    values = list(reward(prompts, completions))
    if len(values) != len(completions):
        raise ValueError(f"{name} returned {len(values)} rewards for {len(completions)} completions")
    return [
        checked_score(name, value, prompt, completion)
        for value, prompt, completion in zip(values, prompts, completions, strict=True)
    ]


def checked_score(name: str, value: object, prompt: Prompt, completion: Completion) -> Score:
    """Return a valid score; raise a ``ValueError`` that names the reward and the completion otherwise."""
    if value is NOT_YET or isinstance(value, FailedScore):
        return value
    number = finite_number(value)
    if number is None:
        raise ValueError(
            f"{name} returned {printable(value)!r}, not a finite number, for completion {completion.text[:200]!r} of "
            f"prompt {prompt.text[:200]!r}"
        )
    return value if isinstance(value, SumScore | NotedScore) else number
