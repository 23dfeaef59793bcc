"""Template that turns a row of data into a prompt."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_RESERVED_OPTIONS = {"conversation", "tokenize", "add_generation_prompt"}


@dataclass(kw_only=True)
class Template:
    """Prompt with a row's fields filled in, as plain text or as a chat, optionally after solved examples."""

    prompt: str = "{question}"
    """Text with the row's fields in braces; literal braces are doubled. A field that holds a list of messages (objects
    with role and content) must stand alone, ``{prompt}``: it is the conversation, which needs ``chat``."""
    system: str | None = None
    """System message of a chat. A row of messages that has its own keeps that."""
    chat: bool = False
    """Whether to wrap the prompt in the tokenizer's chat template."""
    examples: list[dict[str, Any]] | None = None
    """Rows shown with their answers before the question, as turns of a chat or blocks of text."""
    example_answer: str = "{solution}"
    """Answer of an example, with the row's fields in braces. In plain text it directly follows the example's prompt."""
    separator: str = "\n\n"
    """Text between examples, and before the question, in plain text."""
    chat_options: dict[str, Any] | None = None
    """Further arguments of the chat template, such as ``enable_thinking: true``."""

    def __post_init__(self) -> None:
        for name in ("prompt", "example_answer"):
            try:
                is_invalid = "" in _fields(getattr(self, name))
            except ValueError:
                is_invalid = True
            if is_invalid:
                raise ValueError(
                    f"template.{name} has a brace without a field: double literal braces, as in \\boxed{{{{}}}}; it is "
                    f"{getattr(self, name)!r}"
                )
        if not self.fields():
            raise ValueError(f"template.prompt reads no field of a row, so all prompts are equal: {self.prompt!r}")
        if self.system is not None and not self.chat:
            raise ValueError("template.system requires a chat: set template.chat, or remove it")
        if self.chat_options and not self.chat:
            raise ValueError("template.chat_options require a chat: set template.chat, or remove them")
        if reserved := sorted(_RESERVED_OPTIONS & set(self.chat_options or {})):
            raise ValueError(f"template.chat_options may not set {reserved}")
        for index, row in enumerate(self.examples or []):
            if missing := sorted((self.fields() | _fields(self.example_answer)) - set(row)):
                raise ValueError(f"example {index} of the template has no {missing}, only {sorted(row)}")
            if not self.example_answer.format_map(row).strip():
                raise ValueError(f"example {index} has an empty answer: check template.example_answer")
            self.check_messages(row)

    def fields(self) -> set[str]:
        """Return the fields of a row that the template reads.

        >>> sorted(Template(prompt="{question} Answer in {unit}.").fields())
        ['question', 'unit']
        """
        return _fields(self.prompt)

    def render(
        self,
        row: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        max_characters: float = math.inf,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[str, list[int] | None]:
        """Return the prompt's text and its token ids; None instead of these if the text is longer than the limit."""
        text = self.text(row, tokenizer, tools)
        if len(text) > max_characters:
            return text, None
        return text, tokenizer(text, add_special_tokens=not self.chat).input_ids

    def chat_arguments(self, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
        """Return the further arguments of the chat template; None for plain text, which has no tools."""
        if not self.chat and tools:
            raise ValueError("tools are shown by the chat template: set template.chat to true")
        return {**(self.chat_options or {}), **({"tools": list(tools)} if tools else {})} if self.chat else None

    def text(
        self, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the prompt's text."""
        arguments = self.chat_arguments(tools)
        if not self.chat:
            solved = [self.prompt.format_map(e) + self.example_answer.format_map(e) for e in self.examples or []]
            return self.separator.join([*solved, self.prompt.format_map(row)])
        if tokenizer.chat_template is None:
            raise ValueError("template.chat is true, but the tokenizer has no chat template: set it to false")
        messages: list[Mapping[str, str]] = []
        for example in self.examples or []:
            messages += [message for message in self._messages(example) if message["role"] != "system"]
            messages.append({"role": "assistant", "content": self.example_answer.format_map(example)})
        question = self._messages(row)
        if question[0]["role"] == "system":
            messages.insert(0, question.pop(0))
        elif self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        messages += question
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(arguments or {}))

    def check_messages(self, row: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if a row holds a list of messages that cannot be the prompt."""
        for name in sorted(_expressions(self.prompt) & self.fields()):  # not those such as {prompt[0][content]}
            if not _is_conversation(row[name]):
                continue
            if self.prompt.strip() != f"{{{name}}}":
                raise ValueError(
                    f"field {name!r} is a list of messages, which template.prompt {self.prompt!r} would insert as "
                    f'Python text: set it to "{{{name}}}" and template.chat to true'
                )
            if not self.chat:
                raise ValueError(f"field {name!r} is a list of messages: set template.chat to true")
            for message in row[name]:
                if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                    raise ValueError(f"field {name!r} has a message without role or content as text: {message}")
            if (last := row[name][-1])["role"] != "user" or not last["content"].strip():
                raise ValueError(f"the last message of field {name!r} must have the role user, not {dict(last)}")

    def _messages(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the conversation that a row holds, or its prompt as the message of a user."""
        name = self.prompt.strip()[1:-1]
        if name in self.fields() and _is_conversation(row[name]):
            return [{key: value for key, value in message.items() if value is not None} for message in row[name]]
        return [{"role": "user", "content": self.prompt.format_map(row)}]


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of a tokenizer's longest token.

    A longer text than n times this number has more than n tokens, unless the tokenizer shortens texts (BERT's joins
    spaces). That is known at once, while tokenising a text of many megabytes takes minutes and gigabytes.
    """
    return max(map(len, tokenizer.get_vocab()))


def _fields(text: str) -> set[str]:
    return {name.split(".")[0].split("[")[0] for name in _expressions(text)}


def _expressions(text: str) -> set[str]:
    """Return what is in braces.

    >>> sorted(_expressions("{question}: {options[0]}"))
    ['options[0]', 'question']
    """
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def _is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages: of objects, one of which has a role.

    >>> [_is_conversation(value) for value in ([{"role": "user", "content": "1+1"}], [{"city": "Bern"}], "1+1", [])]
    [True, False, False, False]
    """
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return False
    return any("role" in item or "from" in item for item in value)
