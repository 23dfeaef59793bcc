"""Rewards for the format of a completion."""

from __future__ import annotations

import re
from typing import final

from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt


@final
class RegexMatch(Reward):
    """1 if a regular expression is found in the completion, else 0."""

    def __init__(self, pattern: str, whole: bool = False) -> None:
        """
        Args:
            pattern: Regular expression of Python's ``re``; ``.`` matches line ends, too.
            whole: Whether the expression must match the whole completion.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        self.pattern = pattern
        self.whole = whole

    def score(self, prompt: Prompt, completion: Completion) -> float:
        find = self._pattern.fullmatch if self.whole else self._pattern.search
        return float(find(completion.text) is not None)


@final
class TagFormat(Reward):
    """1 if the completion is ``<think>…</think> <answer>…</answer>``, each tag once and in order, else 0."""

    is_inline = True

    def __init__(self, tags: list[str] | None = None) -> None:
        """
        Args:
            tags: Names of the tags, in order; the default is think and answer.
        """
        self.tags = tags or ["think", "answer"]
        body = r"\s*".join(rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in self.tags)
        self._pattern = re.compile(rf"\s*{body}\s*", re.DOTALL)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        once = all(completion.text.count(f"<{tag}>") == completion.text.count(f"</{tag}>") == 1 for tag in self.tags)
        return float(once and self._pattern.fullmatch(completion.text) is not None)
