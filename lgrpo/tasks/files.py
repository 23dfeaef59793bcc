"""Rows out of a data file: JSON lines, JSON, CSV or Parquet.

Files are read here and not by ``load_dataset``: a bad line is named by its number, a date stays the text it is, "1" and
1 stay apart, and no cache can hand out an older version of the file.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from lgrpo.tasks.rows import LocatedRow, kind_of


def is_data_file(path: str) -> bool:
    """Whether the ending is one of a data file.

    >>> [is_data_file(name) for name in ("rows.jsonl", "rows.json.gz", "rows.parquet", "openai/gsm8k", "v1.5")]
    [True, True, True, False, False]
    """
    return _ending(path) in _READERS


def read_file(path: str) -> Iterator[LocatedRow]:
    """The rows of a data file, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: something in it is broken; says what, and where.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no data file {path}")
    return _READERS[_ending(path)](path)


def _ending(path: str) -> str:
    suffixes = Path(path).suffixes
    compressed = len(suffixes) > 1 and suffixes[-1] == ".gz"
    return suffixes[-2] + ".gz" if compressed else (suffixes[-1] if suffixes else "")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Lines of text and their numbers, from 1."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: this is not UTF-8 text ({error.reason})") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is broken or cut short after line {number}: {error}") from error


def _json_lines(path: str) -> Iterator[LocatedRow]:
    for number, line in _lines(path):
        if line.strip():
            yield _located(f"{path}, line {number}", _parse(path, line.strip(), number))


def _json(path: str) -> Iterator[LocatedRow]:
    """A list of objects, or JSON lines under another name."""
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if not first.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    for index, row in enumerate(_parse(path, "".join(line for _, line in _lines(path)), 1)):
        yield _located(f"{path}, row {index}", row)


def _parse(path: str, text: str, first_line: int) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # half a surrogate pair can be written that way, and then no tokenizer takes the text
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line, shown = first_line + error.lineno - 1, text.split("\n")[error.lineno - 1][:80]
        raise ValueError(f"{path}, line {line}: {error.msg} at column {error.colno} of {shown!r}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}, line {first_line}: half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise ValueError(f"{path}, line {first_line}: nested too deeply") from error
    return value


def _located(place: str, row: object) -> LocatedRow:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row is an object with named fields, not {kind_of(row)}")
    return LocatedRow(place, row)


def _csv(path: str) -> Iterator[LocatedRow]:
    """Cells stay text as they are written, whether they look like numbers, dates or nothing at all."""
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or any(name.strip() == "" for name in header):
            raise ValueError(f"{path}, line 1: a name is missing or there twice: {header}")
        for cells in reader:
            if not cells:
                continue
            place = f"{path}, line {reader.line_num}"
            if len(cells) != len(header):
                raise ValueError(f"{place}: {len(cells)} cells, but the header names {len(header)}")
            yield LocatedRow(place, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _parquet(path: str) -> Iterator[LocatedRow]:
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in Dataset(pa.Table.from_batches([batch])):  # which knows the types ``datasets`` adds
                    yield LocatedRow(f"{path}, row {index}", row)
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is broken as a Parquet file, after row {index}: {error}") from error


_READERS: dict[str, Callable[[str], Iterator[LocatedRow]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".json.gz": _json,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".parquet": _parquet,
}
