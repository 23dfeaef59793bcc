"""The logger that writes ``metrics.csv``."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter


class MetricsLogger(CSVLogger):
    """Lightning's ``CSVLogger`` with a file that is complete at every moment.

    Lightning's logger writes the whole file again, in place, when a metric is logged for the first time: a process that
    is killed meanwhile, or a disk that is full, loses every row. This one writes the new file beside the old one and
    then renames it. Rows that could not be written are kept and written with the next one.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment


class _Writer(ExperimentWriter):
    def save(self) -> None:
        """Write the rows that were logged since the last successful call. If that fails, the file stays as it was."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        path.parent.mkdir(parents=True, exist_ok=True)  # someone may have deleted it
        names = sorted(set(self.metrics_keys).union(*self.metrics))
        if names == self.metrics_keys and path.exists():
            _append(path, names, self.metrics)
        else:
            _replace(path, names, [*_read(path), *self.metrics])
        self.metrics, self.metrics_keys = [], names


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _append(path: Path, names: list[str], rows: Iterable[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    csv.DictWriter(text, names).writerows(rows)
    data = text.getvalue().encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)  # leaves no part of a row
            raise
    finally:
        os.close(descriptor)


def _replace(path: Path, names: list[str], rows: Iterable[dict[str, Any]]) -> None:
    new = path.with_suffix(".new")
    try:
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
