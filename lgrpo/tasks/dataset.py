"""Tasks over data of one's own: a Hugging Face dataset by hub name, a local file or folder, or rows in memory."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, final

from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.rewards import BatchReward
from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.rows import LocatedRow, Row, RowStream, Table
from lgrpo.tasks.source import Source, has_splits, open_source
from lgrpo.tasks.template import Template


class RowTask(Task):
    """A task whose rows are data: read, named as the task names them, and chosen from by a seed."""

    def __init__(
        self,
        reward: BatchReward,
        train: str | list[dict[str, Any]] | None,
        validation: str | list[dict[str, Any]] | None = None,
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "test",
        template: Template = Template(),  # noqa: B008
        fields: dict[str, str] | None = None,
        num_train: PositiveInt | None = None,
        num_validation: PositiveInt | None = None,
        num_held_out: NonNegativeInt = 0,
        num_examples: NonNegativeInt = 0,
        subset_seed: int = 0,
        streaming: bool = False,
    ) -> None:
        """
        Args:
            reward: How an answer is scored.
            train: Hub name, or a folder (of data files, or one that ``save_to_disk`` wrote), or a .jsonl, .json, .csv
                (.gz too) or .parquet file, or the rows themselves; null: nothing to train on.
            validation: Likewise; by default the validation split of ``train``, and none where ``train`` has no splits.
            subset: Subset ("config") of a hub dataset.
            train_split: Split of a hub dataset or folder to train on.
            validation_split: Split of a hub dataset or folder to validate on; null: none.
            template: How a row becomes a prompt.
            fields: What the fields are called in the data: ``question: problem`` takes ``question`` from ``problem``.
            num_train: Train on so many rows, chosen by the seed; by default all.
            num_validation: Validate on so many rows, chosen by the seed; by default all.
            num_held_out: So many training rows, chosen by the seed, are validated on instead of trained on.
            num_examples: So many training rows, chosen by the seed, are shown in every prompt as solved examples. They
                are neither trained nor validated on.
            subset_seed: Chooses the rows, the same ones in every run.
            streaming: Read training rows as they are needed and keep none, for a set that does not fit.
        """
        super().__init__(template, reward)
        name = type(self).__name__
        counts = {"num_train": num_train, "num_validation": num_validation}
        counts |= {"num_held_out": num_held_out or None, "num_examples": num_examples or None}
        if wrong := {setting: count for setting, count in counts.items() if count is not None and count < 1}:
            raise ValueError(f"task has {wrong}: a number of rows is 1 or more")
        if num_held_out and (validation is not None or num_validation is not None):
            raise ValueError(
                "task.num_held_out takes the validation set out of the training set: leave out task.validation and "
                "task.num_validation, or task.num_held_out"
            )
        if train is None and validation is None:
            raise ValueError(f"{name} has neither task.train nor task.validation")
        if streaming and (num_train or num_held_out or num_examples):
            raise ValueError(
                "task.num_train, task.num_held_out and task.num_examples choose among all rows, and a stream does not "
                "know them all: leave them out, or task.streaming"
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
        """A row of the data as a row of the task; None leaves it out.

        Raises:
            ValueError: the row cannot be one of this task.
        """

    @property
    def template(self) -> Template:
        return self._with_examples if self._num_examples else self._template

    def rows(self, split: Split) -> Sequence[Row]:
        return [row for _, row in self._located(split)]

    def places(self, split: Split) -> Sequence[str] | None:
        return [place for place, _ in self._located(split)]

    def _located(self, split: Split) -> list[LocatedRow]:
        if split == "validation":
            return self._validation_rows
        if self.streaming:
            raise ValueError("task.streaming is set: the training rows are read one by one (train_stream), never kept")
        return self._parts.train

    def train_stream(self) -> RowStream | None:
        return _ReadStream(self, self._train_source()) if self.streaming else None

    def read_located(self, located: LocatedRow, split: Split) -> Row | None:
        """``read``, the fields renamed before it; an error names the row's place."""
        place, row = located
        if missing := sorted(set(self.fields.values()) - set(row)):
            raise ValueError(f"{place}: task.fields reads {missing}, but the row has only {sorted(row)}")
        renamed = {**row, **{own: row[theirs] for own, theirs in self.fields.items()}} if self.fields else row
        try:
            return self.read(renamed, split)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    @cached_property
    def _with_examples(self) -> Template:
        return replace(
            self._template, examples=[*(self._template.examples or []), *(dict(row) for _, row in self._parts.examples)]
        )

    @cached_property
    def _parts(self) -> _Parts:
        """The training set, cut into what is shown, held out and trained on. Copies of a row are in one part only."""
        source = self._train_source()
        is_chosen = bool(self._num_train or self._num_held_out or self._num_examples)
        rows = self._read_table("train", source, is_chosen)
        examples = self._take(rows, "num_examples", self._num_examples, ())
        held_out = self._take(rows, "num_held_out", self._num_held_out, examples)
        train = self._take(rows, "num_train", self._num_train, (*examples, *held_out))
        if not train:
            others = f" but for {len(examples) + len(held_out)} that are shown or held out, and copies of them"
            raise ValueError(
                f"no row of the train set is left to train on: {source.name} has none"
                + (others if examples or held_out else "")
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

    def _read_table(self, split: Split, source: Source, is_chosen: bool) -> Iterator[_Numbered]:
        """The rows of a set, each with its number in it, as they stand or in the order of the seed."""
        table = source.table()
        if len(table) == 0:
            raise ValueError(f"the {split} set is empty: {source.name}")
        return self._read_rows(table, split, is_chosen)

    def _read_rows(self, table: Table, split: Split, is_chosen: bool) -> Iterator[_Numbered]:
        order, num_left_out = list(range(len(table))), 0
        if is_chosen:
            random.Random(f"{self.subset_seed} {split}").shuffle(order)
        for number, located in zip(order, table.take(order), strict=True):
            row = self.read_located(located, split)
            if row is None:
                num_left_out += 1
            else:
                yield _Numbered(number, located.place, row)
        if num_left_out:
            rank_zero_info(f"{num_left_out} of {len(table)} rows of the {split} set left out by {type(self).__name__}.")

    def _take(
        self, rows: Iterator[_Numbered], setting: str, count: int | None, but_for: Sequence[_Numbered]
    ) -> list[_Numbered]:
        """The next rows, all of them where there is no count, without copies of some others."""
        others = {self._question(one) for one in but_for}
        taken = list(islice((one for one in rows if self._question(one) not in others), count))
        if count is not None and len(taken) < count:
            raise ValueError(f"task.{setting} is {count}, but there are only {len(taken)} rows to choose from")
        return taken

    def _question(self, one: _Numbered) -> tuple[str, ...]:
        """What of a row the prompt shows. One that lacks some of it, to be refused later, is a copy of no other."""
        if self._template.fields() - one.row.keys():
            return (f"row {one.number}", "")
        return tuple(str(one.row[name]) for name in sorted(self._template.fields()))


@final
class DatasetTask(RowTask):
    """Prompts from data as it is, scored by a reward of one's choice."""

    def read(self, row: Row, split: Split) -> Row:
        return row


class _Numbered(NamedTuple):
    """A row and its number in the set."""

    number: int
    place: str
    row: Row


class _Parts(NamedTuple):
    """The training set, cut up."""

    examples: list[LocatedRow]
    held_out: list[LocatedRow]
    train: list[LocatedRow]


@final
class _ReadStream(RowStream):
    """Rows of a source as a task reads them, none of them kept."""

    def __init__(self, task: RowTask, source: Source) -> None:
        self._task = task
        self._source = source

    def __iter__(self) -> Iterator[LocatedRow]:
        is_empty = True
        for located in self._source:
            is_empty = False
            row = self._task.read_located(located, "train")
            if row is not None:
                yield LocatedRow(located.place, row)
        if is_empty:
            raise ValueError(f"the train set is empty: {self._source.name}")


def _in_order(rows: Sequence[_Numbered]) -> list[LocatedRow]:
    return [LocatedRow(one.place, one.row) for one in sorted(rows, key=lambda one: one.number)]
