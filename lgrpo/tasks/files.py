"""Readers of data files: JSON lines, JSON, CSV and Parquet.

Files are not read by ``load_dataset``, so that an error names the line, dates stay strings, "1" and 1 stay different,
and no cache can return an older version of the file.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from lgrpo.tasks.rows import LocatedRow, kind_of


def is_data_file(path: str) -> bool:
    """Return whether the suffix is that of a data file.

    >>> [is_data_file(name) for name in ("rows.jsonl", "rows.json.gz", "rows.parquet", "openai/gsm8k", "v1.5")]
    [True, True, True, False, False]
    """
    return _suffix(path) in _READERS


def read_file(path: str) -> Iterator[LocatedRow]:
    """Return an iterator over the rows of a data file. An error says what is invalid, and where."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no data file {path}")
    return _READERS[_suffix(path)](path)


def _suffix(path: str) -> str:
    suffixes = Path(path).suffixes
    compressed = len(suffixes) > 1 and suffixes[-1] == ".gz"
    return suffixes[-2] + ".gz" if compressed else (suffixes[-1] if suffixes else "")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield lines of text with their numbers, from 1."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: the text is not UTF-8 ({error.reason})") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged or truncated after line {number}: {error}") from error


def _json_lines(path: str) -> Iterator[LocatedRow]:
    for number, line in _lines(path):
        if line.strip():
            yield _located(f"{path}, line {number}", _parse(path, line.strip(), number))


def _json(path: str) -> Iterator[LocatedRow]:
    """Read a list of objects, or JSON lines in a file with the suffix of JSON."""
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if not first.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    for index, row in enumerate(_parse(path, "".join(line for _, line in _lines(path)), 1)):
        yield _located(f"{path}, row {index}", row)


def _parse(path: str, text: str, first_line: int) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # it may be a lone surrogate, which tokenizers reject
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line, shown = first_line + error.lineno - 1, text.split("\n")[error.lineno - 1][:80]
        raise ValueError(f"{path}, line {line}: {error.msg} at column {error.colno} of {shown!r}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}, line {first_line}: a lone surrogate (half a character)") from error
    except ValueError as error:
        limit = sys.get_int_max_str_digits()
        found = re.search(rf"\d{{{limit + 1},}}", text)
        line = first_line + text.count("\n", 0, found.start() if found else 0)
        raise ValueError(
            f"{path}, line {line}: an integer of more than {limit} digits; write it as text, in quotes"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{path}, line {first_line}: nested too deeply") from error
    return value


def _located(location: str, row: object) -> LocatedRow:
    if not isinstance(row, dict):
        raise ValueError(f"{location}: a row must be an object with named fields, not {kind_of(row)}")
    return LocatedRow(location, row)


def _csv(path: str) -> Iterator[LocatedRow]:
    """Read cells as strings, whether they look like numbers, dates or nothing."""
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or any(name.strip() == "" for name in header):
            raise ValueError(f"{path}, line 1: a column name is missing or repeated: {header}")
        for cells in reader:
            if not cells:
                continue
            location = f"{path}, line {reader.line_num}"
            if len(cells) != len(header):
                raise ValueError(f"{location}: {len(cells)} cells, but the header has {len(header)}")
            yield LocatedRow(location, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _parquet(path: str) -> Iterator[LocatedRow]:
    from datasets import Dataset

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in Dataset(pa.Table.from_batches([batch])):  # decodes the types that ``datasets`` adds
                    yield LocatedRow(f"{path}, row {index}", row)
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is a damaged Parquet file, after row {index}: {error}") from error


_READERS: dict[str, Callable[[str], Iterator[LocatedRow]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".json.gz": _json,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".parquet": _parquet,
}
