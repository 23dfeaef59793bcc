"""Tasks over data of one's own: a Hugging Face dataset by hub name, a local file, or rows in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from datasets import Dataset, load_dataset

from lgrpo.rewards import BatchReward
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.template import Template

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@final
class DatasetTask(Task):
    """Prompts from ``datasets``, scored by a reward of one's choice."""

    def __init__(
        self,
        reward: BatchReward,
        train: str | list[dict[str, Any]],
        validation: str | list[dict[str, Any]] | None = None,
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
        template: Template = Template(),  # noqa: B008
    ) -> None:
        """
        Args:
            reward: How an answer is scored.
            train: Hub name, or a .jsonl, .json, .parquet or .csv file (.gz too), or the rows themselves.
            validation: Likewise; by default the validation split of ``train``'s hub name.
            subset: Subset ("config") of a hub dataset.
            train_split: Split of a hub dataset to train on.
            validation_split: Split of a hub dataset to validate on.
            template: How a row becomes a prompt.
        """
        super().__init__(template, reward)
        if validation is None and not (isinstance(train, str) and _data_file(train) is None):
            raise ValueError("task.validation is missing: a file or a list of rows has no split to validate on")
        self._sources = {
            "train": (train, train_split),
            "validation": (train if validation is None else validation, validation_split),
        }
        self._subset = subset
        self._loaded: dict[str, Sequence[Mapping[str, Any]]] = {}

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        if split not in self._loaded:
            source, name = self._sources[split]
            rows = source if isinstance(source, list) else _load(source, self._subset, name)
            if len(rows) == 0:
                raise ValueError(
                    f"the {split} set is empty: {source if isinstance(source, str) else 'a list of no rows'}"
                )
            self._loaded[split] = rows
        return self._loaded[split]


def _data_file(source: str) -> str | None:
    """The format of a data file by its ending; None for a hub name."""
    suffixes = [s for s in Path(source).suffixes if s != ".gz"]
    return _FORMATS.get(suffixes[-1]) if suffixes else None


def _load(source: str, subset: str | None, split: str) -> Dataset:
    format_name = _data_file(source)
    if format_name is None:
        return load_dataset(source, subset, split=split)
    if not Path(source).is_file():
        raise FileNotFoundError(f"there is no data file {source}")
    return load_dataset(format_name, data_files=source, split="train")
