"""Counts of the errors that models make in environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lgrpo.environments.base import TurnError


@dataclass(kw_only=True, slots=True)
class ErrorCounts:
    """Number of errors of each kind, and one example of each.

    >>> errors = ErrorCounts()
    >>> errors.add([TurnError("unknown_tool", "there is no tool 'sum'"), TurnError("unknown_tool", "no tool 'f'")])
    >>> errors
    ErrorCounts(counts=Counter({'unknown_tool': 2}), examples={'unknown_tool': "there is no tool 'sum'"})
    """

    counts: Counter[str] = field(default_factory=Counter)
    """Number of errors by kind."""
    examples: dict[str, str] = field(default_factory=dict)
    """Text of the first error of each kind."""

    def add(self, errors: Iterable[TurnError]) -> None:
        """Count the errors of a turn."""
        for error in errors:
            self.counts[error.kind] += 1
            self.examples.setdefault(error.kind, error.text)

    def merge(self, other: ErrorCounts) -> None:
        """Add the counts of another episode, worker or process."""
        self.counts += other.counts
        self.examples = other.examples | self.examples

    def lines(self) -> list[str]:
        """Return a line for each kind, the most frequent first.

        >>> ErrorCounts(counts=Counter(wrong_type=3), examples={"wrong_type": "a of add must be an integer"}).lines()
        ['3 x wrong_type, for example: a of add must be an integer']
        """
        return [f"{count} x {kind}, for example: {self.examples[kind]}" for kind, count in self.counts.most_common()]
