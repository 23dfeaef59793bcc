"""The prompts of a split, and which of them stands where in a run."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, final

import torch
from transformers import PreTrainedTokenizerBase

from lgrpo.data.difficulty import DifficultySampling
from lgrpo.settings import fingerprint
from lgrpo.tasks import LocatedRow, RowStream, Split, Task
from lgrpo.types import Prompt

_NUM_KEPT = 1024
"""Prompts of a stream that stay at hand, for one that is asked for twice."""


class RenderedRow(NamedTuple):
    """A row as the engine will see it."""

    text: str
    token_ids: list[int]
    row: Mapping[str, Any]

    def at(self, position: int) -> Prompt:
        return Prompt(text=self.text, token_ids=self.token_ids, row=self.row, position=position)


class Prompts(ABC):
    """Prompts laid out over a run without end: every position has one, the same on every rank and after a resume."""

    is_streamed: bool
    """Whether prompts are read in order as they are needed. Then a position far ahead is out of reach."""
    num_dropped: int
    """Rows left out so far, since they were too long."""

    @abstractmethod
    def __len__(self) -> int:
        """Prompts in a pass."""

    @abstractmethod
    def at(self, position: int) -> Prompt:
        """The prompt at a position of the run."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """No prompt has more tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A few letters that stand for which prompts these are."""


@final
class PromptSet(Prompts):
    """A task's prompts, rendered, tokenised and checked once; ``at`` lays them out over a run without end."""

    is_streamed = False

    def __init__(
        self,
        task: Task,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        overlong: Literal["error", "drop"] = "error",
        shuffle_seed: int | None = None,
        difficulty: DifficultySampling | None = None,
    ) -> None:
        """
        Args:
            task: Where the rows and the template come from.
            split: Which rows.
            tokenizer: The policy's.
            max_tokens: Longest prompt.
            overlong: What becomes of a longer one.
            shuffle_seed: Order of every pass over the rows; None: as they stand.
            difficulty: Draws rows by weight instead of each once in a pass.
        """
        if difficulty is not None and shuffle_seed is None:
            raise ValueError("data.difficulty draws rows at random: it needs data.shuffle")
        self.shuffle_seed = shuffle_seed
        self.num_dropped = 0
        self._items: list[RenderedRow] = []
        weights: list[float] = []
        places = task.places(split)
        for index, row in enumerate(task.rows(split)):
            known = places is not None and not places[index].startswith("row ")  # a list has no other place
            label = f"{index} ({places[index]})" if places is not None and known else str(index)
            item = render_row(task, split, label, row, tokenizer, max_tokens, overlong)
            weight = 1.0 if difficulty is None else row_weight(difficulty, split, index, row)
            if item is None:
                self.num_dropped += 1
            elif weight > 0:
                self._items.append(item)
                weights.append(weight)
        if not self._items:
            if difficulty is not None and self.num_dropped < len(task.rows(split)):
                values = sorted({str(row[difficulty.field]) for row in task.rows(split)})[:20]
                raise ValueError(
                    f"no row of the {split} set has a weight in data.difficulty: {difficulty.field} is one of "
                    f"{values}, the weights are for {sorted(difficulty.weights)}"
                )
            raise ValueError(f"no prompt of the {split} set fits into {max_tokens} tokens")
        self._bounds = None if difficulty is None else torch.tensor(weights, dtype=torch.float64).cumsum(0)
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._items)

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the run: pass after pass over the rows, each in an order of its own."""
        epoch, offset = divmod(position, len(self))
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch) if self._bounds is None else self._draw(epoch, self._bounds))
        return self._items[self._order[1][offset]].at(position)

    @property
    def longest(self) -> int:
        return max(len(item.token_ids) for item in self._items)

    def fingerprint(self) -> str:
        return f"{len(self)} prompts, {fingerprint(item.text for item in self._items)}"

    def _permutation(self, epoch: int) -> list[int]:
        if self.shuffle_seed is None:
            return list(range(len(self)))
        return torch.randperm(len(self), generator=self._chance(epoch)).tolist()

    def _draw(self, epoch: int, bounds: torch.Tensor) -> list[int]:
        """As many rows as there are, each drawn by its weight whatever was drawn before."""
        places = torch.rand(len(self), generator=self._chance(epoch), dtype=torch.float64) * bounds[-1]
        return torch.searchsorted(bounds, places, right=True).clamp_(max=len(self) - 1).tolist()

    def _chance(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self.shuffle_seed, epoch)) % 2**63)


@final
class StreamedPrompts(Prompts):
    """Prompts of a training set that streams: rows are read forward and forgotten, and from the start to go back."""

    is_streamed = True

    def __init__(
        self,
        task: Task,
        stream: RowStream,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        overlong: Literal["error", "drop"] = "error",
        shuffle_seed: int | None = None,
        buffer_size: int = 1024,
    ) -> None:
        """
        Args:
            task: Where the template comes from.
            stream: Where the rows come from.
            tokenizer: The policy's.
            max_tokens: Longest prompt.
            overlong: What becomes of a longer one.
            shuffle_seed: Order of every pass over the rows; None: as they stand.
            buffer_size: Rows that are shuffled among each other at a time.
        """
        self.shuffle_seed = shuffle_seed
        self.buffer_size = buffer_size
        self._task, self._stream, self._tokenizer = task, stream, tokenizer
        self._max_tokens, self._overlong = max_tokens, overlong
        self._kept: dict[int, RenderedRow] = {}
        self._start_again()
        self._first = fingerprint([self.at(0).text])  # a stream that cannot be read says so before the run starts

    def __len__(self) -> int:
        raise ValueError("nobody knows how long a streamed training set is: set data.num_rollouts")

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the run: what was read before it is passed over, and rendered only if need be."""
        if position not in self._kept:
            if position < self._next:
                self._start_again()
            while self._next <= position:
                self._read_on(is_wanted=self._next == position)
        return self._kept[position].at(position)

    @property
    def longest(self) -> int:
        return self._max_tokens

    def fingerprint(self) -> str:
        """Of the first one alone: nobody has seen the rest."""
        return f"a stream, {self._first}"

    def _start_again(self) -> None:
        self.num_dropped = 0
        self._next = 0
        self._rows = self._passes()

    def _read_on(self, is_wanted: bool) -> None:
        """Takes the next row; unless it is dropped, it has the next position."""
        place, row = next(self._rows)
        if is_wanted or self._overlong == "drop":  # whether it is dropped moves all that follow
            item = render_row(self._task, "train", f"({place})", row, self._tokenizer, self._max_tokens, self._overlong)
            if item is None:
                self.num_dropped += 1
                return
            if is_wanted:
                self._kept[self._next] = item
                if len(self._kept) > _NUM_KEPT:
                    del self._kept[next(iter(self._kept))]
        self._next += 1

    def _passes(self) -> Iterator[LocatedRow]:
        """All rows, again and again."""
        for epoch in count():
            first = self._next
            yield from self._stream if self.shuffle_seed is None else self._shuffled(epoch)
            if self._next == first:
                raise ValueError(f"no prompt of the train set fits into {self._max_tokens} tokens")

    def _shuffled(self, epoch: int) -> Iterator[LocatedRow]:
        """A pass in an order of its own, as far as the buffer reaches."""
        chance = random.Random(f"{self.shuffle_seed} {epoch}")
        buffer: list[LocatedRow] = []
        for located in self._stream:
            if len(buffer) < self.buffer_size:
                buffer.append(located)
                continue
            place = chance.randrange(len(buffer))
            located, buffer[place] = buffer[place], located
            yield located
        chance.shuffle(buffer)
        yield from buffer


def load_prompts(
    task: Task,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    overlong: Literal["error", "drop"] = "error",
    shuffle_seed: int | None = None,
    difficulty: DifficultySampling | None = None,
) -> Prompts:
    """A task's prompts: a set, or a stream where the training rows are too many to keep."""
    stream = task.train_stream() if split == "train" else None
    if stream is None:
        return PromptSet(task, split, tokenizer, max_tokens, overlong, shuffle_seed, difficulty)
    if difficulty is not None:
        raise ValueError(
            "data.difficulty draws from all rows, and a stream does not keep them: leave out one of the two"
        )
    return StreamedPrompts(task, stream, tokenizer, max_tokens, overlong, shuffle_seed)


def render_row(
    task: Task,
    split: Split,
    index: str,
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    overlong: Literal["error", "drop"],
) -> RenderedRow | None:
    """A row, checked, rendered and tokenised; None where it is too long and to be dropped."""
    check_row(task, split, index, row)
    text, token_ids = task.template.render(row, tokenizer)
    if not token_ids:
        raise ValueError(f"prompt {index} of the {split} set is empty: {dict(row)}")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in token_ids and tokenizer.unk_token not in text:
        raise ValueError(f"prompt {index} of the {split} set has characters the tokenizer cannot spell: {text[:200]!r}")
    if len(token_ids) <= max_tokens:
        return RenderedRow(text, token_ids, row)
    if overlong == "drop":
        return None
    raise ValueError(
        f"prompt {index} of the {split} set has {len(token_ids)} tokens, but only {max_tokens} fit: {text[:60]!r}… "
        "Raise data.max_prompt_tokens where it is set, lower data.sampling.max_tokens to leave prompts more of the "
        "context, or set data.overlong_prompts to drop"
    )


def check_row(task: Task, split: str, index: str, row: Mapping[str, Any]) -> None:
    """Names the fields a template or reward asks for and a row does not have, or has nothing of use in."""
    fields = task.template.fields()
    for who, wanted in (("template", fields), ("reward", task.reward.required_fields())):
        if missing := sorted(wanted - set(row)):
            raise ValueError(f"the {who} reads {missing}, but row {index} of the {split} set has only {sorted(row)}")
        if absent := sorted(name for name in wanted if row[name] is None):
            raise ValueError(f"the {who} reads {absent}, but there is nothing in row {index} of the {split} set")
    if fields and all(str(row[name]).strip() == "" for name in fields):
        raise ValueError(f"prompt {index} of the {split} set is empty: {dict(row)}")
    try:
        task.reward.check_row(row)
    except ValueError as error:
        raise ValueError(f"no answer to row {index} of the {split} set could be scored: {error}") from error


def row_weight(difficulty: DifficultySampling, split: Split, index: int, row: Mapping[str, Any]) -> float:
    """The weight of a row; an error says which row has none."""
    try:
        return difficulty.weight(row)
    except ValueError as error:
        raise ValueError(f"row {index} of the {split} set: {error}") from error


def prompts_at(prompts: Prompts, positions: Sequence[int]) -> list[Prompt]:
    """The prompts at several positions."""
    return [prompts.at(position) for position in positions]
