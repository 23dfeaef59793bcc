"""Errors of the parser of settings, in one line: which setting is wrong, and the nearest right name."""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lgrpo.checks import nearest

KEY = re.compile(r'Parser key "([^"]+)"')
CLASS = re.compile(r"Problem with given class_path '([^']+)'")
OPTION = re.compile(r"Option '([^']+)' is not accepted")
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*))?$")
GIVEN = re.compile(r"Given value: (?:NestedArg\(key='[^']*', val='?(.*?)'?\)|(.*))$")
GROUP = re.compile(r"(Group|Subcommand) '([^']+)' does not accept option '([^']+)'")
ABSTRACT = re.compile(r"but (?:(\S+) )?is abstract")
NOT_A_CLASS = re.compile(r"Expected a <class '(?:int|float|str|bool|dict)'>")
WHOLE_VALUE = re.compile(r"\. Got value: Namespace\(.*$", re.MULTILINE)
MISSING = "the following arguments are required: "
IMPORT = re.compile(r"No module named|has no attribute|cannot import|Expected a dot import path")


def report_errors(parser: ArgumentParser) -> None:
    """Make a parser print one line for an error, instead of the usage and a tree of types."""
    parser.error = partial(_error, parser)


def _error(parser: ArgumentParser, message: str, ex: Exception | None = None) -> NoReturn:
    line = one_line(message, setting_names(parser))
    if not parser.exit_on_error:
        type(parser).error(parser, line, ex)
    print(f"lgrpo: {line}", file=sys.stderr)
    raise SystemExit(2) from ex


def setting_names(parser: ArgumentParser) -> list[str]:
    """Return the names of all settings of a parser and its commands, without dashes."""
    commands = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *itertools.chain.from_iterable(commands)]
    options = (option for parser in parsers for action in parser._actions for option in action.option_strings)
    return sorted({option.lstrip("-") for option in options if not option.endswith(".help")})


def one_line(message: str, known: Iterable[str]) -> str:
    """Return an error of jsonargparse as a sentence.

    >>> one_line("unrecognized arguments: --data.grup_size 4", ["data.group_size"])
    'there is no setting data.grup_size: did you mean data.group_size?'
    >>> one_line('Parser key "data.group_size":\\n  Expected a <class \\'int\\'>. Got value: abc', [])
    "data.group_size is 'abc'; it must be an int"
    """
    if message.startswith("unrecognized arguments: "):
        return _unknown_argument(message.removeprefix("unrecognized arguments: ").split()[0], known)
    if message.startswith(MISSING):
        names = " and ".join(
            re.sub(r"^(fit|validate|test)\.", "", n) for n in message.removeprefix(MISSING).split(", ")
        )
        return f"{names} is not set: add a complete config, such as demo or your_own (lgrpo configs lists all of them)"
    message = WHOLE_VALUE.sub("", message)
    name, paths = ".".join(KEY.findall(message)), CLASS.findall(message)
    if found := GROUP.search(message):
        return _unknown(found[3] if found[1] == "Subcommand" else f"{found[2]}.{found[3]}", known)
    if (found := OPTION.search(message)) and not paths:
        return _unknown(found[1], known)
    if not name:
        return " ".join(message.split())
    if option := OPTION.search(message):
        return f"{name} ({paths[-1]}) has no setting {option[1]}{nearest(option[1], _parameters(paths[-1]))}"
    lines = [line.strip().lstrip("- ") for line in message.splitlines()]
    given = next((found[1] or found[2] for line in lines if (found := GIVEN.match(line))), None)
    for line in lines:
        if IMPORT.search(line) and not NOT_A_CLASS.search(message):
            path = paths[-1] if paths else line.rpartition(": ")[2]
            reason = "" if line.startswith("Expected") else f" ({line})"
            return (
                f"{name}: there is no class {path}{reason}. Give its module and name, such as lgrpo.losses.ClippedLoss"
            )
        if found := ABSTRACT.search(line):
            return f"{name}: {_abstract(found[1] or given or paths[-1])}"
        if line.startswith(MISSING):
            return f"{name}: {paths[-1]} needs {line.rpartition(': ')[2]} ({_as_options(name, line)})"
    expected = [found for line in lines if (found := EXPECTED.match(line)) and " path " not in line]
    if expected:
        value = expected[0][2] or given
        types = list(dict.fromkeys(_type_name(found[1]) for found in expected))
        return f"{name} is {value!r}; it must be {' or '.join(types)}"
    return " ".join(message.split())


def _unknown_argument(argument: str, known: Iterable[str]) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: every setting has the form --NAME VALUE"
    return _unknown(argument.lstrip("-").partition("=")[0].removesuffix("+"), known)


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"there is no setting {name}{nearest(name, known) or '; --help lists all of them'}"


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _parameters(path: str) -> list[str]:
    """Return the names of the arguments of a class that is already imported."""
    found = _class_of(path)
    return [] if found is None else [name for name in inspect.signature(found).parameters if name != "self"]


def _abstract(path: str) -> str:
    missing = sorted(getattr(_class_of(path), "__abstractmethods__", ()))
    return f"{path} is an abstract class: name a subclass of it" + (f" with {', '.join(missing)}" if missing else "")


def _as_options(name: str, line: str) -> str:
    return " ".join(f"--{name}.{argument} …" for argument in line.rpartition(": ")[2].split(", "))


def _type_name(text: str) -> str:
    """Return a type as it is written in Python, with an article.

    >>> _type_name("<class 'int'>"), _type_name("typing.Literal['a', 'b']"), _type_name("<class 'NoneType'>")
    ('an int', "one of 'a', 'b'", 'null')
    """
    if found := re.match(r"typing\.Literal\[(.*)\]", text):
        return f"one of {found[1]}"
    name = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text)
    if name == "NoneType":
        return "null"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def cause_in_class(error: BaseException) -> BaseException:
    """Return the error of a class that jsonargparse could not build; ``error`` itself if it is another one.

    The type of ``weight_sync`` is ``EngineSync | None``. If ``WeightSync(period=0)`` raises, jsonargparse raises an
    error that also lists why the value is not None.
    """
    while isinstance(error, ValueError) and "Union subtypes" in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error
