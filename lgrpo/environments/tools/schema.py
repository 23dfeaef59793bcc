"""JSON schemas of tools, from their signatures and Google-style docstrings.

The schemas equal those of ``transformers.utils.get_json_schema``, for which all of transformers would be imported in
every worker.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_SECTION = re.compile(r"\n\s*(?=(?:Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):[ \t]*(?:\n|\Z))")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)\n]*\))?\s*:\s*(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of a function, in the form that chat templates take.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: First number.
    ...         b: Second number.
    ...     '''
    >>> tool_schema(add)["function"]["parameters"]["properties"]["b"]
    {'type': 'integer', 'description': 'Second number.'}

    Args:
        function: Function or bound method, with type hints and a docstring that describes every argument.
        name: Name in error messages, such as ``Shop.buy``; the default is the name of the function.
    """
    shown = name or function.__name__
    documentation = inspect.getdoc(function)
    if not documentation or not documentation.strip():
        raise ValueError(f"tool {shown} has no docstring; the model needs a description of it")
    description, documented, returned = parse_docstring(documentation)
    properties, required = {}, []
    hints = argument_types(function, shown)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if parameter.name not in documented:
            raise ValueError(
                f"tool {shown}: the docstring does not describe argument {parameter.name!r}; add it to a section Args:"
            )
        try:
            properties[parameter.name] = type_schema(hint)
        except TypeError as error:
            raise ValueError(f"tool {shown}: the type of argument {parameter.name!r} is {error}") from error
        properties[parameter.name] |= _described(documented[parameter.name], shown, parameter.name)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    schema = {"name": function.__name__, "description": description, "parameters": parameters}
    if required:
        parameters["required"] = required
    if "return" in hints:
        with suppress(TypeError):  # most templates do not show it
            schema["return"] = type_schema(hints["return"]) | ({"description": returned} if returned else {})
    return {"type": "function", "function": schema}


def argument_types(function: Callable[..., Any], shown: str) -> dict[str, Any]:
    """Return the types of the arguments of a tool, and of its result if it has one."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {shown}: argument {parameter} cannot be passed by name; give it a name of its own")
        if parameter.annotation is parameter.empty:
            raise ValueError(
                f"tool {shown}: argument {parameter.name!r} has no type; write {parameter.name}: str or so"
            )
    try:
        return get_type_hints(function)
    except (NameError, TypeError, SyntaxError) as error:
        raise ValueError(f"tool {shown}: its types cannot be read ({error})") from error


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type, or raise a ``TypeError`` that begins with the type.

    >>> type_schema(list[int] | None)
    {'type': 'array', 'items': {'type': 'integer'}, 'nullable': True}
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal:
        names = list(dict.fromkeys(_NAMES[type(value)] for value in args if type(value) in _NAMES))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}
    if origin in (Union, types.UnionType):
        return _union_schema(args)
    if origin is list:
        return {"type": "array", "items": type_schema(args[0])}
    if origin is tuple and Ellipsis not in args:
        return {"type": "array", "prefixItems": [type_schema(arg) for arg in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(args[1])}
    raise TypeError(
        f"{getattr(hint, '__name__', hint)}, which JSON cannot express; use int, float, str, bool, list, dict"
    )


def _union_schema(args: tuple[Any, ...]) -> dict[str, Any]:
    members = [type_schema(arg) for arg in args if arg is not type(None)]
    if len(members) == 1:
        schema = members[0]
    elif all(set(member) == {"type"} for member in members):
        names = sorted({member["type"] for member in members})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": members}
    return schema | ({"nullable": True} if type(None) in args else {})


def _described(description: str, shown: str, argument: str) -> dict[str, Any]:
    """Return the fields of a schema that come from the description of an argument."""
    if not (choices := _CHOICES.search(description)):
        return {"description": description}
    try:
        values = json.loads(choices[1])
    except ValueError as error:
        raise ValueError(f"tool {shown}: the choices of argument {argument!r} are not JSON: {choices[1]}") from error
    return {"enum": values, "description": description[: choices.start()].strip()}


def parse_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """Return the description, the descriptions of the arguments and that of the result.

    >>> parse_docstring("Double.\\n\\nArgs:\\n    a (int): Some\\n        number.\\n\\nReturns:\\n    Its double.")
    ('Double.', {'a': 'Some number.'}, 'Its double.')
    """
    parts = _SECTION.split("\n" + inspect.cleandoc(text))
    sections = {part.partition(":")[0].strip(): part.partition(":")[2] for part in parts[1:]}
    arguments = {}
    for entry in _entries(sections.get("Args", sections.get("Arguments", ""))):
        if match := _ARGUMENT.fullmatch(entry):
            arguments[match[1]] = match[2]
    return parts[0].strip(), arguments, " ".join(sections.get("Returns", "").split())


def _entries(section: str) -> list[str]:
    """Return the entries of a section, each on one line: indented lines continue the line above."""
    lines = [line for line in section.split("\n") if line.strip()]
    if not lines:
        return []
    indents = [len(line) - len(line.lstrip()) for line in lines]
    entries: list[str] = []
    for line, indent in zip(lines, indents, strict=True):
        if indent <= indents[0] or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    return [entry.strip() for entry in entries]
