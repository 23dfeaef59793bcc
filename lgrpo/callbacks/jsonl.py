"""JSON-lines files that stay consistent over crashes and resumed runs."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.hooks import policy_owner
from lgrpo.run.folder import run_folder


def append_lines(trainer: L.Trainer, name: str, rows: Sequence[dict[str, Any]], key: str) -> None:
    """Append a line for each row to a file of the run. If that fails, warn and count it: training continues.

    Removes an incomplete last line and, in a resumed run, lines that are written again: those whose increasing ``key``
    is not below the first row's.
    """
    path = run_folder(trainer) / name
    try:
        _append(path, rows, key, resumed=trainer.ckpt_path is not None)
    except OSError as error:
        policy_owner(trainer).add_metric("fault/file_writes", 1.0)
        warnings.warn(f"{path} could not be written ({error.strerror}); training continues", stacklevel=2)


def _append(path: Path, rows: Sequence[dict[str, Any]], key: str, resumed: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        last = _last_line(file)
        if resumed and last is not None and rows and _key(last, key) >= rows[0][key]:
            _drop_lines(path, key, rows[0][key])
    with path.open("ab") as file:  # a lone surrogate is written as its JSON escape
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.write(text.encode("utf-8", errors="backslashreplace"))


def _last_line(file: Any) -> bytes | None:
    """Return the last complete line, and truncate the file after it."""
    end, size = file.seek(0, os.SEEK_END), 1 << 16
    while True:
        start = max(0, end - size)
        file.seek(start)
        tail = file.read(end - start)
        complete, newline, _ = tail.rpartition(b"\n")
        _, earlier, line = complete.rpartition(b"\n")
        if start == 0 or earlier:
            file.truncate(start + len(complete) + len(newline))
            return line if newline else None
        size *= 4


def _drop_lines(path: Path, key: str, first: int) -> None:
    kept = path.with_name(path.name + ".part")
    with path.open("rb") as old, kept.open("wb") as new:
        new.writelines(line for line in old if _key(line, key) < first)
    kept.replace(path)


def _key(line: bytes, key: str) -> float:
    """Return a line's key; -1 for an invalid line, so that it is kept."""
    try:
        return float(json.loads(line)[key])
    except (ValueError, KeyError, TypeError):
        return -1.0
