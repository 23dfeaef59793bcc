"""Prompts of a split, and which of them has which position in a run."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, final

from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lgrpo.data.curriculum import Curriculum
from lgrpo.data.difficulty import Difficulty
from lgrpo.data.order import Order, Shuffled
from lgrpo.run.resume import fingerprint
from lgrpo.tasks import LocatedRow, RowStream, Split, Task
from lgrpo.tasks.rows import has_long_integer
from lgrpo.tasks.template import longest_token
from lgrpo.types import Prompt

_CACHE_SIZE = 1024
"""Number of prompts of a stream that are cached, for those requested twice."""


@dataclass(kw_only=True, frozen=True)
class RowRenderer:
    """Turns the rows of a split into prompts."""

    task: Task
    split: Split
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Upper limit of a prompt's length."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer prompts."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the prompt offers."""

    def __call__(self, index: str, row: Mapping[str, Any]) -> Prompt | None:
        """Return the prompt of a row, checked, at position 0; None if it is too long and ``overlong`` is drop."""
        self._check(index, row)
        max_characters = self.max_tokens * self._longest_token
        text, token_ids = self.task.template.render(row, self.tokenizer, max_characters, self.tools)
        if token_ids is None:
            length = (
                f"{len(text)} characters, but only {self.max_tokens} tokens of up to {self._longest_token} characters"
            )
        elif not token_ids:
            raise ValueError(f"prompt {index} of the {self.split} set is empty: {dict(row)}")
        else:
            unknown = self.tokenizer.unk_token_id
            if unknown is not None and unknown in token_ids and self.tokenizer.unk_token not in text:
                raise ValueError(
                    f"prompt {index} of the {self.split} set has characters the tokenizer cannot encode: {text[:200]!r}"
                )
            if len(token_ids) <= self.max_tokens:
                chat = self.task.template.chat_arguments(self.tools)
                return Prompt(text=text, token_ids=token_ids, row=row, position=0, chat=chat)
            length = f"{len(token_ids)} tokens, but only {self.max_tokens}"
        if self.overlong == "drop":
            return None
        raise ValueError(
            f"prompt {index} of the {self.split} set has {length} fit: {text[:60]!r}… Raise data.max_prompt_tokens if "
            "it is set, lower data.sampling.max_tokens to leave more of the context to prompts, or set "
            "data.overlong_prompts to drop"
        )

    @cached_property
    def _longest_token(self) -> int:
        return longest_token(self.tokenizer)

    def _check(self, index: str, row: Mapping[str, Any]) -> None:
        """Raise an error if a row lacks a field that the template or the reward reads, or cannot be scored."""
        fields, reward = self.task.template.fields(), self.task.reward
        for reader, required in (("template", fields), ("reward", reward.required_fields())):
            if missing := sorted(required - set(row)):
                raise ValueError(
                    f"the {reader} reads {missing}, but row {index} of the {self.split} set has only {sorted(row)}"
                )
            if empty := sorted(name for name in required if row[name] is None):
                raise ValueError(f"the {reader} reads {empty}, which is null in row {index} of the {self.split} set")
        if long := sorted(name for name, value in row.items() if has_long_integer(value)):
            raise ValueError(
                f"row {index} of the {self.split} set has in {long} an integer of more than "
                f"{sys.get_int_max_str_digits()} digits: write it as text"
            )
        if fields and all(str(row[name]).strip() == "" for name in fields):
            raise ValueError(f"prompt {index} of the {self.split} set is empty: {dict(row)}")
        try:
            self.task.template.check_messages(row)
        except ValueError as error:
            raise ValueError(f"row {index} of the {self.split} set: {error}") from error
        try:
            reward.check_row(row)
        except ValueError as error:
            raise ValueError(f"no answer to row {index} of the {self.split} set can be scored: {error}") from error


class Prompts(ABC):
    """Prompts by position in an endless run; the same on every rank and after a resume."""

    is_streamed: bool
    """Whether prompts are read in order as they are needed, so that positions far ahead are out of reach."""
    num_dropped: int
    """Number of rows left out so far because they were too long."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts in a pass."""

    @abstractmethod
    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the run."""

    def draw(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts at positions that are about to be sampled; with a curriculum, they are fixed by this."""
        return prompts_at(self, positions)

    @property
    def curriculum(self) -> Curriculum | None:
        """Pass rates that decide which prompts come next; None: nothing that is measured does."""
        return None

    @property
    @abstractmethod
    def longest(self) -> int:
        """Upper limit of a prompt's length in tokens."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short text that identifies these prompts."""


@final
class PromptSet(Prompts):
    """A task's prompts, rendered, tokenised and checked once."""

    is_streamed = False

    def __init__(
        self,
        render: RowRenderer,
        shuffle_seed: int | None = None,
        difficulty: Difficulty | None = None,
        num_prompts: int = 1,
    ) -> None:
        """
        Args:
            render: Function that turns rows into prompts.
            shuffle_seed: Seed of the order of every pass over the rows; None keeps their order.
            difficulty: How often each row is drawn, instead of once in a pass.
            num_prompts: P, prompts in a rollout.
        """
        task, split = render.task, render.split
        if difficulty is not None and shuffle_seed is None:
            raise ValueError("data.difficulty draws rows at random: it needs data.shuffle")
        self.num_dropped = 0
        self._items: list[Prompt] = []
        rows, kept = task.rows(split), []
        weights = [1.0] * len(rows) if difficulty is None else difficulty.row_weights(rows)
        locations = task.locations(split)
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            known = locations is not None and not locations[index].startswith("row ")  # more than the index
            label = f"{index} ({locations[index]})" if locations is not None and known else str(index)
            item = render(label, row)
            if item is None:
                self.num_dropped += 1
            elif weight > 0:
                self._items.append(item)
                kept.append(weight)
        if not self._items:
            raise ValueError(f"no prompt of the {split} set fits into {render.max_tokens} tokens")
        if difficulty is None or shuffle_seed is None:
            self._order: Order = Shuffled(len(kept), shuffle_seed)
        else:
            self._order = difficulty.order(kept, shuffle_seed, num_prompts)

    def __len__(self) -> int:
        return len(self._items)

    def at(self, position: int) -> Prompt:
        return replace(self._items[self._order.row_at(position)], position=position)

    def draw(self, positions: Sequence[int]) -> list[Prompt]:
        self._order.draw(positions)
        return super().draw(positions)

    @property
    def curriculum(self) -> Curriculum | None:
        return self._order if isinstance(self._order, Curriculum) else None

    @property
    def longest(self) -> int:
        return max(len(item.token_ids) for item in self._items)

    def fingerprint(self) -> str:
        return f"{len(self)} prompts, {fingerprint(item.text for item in self._items)}"


@final
class StreamedPrompts(Prompts):
    """Prompts of a streamed training set: rows are read in order and not kept; going back reads from the start."""

    is_streamed = True

    def __init__(
        self, render: RowRenderer, stream: RowStream, shuffle_seed: int | None = None, buffer_size: int = 1024
    ) -> None:
        """
        Args:
            render: Function that turns rows into prompts.
            stream: Rows of the training set.
            shuffle_seed: Seed of the order of every pass over the rows; None keeps their order.
            buffer_size: Number of rows in the shuffle buffer.
        """
        self.shuffle_seed = shuffle_seed
        self.buffer_size = buffer_size
        self._render, self._stream = render, stream
        self._cache: dict[int, Prompt] = {}
        self._rewind()
        self._first = fingerprint([self.at(0).text])  # a stream that cannot be read fails before the run starts

    def __len__(self) -> int:
        raise ValueError("the length of a streamed training set is unknown: set data.num_rollouts")

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the run; rows before it are skipped, and rendered only if needed."""
        if position not in self._cache:
            if position < self._next:
                self._rewind()
            while self._next <= position:
                self._read_row(is_requested=self._next == position)
        return replace(self._cache[position], position=position)

    @property
    def longest(self) -> int:
        return self._render.max_tokens

    def fingerprint(self) -> str:
        """Return a text that identifies the first prompt; the others are not read yet."""
        return f"a stream, {self._first}"

    def _rewind(self) -> None:
        self.num_dropped = 0
        self._next = 0
        self._rows = self._passes()

    def _read_row(self, is_requested: bool) -> None:
        """Read the next row; unless it is dropped, it takes the next position."""
        location, row = next(self._rows)
        if is_requested or self._render.overlong == "drop":  # a dropped row shifts all positions after it
            item = self._render(f"({location})", row)
            if item is None:
                self.num_dropped += 1
                return
            if is_requested:
                self._cache[self._next] = item
                if len(self._cache) > _CACHE_SIZE:
                    del self._cache[next(iter(self._cache))]
        self._next += 1

    def _passes(self) -> Iterator[LocatedRow]:
        """Yield all rows, pass after pass."""
        for epoch in count():
            first = self._next
            yield from self._stream if self.shuffle_seed is None else self._shuffled(epoch)
            if self._next == first:
                raise ValueError(f"no prompt of the train set fits into {self._render.max_tokens} tokens")

    def _shuffled(self, epoch: int) -> Iterator[LocatedRow]:
        """Yield the rows of a pass, shuffled within a buffer."""
        generator = random.Random(f"{self.shuffle_seed} {epoch}")
        buffer: list[LocatedRow] = []
        for located in self._stream:
            if len(buffer) < self.buffer_size:
                buffer.append(located)
                continue
            slot = generator.randrange(len(buffer))
            located, buffer[slot] = buffer[slot], located
            yield located
        generator.shuffle(buffer)
        yield from buffer


def load_prompts(
    task: Task,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    overlong: Literal["error", "drop"] = "error",
    shuffle_seed: int | None = None,
    difficulty: Difficulty | None = None,
    num_prompts: int = 1,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompts:
    """Return a task's prompts: a set, or a stream if the training rows are too many to keep in memory."""
    render = RowRenderer(
        task=task, split=split, tokenizer=tokenizer, max_tokens=max_tokens, overlong=overlong, tools=tools
    )
    stream = task.train_stream() if split == "train" else None
    if stream is None:
        prompts = PromptSet(render, shuffle_seed, difficulty, num_prompts)
        if prompts.num_dropped:
            rank_zero_info(f"{prompts.num_dropped} overlong prompts dropped, {len(prompts)} kept.")
        return prompts
    if difficulty is not None:
        raise ValueError("data.difficulty draws from all rows, which a stream does not keep: remove one of the two")
    return StreamedPrompts(render, stream, shuffle_seed)


def check_max_tokens(max_tokens: int, context: int) -> None:
    """Raise an error if a completion may fill the whole context of the model."""
    if max_tokens >= context:
        raise ValueError(
            f"sampling.max_tokens is {max_tokens}, but prompt and completion together may have {context} tokens in "
            "this model"
        )


def prompts_at(prompts: Prompts, positions: Sequence[int]) -> list[Prompt]:
    """Return the prompts at several positions."""
    return [prompts.at(position) for position in positions]
