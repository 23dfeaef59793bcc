"""Rows of data: one by one as they are read, or all at hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from datasets import Dataset

Row: TypeAlias = Mapping[str, Any]


class LocatedRow(NamedTuple):
    """A row and where it stands, in words: ``train.jsonl, line 7``."""

    place: str
    row: Row


class RowStream(ABC):
    """Rows that are read one by one and not kept. Every ``iter`` begins again at the first."""

    @abstractmethod
    def __iter__(self) -> Iterator[LocatedRow]: ...


@final
class Table:
    """Rows at hand, from memory or from a memory-mapped ``Dataset``."""

    def __init__(self, rows: Sequence[Row] | Dataset, place: Callable[[int], str]) -> None:
        self._rows = rows
        self._place = place

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: Sequence[int]) -> Iterator[LocatedRow]:
        """The rows at these indices, in this order."""
        rows = self._rows.select(indices) if isinstance(self._rows, Dataset) else (self._rows[i] for i in indices)
        for index, row in zip(indices, rows, strict=True):
            yield LocatedRow(self._place(index), row)


@final
class FieldKinds:
    """What kind of value each field holds, learnt from rows as they go by; a field of two kinds is an error."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}

    def check(self, place: str, row: Row) -> None:
        for name, value in row.items():
            if value is None:
                continue
            kind = kind_of(value)
            first_kind, first_place = self._first.setdefault(name, (kind, place))
            if kind != first_kind:
                raise ValueError(
                    f"field {name!r} is {first_kind} in {first_place}, but {kind} in {place}: a field holds one kind "
                    "of value"
                )


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON; whole and broken numbers are one kind.

    >>> [kind_of(value) for value in ("1", 1, 1.5, True, [1], {"a": 1})]
    ['text', 'a number', 'a number', 'a truth value', 'a list', 'an object']
    """
    match value:
        case None:
            return "null"
        case str():
            return "text"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return f"a {type(value).__name__}"
