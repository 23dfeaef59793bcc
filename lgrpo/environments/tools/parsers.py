"""Parsers of tool calls, one for each format in which families of models write them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, final

from lgrpo.environments.base import TurnError
from lgrpo.environments.tools.calls import JSON, Call, CallParser, malformed, unreadable
from lgrpo.environments.tools.tag_parsers import DeepSeekParser, GemmaParser, GLMParser, HarmonyParser, XMLParser

ParserName: TypeAlias = Literal[
    "auto", "code", "deepseek", "gemma", "glm", "harmony", "hermes", "llama", "mistral", "python", "xml"
]

_ID = re.compile(r"[a-zA-Z0-9]{9}")


@final
class HermesParser(CallParser):
    """Format of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    >>> HermesParser().parse('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, positional=(), are_texts=False, id=None)]
    """

    def read(self, text: str) -> Iterator[Call | TurnError]:
        position = 0
        while (start := text.find("<tool_call>", position)) >= 0:
            position = start + len("<tool_call>")
            objects, position = read_objects(text, position, "</tool_call>")
            yield from objects


@final
class LlamaParser(CallParser):
    """Format of Llama 3: ``{"name": …, "parameters": {…}}``, after ``<|python_tag|>`` or not.

    >>> LlamaParser().parse('<|python_tag|>{"name": "add", "parameters": {"a": 1}}')[0].arguments
    {'a': 1}
    """

    _object = re.compile(r'\{\s*"(?:name|type|function|parameters)"\s*:')

    def read(self, text: str) -> Iterator[Call | TurnError]:
        _, tag, code = text.partition("<|python_tag|>")
        position, num_found = 0, 0
        while match := self._object.search(text, position):
            try:
                value, position = JSON.raw_decode(text, match.start())
            except (ValueError, RecursionError) as error:
                position = match.end()
                if '"parameters"' in text[match.start() :] or '"arguments"' in text[match.start() :]:
                    num_found += 1
                    yield unreadable(error, text[match.start() :])
                    return
                continue
            if {"parameters", "arguments", "function"} & set(value):  # other objects are part of an answer
                num_found += 1
                yield call_of(value)
        if tag and not num_found:
            yield from (_without_method(call) for call in python_calls(code))


@final
class MistralParser(CallParser):
    """Formats of Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}]`` and ``[TOOL_CALLS]name[ARGS]{…}``.

    >>> [call.name for call in MistralParser().parse('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')]
    ['add', 'now']
    """

    _marker = "[TOOL_CALLS]"
    _head = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*")

    def read(self, text: str) -> Iterator[Call | TurnError]:
        position, index = 0, 0
        while (start := text.find(self._marker, position)) >= 0:
            position = start + len(self._marker)
            found, position = self._read_one(text, position)
            for item in found:
                yield _with_id(item, index)
                index += 1

    def _read_one(self, text: str, position: int) -> tuple[list[Call | TurnError], int]:
        """Return what follows a marker, and the position after it."""
        head = self._head.match(text, position)
        start = head.end() if head else position + len(text[position:]) - len(text[position:].lstrip())
        try:
            value, position = JSON.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            return [unreadable(error, text[start:])], position
        if head:
            return [call_of({"name": head[1], "arguments": value, "id": head[2]})], position
        return [call_of(item) for item in (value if isinstance(value, list) else [value])], position


@final
class PythonParser(CallParser):
    """Calls in Python: in a block ```` ```python ````, or as the list ``[add(a=1), now()]`` that is the whole text.

    Arguments are literals. A block that is not a sequence of calls is an error.

    >>> PythonParser().parse("[add(1, b=2)]")
    [Call(name='add', arguments={'b': 2}, positional=(1,), are_texts=False, id=None)]
    """

    _block = re.compile(
        r"```(?:python|py|tool_code)[ \t]*\n(.*?)(?:```|\Z)|<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)",
        re.DOTALL,
    )
    _list = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.DOTALL)

    def read(self, text: str) -> Iterator[Call | TurnError]:
        blocks = [match[1] or match[2] or "" for match in self._block.finditer(text)]
        if not blocks and self._list.fullmatch(text.strip()):
            blocks = [text.strip()]
        for block in blocks:
            yield from python_calls(block)


@final
class CodeParser(CallParser):
    """Programs instead of calls: each block ```` ```python ```` is the argument of the tool ``python``.

    >>> CodeParser().parse("Let me compute it.\\n```python\\nprint(6 * 7)\\n```")
    [Call(name='python', arguments={'code': 'print(6 * 7)\\n'}, positional=(), are_texts=False, id=None)]
    """

    _block = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for match in self._block.finditer(text):
            yield Call(name="python", arguments={"code": match[1]})


PARSERS: dict[str, type[CallParser]] = {
    "code": CodeParser,
    "deepseek": DeepSeekParser,
    "gemma": GemmaParser,
    "glm": GLMParser,
    "harmony": HarmonyParser,
    "hermes": HermesParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
    "python": PythonParser,
    "xml": XMLParser,
}
_SIGNS = {  # parts of chat templates, the most specific first
    "[TOOL_CALLS]": "mistral",
    "<function=": "xml",
    "<arg_key>": "glm",
    "<｜tool▁call▁begin｜>": "deepseek",
    "<|tool_call>": "gemma",
    "<|channel|>commentary": "harmony",
    "<|tool_call_start|>": "python",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama",
    '{"name": function name, "parameters":': "llama",
}


def parser_for(chat_template: str | None) -> CallParser:
    """Return the parser of the format in which a chat template writes tool calls.

    >>> type(parser_for("… <tool_call>\\n{{ tool_call | tojson }}\\n</tool_call> …")).__name__
    'HermesParser'
    """
    names = ", ".join(PARSERS)
    if chat_template is None:
        raise ValueError(
            f"there is no chat template to choose the parser of tool calls by; set parser to one of {names}"
        )
    name = next((name for sign, name in _SIGNS.items() if sign in chat_template), None)
    if name is None:
        raise ValueError(f"the chat template writes tool calls in no known format; set parser to one of {names}")
    return PARSERS[name]()


def read_objects(text: str, position: int, end: str) -> tuple[list[Call | TurnError], int]:
    """Return the calls of JSON objects up to a closing tag, which may be missing, and the position after it."""
    found: list[Call | TurnError] = []
    while True:
        position += len(text[position:]) - len(text[position:].lstrip())
        if text.startswith(end, position):
            if not found:
                found.append(malformed("a call is empty", end))
            return found, position + len(end)
        if found and position == len(text):
            return found, position
        try:
            value, position = JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            wrong, closing, _ = text[position:].partition(end)
            return [*found, unreadable(error, wrong)], position + len(wrong) + len(closing)
        found.append(call_of(value))


def call_of(value: Any) -> Call | TurnError:
    """Return the call that a JSON object describes, or an error.

    >>> call_of({"name": "add", "parameters": {"a": 1}}).arguments
    {'a': 1}
    """
    shown = repr(value)
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return malformed('a call must be an object with "name" and "arguments"', shown)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = JSON.decode(arguments)
        except (ValueError, RecursionError):
            return malformed(f"the arguments of {value['name']} must be an object", shown)
    if not isinstance(arguments, dict | None):
        return malformed(f"the arguments of {value['name']} must be an object", shown)
    given = value.get("id")
    return Call(name=value["name"], arguments=arguments or {}, id=given if isinstance(given, str) else None)


def python_calls(code: str) -> Iterator[Call | TurnError]:
    """Yield the calls that Python code consists of; ``print`` around a call is ignored."""
    try:
        statements = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield malformed(f"the Python code of a call cannot be read ({error})", code)
        return
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for node in value.elts if isinstance(value, ast.List) else [value]:
            yield _python_call(node, statement)
    if not statements:
        yield malformed("a call is empty", code)


def _python_call(node: ast.expr | None, statement: ast.stmt) -> Call | TurnError:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1 and not node.keywords:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return malformed("the code must consist of calls of tools only", ast.unparse(statement))
    try:
        positional = tuple(ast.literal_eval(argument) for argument in node.args)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return malformed("the arguments of a call must be plain values", ast.unparse(statement))
    if len(named) != len(node.keywords):
        return malformed("the arguments of a call must be plain values", ast.unparse(statement))
    return Call(name=ast.unparse(node.func), arguments=named, positional=positional)


def _without_method(call: Call | TurnError) -> Call | TurnError:
    """Return the call of ``search`` for ``search.call``, as Llama writes calls of its own tools."""
    if isinstance(call, TurnError):
        return call
    return Call(name=call.name.removesuffix(".call"), arguments=call.arguments, positional=call.positional)


def _with_id(item: Call | TurnError, index: int) -> Call | TurnError:
    """Return a call with an identifier of nine characters, which Mistral's templates require."""
    if isinstance(item, TurnError):
        return item
    given = item.id if item.id and _ID.fullmatch(item.id) else f"call{index:05d}"
    return Call(name=item.name, arguments=item.arguments, id=given)
