"""The prompts of a split, and which of them stands where in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from lgrpo.tasks import Split, Task
from lgrpo.types import Prompt


class PromptSet:
    """A task's prompts, rendered, tokenised and checked once; ``at`` lays them out over a run without end."""

    def __init__(
        self,
        task: Task,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        overlong: Literal["error", "drop"] = "error",
        shuffle_seed: int | None = None,
    ) -> None:
        """
        Args:
            task: Where the rows and the template come from.
            split: Which rows.
            tokenizer: The policy's.
            max_tokens: Longest prompt.
            overlong: What becomes of a longer one.
            shuffle_seed: Order of every pass over the rows; None: as they stand.
        """
        self.shuffle_seed = shuffle_seed
        self.num_dropped = 0
        self._items: list[tuple[str, list[int], Mapping[str, Any]]] = []
        unknown = tokenizer.unk_token_id
        for index, row in enumerate(task.rows(split)):
            check_row(task, split, index, row)
            text, token_ids = task.template.render(row, tokenizer)
            if not token_ids:
                raise ValueError(f"prompt {index} of the {split} set is empty: {dict(row)}")
            if unknown is not None and unknown in token_ids and tokenizer.unk_token not in text:
                raise ValueError(
                    f"prompt {index} of the {split} set has characters the tokenizer cannot spell: {text[:200]!r}"
                )
            if len(token_ids) > max_tokens:
                if overlong == "drop":
                    self.num_dropped += 1
                    continue
                raise ValueError(
                    f"prompt {index} of the {split} set has {len(token_ids)} tokens, but only {max_tokens} fit beside "
                    f"the longest completion: {text[:60]!r}… Shorten data.sampling.max_tokens, or set "
                    "data.overlong_prompts to drop"
                )
            self._items.append((text, token_ids, row))
        if not self._items:
            raise ValueError(f"no prompt of the {split} set fits into {max_tokens} tokens")
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._items)

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the run: pass after pass over the rows, each in an order of its own."""
        epoch, offset = divmod(position, len(self))
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        text, token_ids, row = self._items[self._order[1][offset]]
        return Prompt(text=text, token_ids=token_ids, row=row, position=position)

    def _permutation(self, epoch: int) -> list[int]:
        if self.shuffle_seed is None:
            return list(range(len(self)))
        generator = torch.Generator().manual_seed(hash((self.shuffle_seed, epoch)) % 2**63)
        return torch.randperm(len(self), generator=generator).tolist()


def check_row(task: Task, split: str, index: int, row: Mapping[str, Any]) -> None:
    """Names the fields a template or reward asks for and a row does not have, or has nothing in."""
    for who, wanted in (("template", task.template.fields()), ("reward", task.reward.required_fields())):
        if missing := sorted(wanted - set(row)):
            raise ValueError(f"the {who} reads {missing}, but row {index} of the {split} set has only {sorted(row)}")
        if absent := sorted(name for name in wanted if row[name] is None):
            raise ValueError(f"the {who} reads {absent}, but there is nothing in row {index} of the {split} set")
    fields = task.template.fields()
    if fields and all(str(row[name]).strip() == "" for name in fields):
        raise ValueError(f"prompt {index} of the {split} set is empty: {dict(row)}")


def prompts_at(prompts: PromptSet, positions: Sequence[int]) -> list[Prompt]:
    """The prompts at several positions."""
    return [prompts.at(position) for position in positions]
