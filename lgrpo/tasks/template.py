"""From a row of data to the text a model reads."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class Template:
    """Fills a row's fields into a prompt, plain or as a chat."""

    prompt: str = "{question}"
    """Text with the row's fields in braces; a brace of the text itself is doubled."""
    system: str | None = None
    """System message of a chat."""
    chat: bool = False
    """Wrap the prompt in the tokenizer's chat template."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError("template.system is the system message of a chat: set template.chat, or leave it out")

    def fields(self) -> set[str]:
        """Fields of a row the template reads.

        >>> sorted(Template(prompt="{question} Answer in {unit}.").fields())
        ['question', 'unit']
        """
        names = (name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None)
        return {name.split(".")[0].split("[")[0] for name in names}

    def render(self, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
        """The prompt's text and its token ids."""
        text = self.prompt.format_map(row)
        if not self.chat:
            return text, tokenizer(text).input_ids
        if tokenizer.chat_template is None:
            raise ValueError("template.chat is set, but the tokenizer has no chat template")
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages.append({"role": "user", "content": text})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return rendered, tokenizer(rendered, add_special_tokens=False).input_ids
