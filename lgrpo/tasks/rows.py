"""Rows of data: with their locations, as a stream, as a table, and the check of their types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from datasets import Dataset

Row: TypeAlias = Mapping[str, Any]


class LocatedRow(NamedTuple):
    """Row and its location for messages, such as ``train.jsonl, line 7``."""

    location: str
    row: Row


class RowStream(ABC):
    """Rows that are read one by one and not kept. Every ``iter`` starts at the first row."""

    @abstractmethod
    def __iter__(self) -> Iterator[LocatedRow]: ...


@final
class Table:
    """Rows with random access, in memory or in a memory-mapped ``Dataset``."""

    def __init__(self, rows: Sequence[Row] | Dataset, location: Callable[[int], str]) -> None:
        self._rows = rows
        self._location = location

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: Sequence[int]) -> Iterator[LocatedRow]:
        """Yield the rows at these indices, in this order."""
        rows = (self._rows[i] for i in indices) if isinstance(self._rows, Sequence) else self._rows.select(indices)
        for index, row in zip(indices, rows, strict=True):
            yield LocatedRow(self._location(index), row)


@final
class FieldKinds:
    """Kind of value of each field, learnt from the rows it checks; a field with two kinds is an error."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}

    def check(self, location: str, row: Row) -> None:
        for name, value in row.items():
            if value is None:
                continue
            kind = kind_of(value)
            first_kind, first_location = self._first.setdefault(name, (kind, location))
            if kind != first_kind:
                raise ValueError(
                    f"field {name!r} is {first_kind} in {first_location}, but {kind} in {location}: a field must "
                    "hold one kind of value"
                )


def has_long_integer(value: object) -> bool:
    """Return whether a value is, or contains, an integer of too many digits for Python to print.

    >>> [has_long_integer(value) for value in (10**4000, [1, {"a": 10**5000}], "9" * 5000)]
    [False, True, False]
    """
    match value:
        case int():
            try:
                return value.bit_length() > 1000 and not str(value)
            except ValueError:
                return True
        case list() | tuple():
            return any(map(has_long_integer, value))
        case Mapping():
            return any(map(has_long_integer, value.values()))
    return False


def kind_of(value: object) -> str:
    """Return the kind of a value in the terms of JSON; integers and floats are one kind.

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
