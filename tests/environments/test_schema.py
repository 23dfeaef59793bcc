"""Schemas of tools: equal to those of transformers, and clear refusals."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from lgrpo.environments import ToolEnvironment, tool_schema
from lgrpo.environments.tools.arguments import WrongArguments, bind_arguments
from lgrpo.environments.tools.schema import argument_types


def plain(a: int, b: float = 1.0, c: str = "x", d: bool = False) -> str:
    """Do something
    on two lines.

    Args:
        a: First.
        b: Second, whose description
            takes two lines: with a colon.
        c: Third
        d: Fourth.

    Returns:
        A text.
    """


def containers(a: list[int], b: dict[str, float], c: tuple[int, str], d: list, e: dict, f: Any) -> None:
    """
    Do something else.

    Args:
        a: A list.
        b: A dictionary.
        c: A pair.
        d: Any list.
        e: Any dictionary.
        f: Anything.
    """


def unions(
    a: int | None,
    b: int | str,
    c: Optional[list[int]],  # noqa: UP045
    d: Union[int, list[str]],  # noqa: UP007
    e: Literal["x", "y"],
    f: str,
) -> list[str]:
    """Choose.

    Args:
        a: May be missing.
        b: One of two.
        c: May be a list.
        d: One or several.
        e: One of two.
        f: A beverage (choices: ["tea", "coffee"])

    Raises:
        ValueError: never.
    """


def nothing() -> int:
    """Take nothing."""


async def waits(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """


class Holder:
    def method(self, a: int) -> int:
        """Use self.

        Args:
            a: Number.
        """
        return a


@pytest.mark.parametrize("function", [plain, containers, unions, nothing, waits, Holder().method])
def test_schemas_equal_those_of_transformers(function):
    ours = tool_schema(function)
    theirs = get_json_schema(function)
    assert ours == theirs
    assert list(ours["function"]["parameters"]["properties"]) == list(theirs["function"]["parameters"]["properties"])


def no_docstring(a: int) -> int:
    return a


def no_type(a: int, b) -> int:
    """Add.

    Args:
        a: First.
        b: Second.
    """


def not_described(a: int, b: int) -> int:
    """Add.

    Args:
        a: First.
    """


def strange_type(a: Holder) -> int:
    """Use it.

    Args:
        a: First.
    """


def unknown_type(a: Nowhere) -> int:  # noqa: F821
    """Use it.

    Args:
        a: First.
    """


def many(*values: int) -> int:
    """Add.

    Args:
        values: Numbers.
    """


def wrong_choices(a: str) -> int:
    """Choose.

    Args:
        a: One (choices: [tea])
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "tool no_docstring has no docstring"),
        (no_type, "tool no_type: argument 'b' has no type"),
        (not_described, "tool not_described: the docstring does not describe argument 'b'"),
        (strange_type, "tool strange_type: the type of argument 'a' is Holder, which JSON cannot express"),
        (unknown_type, "tool unknown_type: its types cannot be read .*Nowhere"),
        (many, r"tool many: argument \*values: .* cannot be passed by name"),
        (wrong_choices, "tool wrong_choices: the choices of argument 'a' are not JSON"),
    ],
)
def test_tools_that_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        ToolEnvironment(tools=[function])


def test_a_refusal_names_class_and_method():
    class Shop:
        def buy(self, item) -> str:
            """Buy.

            Args:
                item: Item.
            """

    with pytest.raises(ValueError, match=r"tool Shop\.buy: argument 'item' has no type"):
        ToolEnvironment(Shop)


CHOSEN = (None, "x", [1], ["y"], "x", "tea")
HELD = ([1.0], {"x": 1}, [1, "x"], [], {}, None)


def types_of(function):
    return argument_types(function, function.__name__)


@pytest.mark.parametrize(
    ("function", "positional", "named", "expected"),
    [
        (plain, (), {"a": 2.0, "b": 3}, {"a": 2, "b": 3.0}),
        (plain, (1, 2.5), {"d": True}, {"a": 1, "b": 2.5, "d": True}),
        (unions, CHOSEN, {}, dict(zip("abcdef", CHOSEN, strict=True))),
        (containers, HELD, {}, {"a": [1], "b": {"x": 1.0}, "c": (1, "x"), "d": [], "e": {}, "f": None}),
    ],
)
def test_arguments_that_fit(function, positional, named, expected):
    found = bind_arguments(function, types_of(function), positional, named)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("function", "positional", "named", "kind", "text"),
    [
        (plain, (), {}, "missing_argument", "the call of plain lacks the argument 'a'"),
        (plain, (), {"a": 1, "bb": 1}, "unknown_argument", "plain has no argument 'bb'"),
        (plain, (1,), {"a": 1}, "unknown_argument", "argument 'a' of plain is given twice"),
        (nothing, (1,), {}, "unknown_argument", "nothing takes 0 arguments, but the call has 1"),
        (plain, (), {"a": "1"}, "wrong_type", "argument 'a' of plain must be an integer, but it is \"1\""),
        (plain, (), {"a": True}, "wrong_type", "must be an integer, but it is true"),
        (plain, (), {"a": 1.5}, "wrong_type", "must be an integer, but it is 1.5"),
        (plain, (), {"a": None}, "wrong_type", "must be an integer, but it is null"),
        (plain, (), {"a": 1, "b": 10**400}, "wrong_type", "must be a smaller number"),
        (plain, (), {"a": 1, "d": 1}, "wrong_type", "must be true or false"),
        (waits, (), {"seconds": True}, "wrong_type", "must be a number"),
        (containers, ([1, "x"], {}, [1, "x"], [], {}, 1), {}, "wrong_type", "must be an integer"),
        (containers, ([], {}, [1], [], {}, 1), {}, "wrong_type", "must be a list of 2 items"),
        (unions, (1, 1, None, 1, "z", "tea"), {}, "wrong_type", "must be one of 'x', 'y', but it is \"z\""),
    ],
)
def test_arguments_that_do_not_fit(function, positional, named, kind, text):
    with pytest.raises(WrongArguments) as caught:
        bind_arguments(function, types_of(function), positional, named)
    assert caught.value.error.kind == kind
    assert text in caught.value.error.text


@pytest.mark.parametrize(
    ("value", "expected"), [("5", {"a": 5}), ("5.0", {"a": 5}), ("five", None), ("", None), ('"5"', None)]
)
def test_texts_become_the_type_of_the_argument(value, expected):
    if expected is None:
        with pytest.raises(WrongArguments):
            bind_arguments(plain, types_of(plain), (), {"a": value}, are_texts=True)
    else:
        assert bind_arguments(plain, types_of(plain), (), {"a": value}, are_texts=True) == expected


def test_texts_that_are_strings_are_kept():
    found = bind_arguments(plain, types_of(plain), (), {"a": "1", "c": "75001", "d": "True"}, are_texts=True)
    assert found == {"a": 1, "c": "75001", "d": True}
