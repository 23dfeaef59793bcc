"""Where rows come from: a hub dataset, a folder, a data file, or a list of rows."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    get_dataset_config_names,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)

from lgrpo.tasks.files import is_data_file, read_file
from lgrpo.tasks.rows import FieldKinds, LocatedRow, Row, Table

Data: TypeAlias = str | list[dict[str, Any]]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(ABC):
    """A set of rows that can be read, whole or one by one."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def __iter__(self) -> Iterator[LocatedRow]:
        """The rows, read as they are asked for."""

    def table(self) -> Table:
        """All rows at once."""
        located = list(self)
        places = [place for place, _ in located]
        return Table([row for _, row in located], places.__getitem__)


@final
class ListSource(Source):
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__("a list of rows" if rows else "a list of no rows")
        self._rows = rows

    def __iter__(self) -> Iterator[LocatedRow]:
        kinds = FieldKinds()
        for index, row in enumerate(self._rows):
            kinds.check(f"row {index}", row)
            yield LocatedRow(f"row {index}", row)


@final
class FileSource(Source):
    """Rows of one data file, or of several, one after the other."""

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        super().__init__(name)
        self._paths = paths

    def __iter__(self) -> Iterator[LocatedRow]:
        kinds = FieldKinds()
        for path in self._paths:
            for located in read_file(path):
                kinds.check(*located)
                yield located


@final
class DiskSource(Source):
    """Rows that ``save_to_disk`` wrote."""

    def __init__(self, path: str, split: str) -> None:
        super().__init__(path)
        self._split = split

    def __iter__(self) -> Iterator[LocatedRow]:
        table = self.table()
        return table.take(range(len(table)))

    def table(self) -> Table:
        try:
            found = load_from_disk(self.name)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name} is broken as a folder that save_to_disk wrote: {error}") from error
        if isinstance(found, DatasetDict):
            check_split(self.name, self._split, found)
            found = found[self._split]
        return Table(found, lambda index: f"{self.name}, row {index}")


@final
class HubSource(Source):
    """Rows of a dataset on the Hugging Face hub, or of a folder laid out like one."""

    def __init__(self, name: str, subset: str | None, split: str) -> None:
        super().__init__(name)
        self._subset = subset
        self._split = split

    def __iter__(self) -> Iterator[LocatedRow]:
        for index, row in enumerate(self._load(streaming=True)):
            yield LocatedRow(self._place(index), row)

    def table(self) -> Table:
        return Table(self._load(streaming=False), self._place)

    def _place(self, index: int) -> str:
        return f"{self.name}, split {self._split}, row {index}"

    def _load(self, streaming: bool) -> Dataset | IterableDataset:
        try:
            return load_dataset(self.name, self._subset, split=self._split, streaming=streaming)
        except OSError as error:  # no connection, no such dataset, no access
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ConnectionError
            raise kind(
                f"the dataset {self.name!r} does not come from the Hugging Face hub: {error}. Check its name and the "
                "network; or give a local file or folder with the same rows instead of its name"
            ) from error
        except ValueError as error:
            raise ValueError(f"the dataset {self.name!r}: {error}") from error


def open_source(data: Data, subset: str | None, split: str) -> Source:
    """Whatever ``data`` names.

    Raises:
        FileNotFoundError: it looks like a file or a folder, and there is none.
        ValueError: it is a file of a format that is not read here, or a folder without this split.
    """
    if isinstance(data, list):
        return ListSource(data)
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(str(path), subset, split)
    if is_data_file(data):
        return FileSource(data, [str(path)])
    if path.is_file():
        raise ValueError(f"{data} is none of .jsonl, .json and .csv, each also as .gz, and .parquet")
    if not _HUB_NAME.fullmatch(data):
        raise FileNotFoundError(f"there is no file or folder {data}, and no hub dataset is called that")
    return HubSource(data, subset, split)


def has_splits(data: Data) -> bool:
    """Whether a split is chosen by name: in a hub dataset or a folder, not in a file or a list."""
    if isinstance(data, list) or is_data_file(data):
        return False
    return not _is_saved_alone(Path(data).expanduser())


def check_split(name: str, split: str, available: Any) -> None:
    """Says which splits there are where the one asked for is not among them."""
    if split not in (names := sorted(str(one) for one in available)):
        raise ValueError(
            f"{name} has no split {split!r}, only {names}: set task.train_split and task.validation_split (null: none)"
        )


def _open_folder(path: str, subset: str | None, split: str) -> Source:
    if _is_saved_alone(Path(path)) or (Path(path) / "dataset_dict.json").is_file():
        return DiskSource(path, split)
    try:
        has_subsets = get_dataset_config_names(path) != ["default"]
        files = load_dataset_builder(path, subset if has_subsets else None).config.data_files or {}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there are no data files in the folder {path}") from error
    check_split(path, split, files)
    paths = next([str(one) for one in found] for name, found in files.items() if str(name) == split)
    if all(is_data_file(one) for one in paths):
        return FileSource(path, paths)
    return HubSource(path, subset if has_subsets else None, split)


def _is_saved_alone(path: Path) -> bool:
    """Whether ``Dataset.save_to_disk`` wrote the folder: rows without splits."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
