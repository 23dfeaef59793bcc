"""Sources of rows: a hub dataset, a folder, a data file, or a list of rows."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from lgrpo.tasks.files import is_data_file, read_file
from lgrpo.tasks.rows import FieldKinds, LocatedRow, Row, Table

if TYPE_CHECKING:  # `datasets` is slow to import: the functions that read data import it
    from datasets import Dataset, IterableDataset

Data: TypeAlias = str | list[dict[str, Any]]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(ABC):
    """Set of rows that can be read as a table or one by one."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def __iter__(self) -> Iterator[LocatedRow]:
        """Return an iterator that reads the rows one by one."""

    def table(self) -> Table:
        """Return all rows."""
        located = list(self)
        locations = [location for location, _ in located]
        return Table([row for _, row in located], locations.__getitem__)


@final
class ListSource(Source):
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__("a list of rows" if rows else "an empty list of rows")
        self._rows = rows

    def __iter__(self) -> Iterator[LocatedRow]:
        kinds = FieldKinds()
        for index, row in enumerate(self._rows):
            kinds.check(f"row {index}", row)
            yield LocatedRow(f"row {index}", row)


@final
class FileSource(Source):
    """Rows of one data file, or of several in order."""

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
    """Rows written by ``save_to_disk``."""

    def __init__(self, path: str, split: str) -> None:
        super().__init__(path)
        self._split = split

    def __iter__(self) -> Iterator[LocatedRow]:
        table = self.table()
        return table.take(range(len(table)))

    def table(self) -> Table:
        from datasets import DatasetDict, load_from_disk

        try:
            dataset = load_from_disk(self.name)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.name} is a damaged folder of save_to_disk: {error}") from error
        if isinstance(dataset, DatasetDict):
            check_split(self.name, self._split, dataset)
            dataset = dataset[self._split]
        return Table(dataset, lambda index: f"{self.name}, row {index}")


@final
class HubSource(Source):
    """Rows of a dataset on the Hugging Face hub, or of a folder with the same layout."""

    def __init__(self, name: str, subset: str | None, split: str) -> None:
        super().__init__(name)
        self._subset = subset
        self._split = split

    def __iter__(self) -> Iterator[LocatedRow]:
        for index, row in enumerate(self._load(streaming=True)):
            yield LocatedRow(self._location(index), row)

    def table(self) -> Table:
        return Table(self._load(streaming=False), self._location)

    def _location(self, index: int) -> str:
        return f"{self.name}, split {self._split}, row {index}"

    def _load(self, streaming: bool) -> Dataset | IterableDataset:
        from datasets import load_dataset

        try:
            return load_dataset(self.name, self._subset, split=self._split, streaming=streaming)
        except OSError as error:  # no connection, no such dataset, no access
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ConnectionError
            raise kind(
                f"the dataset {self.name!r} cannot be loaded from the Hugging Face hub: {error}. Check its name and "
                "the network, or set a local file or folder with the same rows instead of its name"
            ) from error
        except ValueError as error:
            raise ValueError(f"the dataset {self.name!r}: {error}") from error


def open_source(data: Data, subset: str | None, split: str) -> Source:
    """Return the source that ``data`` names; raise an error if there is none, or it lacks the split."""
    if isinstance(data, list):
        return ListSource(data)
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(str(path), subset, split)
    if is_data_file(data):
        return FileSource(data, [str(path)])
    if path.is_file():
        raise ValueError(f"{data} has none of the formats .jsonl, .json, .csv (each also as .gz) and .parquet")
    if not _HUB_NAME.fullmatch(data):
        raise FileNotFoundError(f"there is no file or folder {data}, and it is not the name of a hub dataset")
    return HubSource(data, subset, split)


def has_splits(data: Data) -> bool:
    """Return whether the data has named splits: a hub dataset or a folder, not a file or a list."""
    if isinstance(data, list) or is_data_file(data):
        return False
    return not _has_one_saved_dataset(Path(data).expanduser())


def check_split(name: str, split: str, available: Any) -> None:
    """Raise a ``ValueError`` that lists the available splits if ``split`` is not among them."""
    if split not in (names := sorted(str(name) for name in available)):
        raise ValueError(
            f"{name} has no split {split!r}, only {names}: set task.train_split and task.validation_split (null: none)"
        )


def _open_folder(path: str, subset: str | None, split: str) -> Source:
    from datasets import get_dataset_config_names, load_dataset_builder

    if _has_one_saved_dataset(Path(path)) or (Path(path) / "dataset_dict.json").is_file():
        return DiskSource(path, split)
    try:
        has_subsets = get_dataset_config_names(path) != ["default"]
        files = load_dataset_builder(path, subset if has_subsets else None).config.data_files or {}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there are no data files in the folder {path}") from error
    check_split(path, split, files)
    paths = next([str(path) for path in paths] for name, paths in files.items() if str(name) == split)
    if all(is_data_file(path) for path in paths):
        return FileSource(path, paths)
    return HubSource(path, subset if has_subsets else None, split)


def _has_one_saved_dataset(path: Path) -> bool:
    """Return whether ``Dataset.save_to_disk`` wrote the folder, which then has no splits."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
