"""Checks of settings and names, written once so that every message has the same form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any


def check_range(
    name: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    reason: str = "",
) -> None:
    """Raise a ``ValueError`` if a setting is out of range.

    >>> check_range("data.lead", 2, at_least=0)
    >>> check_range("sampling.top_p", 1.5, above=0, at_most=1)
    Traceback (most recent call last):
    ValueError: sampling.top_p is 1.5; it must be above 0 and at most 1

    Args:
        name: Setting as the user writes it.
        value: Value seen; None, a setting that is not set, passes.
        at_least: Lower bound, allowed.
        above: Lower bound, not allowed.
        at_most: Upper bound, allowed.
        below: Upper bound, not allowed.
        reason: Why, or what to do instead; appended to the message.
    """
    if value is None:
        return
    bounds = [
        (at_least, "at least", lambda bound: value >= bound),
        (above, "above", lambda bound: value > bound),
        (at_most, "at most", lambda bound: value <= bound),
        (below, "below", lambda bound: value < bound),
    ]
    required = [(f"{word} {bound:g}", holds(bound)) for bound, word, holds in bounds if bound is not None]
    if not all(is_met for _, is_met in required):
        range_ = " and ".join(text for text, _ in required)
        raise ValueError(f"{name} is {value}; it must be {range_}{f': {reason}' if reason else ''}")


def check_count(name: str, value: int | None, **bounds: Any) -> None:
    """Raise a ``ValueError`` if a setting is not an integer, or out of range; ``bounds`` as for ``check_range``.

    >>> check_count("data.group_size", 4.0, at_least=2)
    Traceback (most recent call last):
    ValueError: data.group_size is 4.0; it must be an integer
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    check_range(name, value, **bounds)


def check_instance(name: str, value: object, kind: type, example: str) -> None:
    """Raise a ``ValueError`` if an argument is not an instance of a class.

    >>> check_instance("policy", "Qwen/Qwen3-0.6B", dict, "a dict")
    Traceback (most recent call last):
    ValueError: policy is 'Qwen/Qwen3-0.6B'; it must be a dict
    """
    if not isinstance(value, kind):
        shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:200]
        raise ValueError(f"{name} is {shown}; it must be {example}")


def check_function(name: str, value: object, example: str) -> None:
    """Raise a ``ValueError`` if an argument that makes an object is not a function; None, not set, passes."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} is an instance of {type(value).__name__}; it must be a function: {example}")


def check_schedule(name: str, value: Any, check: Callable[[str, Any], None]) -> None:
    """Check a setting that is one value, or several by the first rollout for which each holds.

    >>> from functools import partial
    >>> check_schedule("clip_high", {0: 0.2, 50: -1}, partial(check_range, at_least=0))
    Traceback (most recent call last):
    ValueError: clip_high from rollout 50 is -1; it must be at least 0

    Args:
        name: Setting as the user writes it.
        value: Value, or values.
        check: Function that raises an error if the value of a name is wrong.
    """
    if not isinstance(value, dict):
        check(name, value)
        return
    if 0 not in value or any(type(first) is not int or first < 0 for first in value):
        raise ValueError(
            f"{name} is {value}; the keys of a schedule are the first rollouts for which its values hold, and one of "
            f"them is 0: {{0: 1, 20: 5}}"
        )
    for first, own in value.items():
        check(f"{name} from rollout {first}", own)


def finite_number(value: object) -> float | None:
    """Return a value as a float; None if it is not a number, or not in the range of float32.

    >>> finite_number(2), finite_number("2"), finite_number(10**400), finite_number(float("nan"))
    (2.0, None, None, None)
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e38 else None  # false for NaN too


def printable(value: object) -> object:
    """Return a value that can be printed: an integer may have too many digits for that.

    >>> printable(-(10**9000)), printable("a")
    (-inf, 'a')
    """
    if isinstance(value, int) and abs(value) >= 10**300:
        return math.inf if value > 0 else -math.inf
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ": did you mean …?" with the most similar name, or an empty string.

    >>> nearest("val/pas@1", ["val/pass@1", "train/loss"])
    ': did you mean val/pass@1?'
    """
    near = get_close_matches(name, list(names), n=1, cutoff=0.65)
    return f": did you mean {near[0]}?" if near else ""
