"""Parsers of formats in which tags mark the parts of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import final

from lgrpo.environments.base import TurnError
from lgrpo.environments.tools.calls import JSON, Call, CallParser, malformed, unreadable


@final
class XMLParser(CallParser):
    """Format of Qwen3.5 and Nemotron 3: ``<function=add><parameter=a>1</parameter></function>``.

    >>> XMLParser().parse("<tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>")
    [Call(name='add', arguments={'a': '1'}, positional=(), are_texts=True, id=None)]
    """

    _function = re.compile(r"<function=([^>\n]*)>(.*?)(</function>|(?=<function=)|\Z)", re.DOTALL)
    _parameter = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for match in self._function.finditer(text):
            name, body = match[1].strip(), match[2]
            rest = self._parameter.sub("", body)
            if not name or not match[3] or rest.strip():
                reason = "its tags are not closed" if name else "it has no name"
                yield malformed(f"a call cannot be read: {reason}", match[0])
            else:
                found = {key.strip(): value for key, value in self._parameter.findall(body)}
                yield Call(name=name, arguments=found, are_texts=True)
        if "<tool_call>" in text and not self._function.search(text):
            yield malformed("a call cannot be read: there is no <function=…> in it", text[text.find("<tool_call>") :])


@final
class GLMParser(CallParser):
    """Format of GLM-4.5: ``<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``.

    >>> GLMParser().parse("<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>")
    [Call(name='add', arguments={'a': '1'}, positional=(), are_texts=True, id=None)]
    """

    _call = re.compile(r"<tool_call>\s*(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
    _argument = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for match in self._call.finditer(text):
            name = self._argument.sub("", match[1]).strip()
            if not re.fullmatch(r"[\w.-]+", name):
                yield malformed("a call must be a name, and pairs of arg_key and arg_value", match[1])
            else:
                found = {key.strip(): value for key, value in self._argument.findall(match[1])}
                yield Call(name=name, arguments=found, are_texts=True)


@final
class DeepSeekParser(CallParser):
    """Format of DeepSeek: ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>add``, then a block of JSON.

    >>> DeepSeekParser().parse('<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\\n```json\\n{"a": 1}\\n```')[0].arguments
    {'a': 1}
    """

    _head = re.compile(
        r"<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?\s*([\w.-]*)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
    )

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for head in self._head.finditer(text):
            yield _read_arguments(head[1], text[head.end() :], text[head.start() :])


@final
class GemmaParser(CallParser):
    """Format of Gemma 4: ``<|tool_call>call:add{a:1,note:<|"|>text<|"|>}<tool_call|>``.

    >>> GemmaParser().parse('<|tool_call>call:add{a:1,note:<|"|>an "a"<|"|>}<tool_call|>')[0].arguments
    {'a': 1, 'note': 'an "a"'}
    """

    _thought = re.compile(r"<\|channel>.*?(?:<channel\|>|\Z)", re.DOTALL)
    _call = re.compile(r"<\|tool_call>\s*(?:call:)?([\w.-]*)\s*(.*?)(?=<\|tool_call>|\Z)", re.DOTALL)
    _key = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for match in self._call.finditer(self._thought.sub("", text)):
            parts = match[2].split('<|"|>')  # texts are the parts between two of these marks
            parts[::2] = [self._key.sub(r'\1"\2":', part) for part in parts[::2]]
            parts[1::2] = [json.dumps(part) for part in parts[1::2]]
            yield _read_arguments(match[1], "".join(parts), match[0])


@final
class HarmonyParser(CallParser):
    """Format of gpt-oss: ``to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>``.

    >>> HarmonyParser().parse('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>')
    [Call(name='add', arguments={'a': 1}, positional=(), are_texts=False, id=None)]
    """

    _head = re.compile(r"to=functions\.([\w.-]*)(?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>\s*")

    def read(self, text: str) -> Iterator[Call | TurnError]:
        for head in self._head.finditer(text):
            yield _read_arguments(head[1], text[head.end() :], text[head.start() :])


def _read_arguments(name: str, arguments: str, shown: str) -> Call | TurnError:
    """Return the call of a name with the JSON object at the beginning of a text, or an error."""
    try:
        value, _ = JSON.raw_decode(arguments)
    except (ValueError, RecursionError) as error:
        return unreadable(error, shown)
    if not name or not isinstance(value, dict):
        return malformed("a call must have a name and an object of arguments", shown)
    return Call(name=name, arguments=value)
