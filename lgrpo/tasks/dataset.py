"""Tasks over datasets: a hub dataset, a local file or folder, or rows in memory."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, final

from lightning.pytorch.utilities import rank_zero_info

from lgrpo.checks import check_count
from lgrpo.rewards import BatchReward
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import LocatedRow, Row, RowStream
from lgrpo.tasks.source import Data, Source, has_splits, open_source
from lgrpo.tasks.template import Template


class RowTask(Task):
    """Task over a dataset: it renames the fields, converts each row (``read``) and selects rows by a seed."""

    def __init__(
        self,
        reward: BatchReward,
        train: Data | None,
        validation: Data | None = None,
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "test",
        template: Template = Template(),  # noqa: B008
        fields: dict[str, str] | None = None,
        num_train: int | None = None,
        num_validation: int | None = None,
        num_held_out: int = 0,
        num_examples: int = 0,
        subset_seed: int = 0,
        streaming: bool = False,
    ) -> None:
        """
        Args:
            reward: Reward of a completion.
            train: Hub name, folder (of data files, or written by ``save_to_disk``), .jsonl, .json, .csv (each also as
                .gz) or .parquet file, or list of rows; null: no training set.
            validation: Likewise; the default is the validation split of ``train`` if it has splits.
            subset: Subset ("config") of a hub dataset.
            train_split: Split of a hub dataset or folder to train on.
            validation_split: Split of a hub dataset or folder to validate on; null: none.
            template: Template that turns a row into a prompt.
            fields: Names of the fields in the data: ``question: problem`` reads ``question`` from ``problem``.
            num_train: Number of training rows, chosen by the seed; the default is all.
            num_validation: Number of validation rows, chosen by the seed; the default is all.
            num_held_out: Number of training rows, chosen by the seed, to validate on instead of training on them.
            num_examples: Number of training rows, chosen by the seed, shown in every prompt as solved examples. They
                are neither trained nor validated on.
            subset_seed: Seed that chooses the rows, the same in every run.
            streaming: Read training rows when they are needed and keep none, for a set that does not fit into memory.
        """
        super().__init__(template, reward)
        name = type(self).__name__
        check_count("task.num_train", num_train, at_least=1)
        check_count("task.num_validation", num_validation, at_least=1)
        check_count("task.num_held_out", num_held_out, at_least=0)
        check_count("task.num_examples", num_examples, at_least=0)
        if num_held_out and (validation is not None or num_validation is not None):
            raise ValueError(
                "task.num_held_out takes the validation set from the training set: set either that, or task.validation "
                "and task.num_validation"
            )
        if train is None and validation is None:
            raise ValueError(f"{name} has neither task.train nor task.validation")
        if streaming and (num_train or num_held_out or num_examples):
            raise ValueError(
                "task.num_train, task.num_held_out and task.num_examples choose among all rows, which a stream does "
                "not know: set either these or task.streaming"
            )
        if streaming and train is None:
            raise ValueError(f"{name} has no training set to stream: set task.train")
        self.fields = fields or {}
        self.subset_seed = subset_seed
        self.streaming = streaming
        self._train, self._validation, self._subset = train, validation, subset
        self._train_split, self._validation_split = train_split, validation_split
        self._num_train, self._num_validation = num_train, num_validation
        self._num_held_out, self._num_examples = num_held_out, num_examples

    @abstractmethod
    def read(self, row: Row, split: Split) -> Row | None:
        """Convert a row of the data into a row of the task; None leaves it out.

        Raises:
            ValueError: If the row cannot be converted.
        """

    @property
    def template(self) -> Template:
        return self._with_examples if self._num_examples else self._template

    def rows(self, split: Split) -> Sequence[Row]:
        return [row for _, row in self._located(split)]

    def locations(self, split: Split) -> Sequence[str] | None:
        return [location for location, _ in self._located(split)]

    def _located(self, split: Split) -> list[LocatedRow]:
        if split == "validation":
            return self._validation_rows
        if self.streaming:
            raise ValueError("task.streaming is set: the training rows are read one by one (train_stream), never kept")
        return self._parts.train

    def train_stream(self) -> RowStream | None:
        return _ReadStream(self, self._train_source()) if self.streaming else None

    def read_located(self, located: LocatedRow, split: Split) -> Row | None:
        """Rename the fields of a row and ``read`` it; an error names its location."""
        location, row = located
        if missing := sorted(set(self.fields.values()) - set(row)):
            raise ValueError(f"{location}: task.fields reads {missing}, but the row has only {sorted(row)}")
        renamed = {**row, **{name: row[in_data] for name, in_data in self.fields.items()}} if self.fields else row
        try:
            return self.read(renamed, split)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error

    @cached_property
    def _with_examples(self) -> Template:
        return replace(
            self._template, examples=[*(self._template.examples or []), *(dict(row) for _, row in self._parts.examples)]
        )

    @cached_property
    def _parts(self) -> _Parts:
        """Training set split into examples, held-out rows and training rows. Copies of a row are in one part only."""
        source = self._train_source()
        is_shuffled = bool(self._num_train or self._num_held_out or self._num_examples)
        rows = self._read_table("train", source, is_shuffled)
        examples = self._take(rows, "num_examples", self._num_examples, ())
        held_out = self._take(rows, "num_held_out", self._num_held_out, examples)
        train = self._take(rows, "num_train", self._num_train, (*examples, *held_out))
        if not train:
            others = f" except {len(examples) + len(held_out)} examples and held-out rows, and copies of them"
            raise ValueError(
                f"no row of the train set is left: {source.name} has none" + (others if examples or held_out else "")
            )
        return _Parts(examples=_in_order(examples), held_out=_in_order(held_out), train=_in_order(train))

    @cached_property
    def _validation_rows(self) -> list[LocatedRow]:
        if self._num_held_out:
            return self._parts.held_out
        source = self._validation_source()
        if source is None:
            return []
        rows = self._read_table("validation", source, self._num_validation is not None)
        shown = [_Numbered(0, *example) for example in self._parts.examples] if self._num_examples else []
        chosen = self._take(rows, "num_validation", self._num_validation, shown)
        if not chosen:
            raise ValueError(f"no row of the validation set is left: {source.name}")
        return _in_order(chosen)

    def _train_source(self) -> Source:
        if self._train is None:
            raise ValueError(f"{type(self).__name__} has no training set: validate on it, or set task.train")
        return open_source(self._train, self._subset, self._train_split)

    def _validation_source(self) -> Source | None:
        if self._validation is not None:
            return open_source(self._validation, self._subset, self._validation_split or "test")
        if self._train is None or self._validation_split is None or not has_splits(self._train):
            return None
        return open_source(self._train, self._subset, self._validation_split)

    def _read_table(self, split: Split, source: Source, is_shuffled: bool) -> Iterator[_Numbered]:
        """Yield the rows of a set with their numbers, in order or shuffled by the seed."""
        table = source.table()
        if len(table) == 0:
            raise ValueError(f"the {split} set is empty: {source.name}")
        order, num_left_out = list(range(len(table))), 0
        if is_shuffled:
            random.Random(f"{self.subset_seed} {split}").shuffle(order)
        for number, located in zip(order, table.take(order), strict=True):
            row = self.read_located(located, split)
            if row is None:
                num_left_out += 1
            else:
                yield _Numbered(number, located.location, row)
        if num_left_out:
            name = type(self).__name__
            rank_zero_info(f"{name} leaves out {num_left_out} of {len(table)} rows of the {split} set.")

    def _take(
        self, rows: Iterator[_Numbered], setting: str, count: int | None, excluded: Sequence[_Numbered]
    ) -> list[_Numbered]:
        """Return the next ``count`` rows, or all if it is None, without copies of the excluded ones."""
        questions = {self._question(row) for row in excluded}
        taken = list(islice((row for row in rows if self._question(row) not in questions), count))
        if count is not None and len(taken) < count:
            raise ValueError(f"task.{setting} is {count}, but there are only {len(taken)} rows to choose from")
        return taken

    def _question(self, numbered: _Numbered) -> tuple[str, ...]:
        """Return the fields of the prompt, equal for copies. A row that lacks one is rejected later."""
        if self._template.fields() - numbered.row.keys():
            return (f"row {numbered.number}", "")
        return tuple(str(numbered.row[name]) for name in sorted(self._template.fields()))


@final
class DatasetTask(RowTask):
    """Task over unchanged rows, with any reward."""

    def read(self, row: Row, split: Split) -> Row:
        return row


class _Numbered(NamedTuple):
    """Row with its location and its number in the set."""

    number: int
    location: str
    row: Row


class _Parts(NamedTuple):
    """Parts of the training set."""

    examples: list[LocatedRow]
    held_out: list[LocatedRow]
    train: list[LocatedRow]


@final
class _ReadStream(RowStream):
    """Rows of a source as a task reads them."""

    def __init__(self, task: RowTask, source: Source) -> None:
        self._task = task
        self._source = source

    def __iter__(self) -> Iterator[LocatedRow]:
        is_empty = True
        for located in self._source:
            is_empty = False
            row = self._task.read_located(located, "train")
            if row is not None:
                yield LocatedRow(located.location, row)
        if is_empty:
            raise ValueError(f"the train set is empty: {self._source.name}")


def _in_order(rows: Sequence[_Numbered]) -> list[LocatedRow]:
    return [LocatedRow(row.location, row.row) for row in sorted(rows, key=lambda row: row.number)]
