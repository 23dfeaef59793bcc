"""Text of special tokens inside an observation, which must stay text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

_FIRST, _LAST = 0x100000, 0x10FFFD
"""Range of private characters that take the place of special tokens' text while a chat template is rendered."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a tokenizer, as they occur in a text."""

    pattern: re.Pattern[str]
    """Matches each of them."""
    takes_left: frozenset[str]
    """Those whose token includes the white space before it."""
    takes_right: frozenset[str]
    """Those whose token includes the white space after it."""


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, SpecialTokens] = WeakKeyDictionary()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the special tokens of a tokenizer, which must not change afterwards."""
    if tokenizer not in _KNOWN:
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        texts = sorted((token.content for token in tokens), key=len, reverse=True)
        _KNOWN[tokenizer] = SpecialTokens(
            re.compile("|".join(map(re.escape, texts)) or r"(?!)"),
            frozenset(token.content for token in tokens if token.lstrip),
            frozenset(token.content for token in tokens if token.rstrip),
        )
    return _KNOWN[tokenizer]


@dataclass(slots=True)
class HiddenText:
    """Replaces the text of special tokens by private characters, and encodes a text that has them as plain text.

    An observation without such text is encoded as a whole, as any text.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: list[str] = field(default_factory=list)
    """Text that the n-th private character stands for."""

    def hide(self, value: Any) -> Any:
        """Return a text, or messages, with private characters instead of special tokens' text."""
        if isinstance(value, str):
            pattern = special_tokens(self.tokenizer).pattern.pattern
            return re.sub(f"{pattern}|[{chr(_FIRST)}-{chr(_LAST)}]", self._hide_match, value)
        if isinstance(value, Mapping):
            return {key: item if key == "role" else self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, Sequence) else value

    def _hide_match(self, match: re.Match[str]) -> str:
        if match[0] not in self.texts:
            self.texts.append(match[0])
        return chr(_FIRST + self.texts.index(match[0]))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Its special tokens are tokens, hidden ones are text."""
        if not self.texts:
            return self._encode(text)
        tokens = special_tokens(self.tokenizer)
        parts = re.split(f"({tokens.pattern.pattern})", text)  # text, token, text, token, …, text
        token_ids: list[int] = []
        pending = ""
        for index in range(0, len(parts), 2):
            shown = self._restore(parts[index])
            if shown == parts[index]:
                pending += shown
            else:
                if index > 0 and parts[index - 1] in tokens.takes_right:
                    shown = shown.lstrip()
                if index + 1 < len(parts) and parts[index + 1] in tokens.takes_left:
                    shown = shown.rstrip()
                token_ids += self._encode(pending) if pending else []
                token_ids += self._encode(shown, split_special_tokens=True)
                pending = ""
            pending += "".join(parts[index + 1 : index + 2])
        return token_ids + (self._encode(pending) if pending else [])

    def _restore(self, text: str) -> str:
        return re.sub(f"[{chr(_FIRST)}-{chr(_LAST)}]", lambda match: self.texts[ord(match[0]) - _FIRST], text)

    def _encode(self, text: str, **options: Any) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False, **options).input_ids
        return token_ids
