"""Live episodes of an environment: limits, failures, and the checks of what an environment returns."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lgrpo.checks import check_count, check_range, finite_number, printable
from lgrpo.environments.base import Observation, Turn, TurnError
from lgrpo.rewards.base import Failure

Method: TypeAlias = Literal["reset", "step", "truncate"]
"""Methods of an environment that an episode calls."""


@dataclass(kw_only=True, frozen=True)
class EpisodeLimits:
    """Processes that run an environment, and their limits. Every live episode has a process to itself."""

    num_workers: int = 8
    """Number of resets and steps that run at the same time on each rank. An async one counts until it first waits."""
    timeout: float = 10.0
    """Seconds a reset or step may take before its process is killed, which ends the episode."""
    memory_gib: float = 2.0
    """Memory that the process of an episode may take in addition to what it starts with."""
    output_mib: float = 16.0
    """Size of what a reset or step prints, of its observation, and of any file it writes."""

    max_live: int = 1024
    """Number of live episodes on each rank; further groups wait. A validation may have thousands."""
    max_idle: int = 256
    """Number of processes without an episode that are kept for later episodes on each rank."""

    def __post_init__(self) -> None:
        check_count("limits.max_live", self.max_live, at_least=1)
        check_count("limits.max_idle", self.max_idle, at_least=0)
        check_count("limits.num_workers", self.num_workers, at_least=1)
        check_range("limits.timeout", self.timeout, above=0)
        check_range("limits.memory_gib", self.memory_gib, above=0)
        check_range("limits.output_mib", self.output_mib, above=0)


class EpisodeFailure(Exception):
    """Failure of an episode: its kind, the method that failed, and the reason as message."""

    def __init__(self, kind: Failure, reason: str, method: Method = "step") -> None:
        super().__init__(reason)
        self.kind: Failure = kind
        self.method: Method = method

    def __reduce__(self) -> tuple[type[EpisodeFailure], tuple[Failure, str, Method]]:
        return EpisodeFailure, (self.kind, str(self), self.method)


class Episodes(ABC):
    """Live episodes of an environment, each with an instance to itself. Thread-safe.

    For each episode, call ``reset`` once, ``step`` for each text of the model once the result before it is known, and
    ``end`` at last, in any case. The futures raise an ``EpisodeFailure`` if the episode has failed; all later steps
    raise it again. Any other error of a future concerns all episodes. Callbacks of futures must return quickly: others
    wait for them.
    """

    @abstractmethod
    def reset(self, episode: Hashable, row: Mapping[str, Any]) -> Future[Observation | None]:
        """Begin an episode. The result is its first observation; None if there is none."""

    @abstractmethod
    def step(self, episode: Hashable, text: str) -> Future[Turn]:
        """Answer a text of the model."""

    @abstractmethod
    def truncate(self, episode: Hashable) -> Future[float]:
        """Return the last reward of an episode that a limit ends. Called instead of ``step``, once at most."""

    @abstractmethod
    def end(self, episode: Hashable) -> None:
        """Free the instance of an episode without waiting. A call that has no result yet is cancelled."""

    @abstractmethod
    def close(self) -> None:
        """End all episodes, and the threads or processes that run them. The next ``reset`` starts them again."""


def checked(name: str, method: Method, value: object) -> Any:
    """Return a valid result of an environment; raise a ``ValueError`` that names the environment otherwise.

    >>> checked("Maze", "step", Turn("a wall", 1))
    Turn(observation='a wall', reward=1.0, done=False, errors=[])
    >>> checked("Maze", "step", "a wall")
    Traceback (most recent call last):
    ValueError: Maze.step returned 'a wall'; it must return a Turn

    Args:
        name: Name of the environment's class.
        method: Method that returned the value.
        value: Returned value.
    """
    returned = f"{name}.{method} returned"
    if method == "reset":
        return None if value is None else _checked_observation(returned, value)
    if method == "truncate":
        return _checked_reward(returned, value)
    if not isinstance(value, Turn):
        raise ValueError(f"{returned} {_short(value)}; it must return a Turn")
    return Turn(
        _checked_observation(f"{returned} the observation", value.observation),
        _checked_reward(f"{returned} the reward", value.reward),
        _checked_done(returned, value.done),
        _checked_errors(f"{returned} the errors", value.errors),
    )


def decoded(name: str, method: Method, value: Any) -> Any:
    """Return a valid result of an environment, from JSON; raise a ``ValueError`` or ``TypeError`` otherwise."""
    if method == "step":
        observation, reward, done, errors = value
        value = Turn(observation, reward, done, [TurnError(*error) for error in errors])
    return checked(name, method, value)


def _checked_observation(subject: str, value: object) -> Observation:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence) and all(_is_message(message) for message in value):
        try:
            messages: list[dict[str, Any]] = json.loads(json.dumps([dict(message) for message in value]))
            return messages
        except (TypeError, ValueError) as error:
            raise ValueError(f"{subject} {_short(value)}, which JSON cannot express: {error}") from error
    raise ValueError(f"{subject} {_short(value)}; it must be a string or a list of messages with role and content")


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list | tuple) else []
    return isinstance(content, str | list | tuple) and all(isinstance(part, Mapping) for part in parts)


def _checked_reward(subject: str, value: object) -> float:
    number = finite_number(value)
    if number is None:
        raise ValueError(f"{subject} {_short(printable(value))}; it must be a finite number")
    return number


def _checked_done(subject: str, value: object) -> bool:
    if not isinstance(value, bool) and type(value).__name__ in ("bool", "bool_"):  # of NumPy
        value = bool(value)
    if not isinstance(value, bool):
        raise ValueError(f"{subject} {_short(value)} as done; it must be True or False")
    return value


def _checked_errors(subject: str, value: object) -> list[TurnError]:
    is_list = isinstance(value, Sequence) and all(isinstance(error, TurnError) for error in value)
    if not is_list or not all(isinstance(part, str) for error in value for part in error):  # type: ignore[attr-defined]
        raise ValueError(f"{subject} {_short(value)}; they must be a list of TurnError, each with kind and text")
    return list(value)  # type: ignore[call-overload]


def _short(value: object) -> str:
    """Return the beginning of a value's ``repr``, on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"an instance of {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def succeed(future: Future[Any], value: object) -> None:
    """Set the result of a future, unless its caller has cancelled it."""
    with suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[Any], error: BaseException) -> None:
    """Set the exception of a future, unless its caller has cancelled it."""
    with suppress(InvalidStateError):
        future.set_exception(error)
