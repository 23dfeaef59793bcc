"""Check the arguments of a tool call against the types of the tool."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from lgrpo.checks import nearest
from lgrpo.environments.base import TurnError

_DESCRIBED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


class WrongArguments(Exception):
    """Arguments do not fit a tool; ``error`` says why."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.error = TurnError(kind, text)


def bind_arguments(
    function: Callable[..., Any],
    types_: Mapping[str, Any],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    are_texts: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a call by name, or raise ``WrongArguments``.

    Args:
        function: Tool.
        types_: Types of its arguments.
        positional: Arguments without names, as in Python calls.
        named: Arguments with names.
        are_texts: Whether all values are texts, of which those that are not to be strings are read as JSON.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    if len(positional) > len(parameters):
        text = f"{name} takes {len(parameters)} arguments, but the call has {len(positional)}"
        raise WrongArguments("unknown_argument", text)
    arguments = dict(zip(parameters, positional, strict=False))
    for key, value in named.items():
        if key not in parameters:
            listed = ", ".join(parameters) or "none"
            text = f"{name} has no argument {key!r}{nearest(key, parameters)}; its arguments are: {listed}"
            raise WrongArguments("unknown_argument", text)
        if key in arguments:
            raise WrongArguments("unknown_argument", f"argument {key!r} of {name} is given twice")
        arguments[key] = value
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [key for key in required if key not in arguments]:
        text = f"the call of {name} lacks the argument {', '.join(map(repr, missing))}"
        raise WrongArguments("missing_argument", text)
    return {key: _converted(name, key, value, types_[key], are_texts) for key, value in arguments.items()}


def _converted(name: str, key: str, value: Any, hint: Any, is_text: bool) -> Any:
    try:
        if is_text and isinstance(value, str):
            return from_text(value, hint)
        return convert(value, hint)
    except TypeError as error:
        seen = json.dumps(value, default=repr, ensure_ascii=False)[:200]
        raise WrongArguments("wrong_type", f"argument {key!r} of {name} must be {error}, but it is {seen}") from error


def from_text(value: str, hint: Any) -> Any:
    """Return a value that was written without quotes, or raise a ``TypeError``.

    >>> from_text("75001", str), from_text("75001", int), from_text("[1, 2]", list[int])
    ('75001', 75001, [1, 2])
    """
    try:
        return convert(value, hint)
    except TypeError:
        try:
            read = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except (ValueError, RecursionError):
            raise TypeError(describe(hint)) from None
        return convert(read, hint)


def convert(value: Any, hint: Any) -> Any:
    """Return a value as a type requires it, or raise a ``TypeError`` with a description of the type.

    Integers are numbers, and numbers without a fraction are integers. Nothing else is converted.

    >>> convert(2.0, int), convert([1, 2], list[float]), convert(None, int | None)
    (2, [1.0, 2.0], None)
    >>> convert("2", int)
    Traceback (most recent call last):
    TypeError: an integer
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise TypeError(describe(hint))
        return value
    if origin in (Union, types.UnionType):
        return _convert_to_one_of(value, args, hint)
    kind = origin or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise TypeError("a smaller number") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is tuple and isinstance(value, list | tuple):
        return _convert_to_tuple(value, args, hint)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(describe(hint))
    if kind is list and args:
        return [convert(item, args[0]) for item in value]
    if kind is dict and args:
        return {key: convert(item, args[1]) for key, item in value.items()}
    return value


def _convert_to_one_of(value: Any, kinds: Sequence[Any], hint: Any) -> Any:
    exact = [kind for kind in kinds if (get_origin(kind) or kind) is type(value)]  # 1 stays an integer in float | int
    for kind in [*exact, *kinds]:
        try:
            return convert(value, kind)
        except TypeError:
            continue
    raise TypeError(describe(hint))


def _convert_to_tuple(value: Sequence[Any], kinds: Sequence[Any], hint: Any) -> tuple[Any, ...]:
    if not kinds:
        return tuple(value)
    if len(value) != len(kinds):
        raise TypeError(describe(hint))
    return tuple(convert(item, kind) for item, kind in zip(value, kinds, strict=True))


def describe(hint: Any) -> str:
    """Return a type in plain words.

    >>> describe(list[int] | None)
    'a list (each item an integer) or null'
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is list:
        return f"a list (each item {describe(args[0])})"
    if origin is dict:
        return f"an object (each value {describe(args[1])})"
    if origin is tuple:
        return f"a list of {len(args)} items"
    return _DESCRIBED.get(hint, str(hint))
