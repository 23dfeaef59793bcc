"""Micro-batches of a rollout: how many there are, and which completions each has.

Lightning accumulates gradients over a constant number of micro-batches, ``trainer.accumulate_grad_batches``. With
``data.micro_batch_tokens`` it is the number that completions of the largest length would need. Shorter ones fill fewer
micro-batches; those left over are empty, on all ranks, and nothing is computed for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.hooks import policy_owner
from lgrpo.types import RolloutBatch


@dataclass(kw_only=True, frozen=True)
class TokenBudget:
    """Upper limit of tokens in a micro-batch (``data.micro_batch_tokens``)."""

    max_tokens: int
    num_micro_batches: int
    num_rows: int
    """Number of completions that fit whatever their lengths."""

    def check_contexts(self, num_counted: int, num_contexts: int) -> None:
        """Raise an error if completions have more contexts than ``num_rows`` counts on, as recorded ones may."""
        if num_contexts > num_counted:
            raise ValueError(
                f"recorded episodes have up to {num_contexts} contexts, but data.micro_batch_tokens counts on "
                f"{num_counted}: leave it out, or set data.engine.engine to an EnvironmentEngine with max_contexts "
                f"{num_contexts}"
            )

    def admits(self, groups: Sequence[RolloutBatch]) -> bool:
        """Return whether no micro-batch of these groups, or of a part of them, can exceed the limit.

        ``RolloutBatch.split`` adds a row to the micro-batch with the fewest tokens, which has at most the mean of the
        rows before it. Consecutive rows, as for shared prompts, can be cut within the same limit.
        """
        lengths = torch.cat([group.num_read for group in groups])
        longest, number = int(lengths.max()), self.num_micro_batches
        return len(lengths) <= self.num_rows or (int(lengths.sum()) - longest) / number + longest <= self.max_tokens


def micro_batches(batch: RolloutBatch, trainer: L.Trainer, budget: TokenBudget | None) -> list[RolloutBatch]:
    """Return the micro-batches of a rollout that have rows, as many on every rank.

    Without a budget these are all that Lightning accumulates over; likewise if the model's rows are padded, because
    rows of different lengths would then take more memory together.
    """
    policy = policy_owner(trainer).policy
    number = trainer.accumulate_grad_batches
    if budget is not None and policy.is_packed:
        number = fewest_parts(batch, budget, policy.share_prompts)
        if trainer.world_size > 1:
            needed = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(needed, reduce_op="max"))
    return batch.split(number, policy.share_prompts)


def fewest_parts(batch: RolloutBatch, budget: TokenBudget, share_prompts: bool) -> int:
    """Return the smallest number of pieces for which ``RolloutBatch.split`` exceeds the budget in none."""
    number = 1
    while number < budget.num_micro_batches:
        sizes = [part.size for part in batch.parts(number, share_prompts)]
        if max(sizes) <= budget.max_tokens:
            break
        number = max(number + 1, -(-sum(sizes) // budget.max_tokens))
    return min(number, budget.num_micro_batches)


def num_micro_batches(num_rows: int, longest: int, budget: int) -> int:
    """Return the number of micro-batches at which none has more tokens than the budget, whatever the lengths.

    ``RolloutBatch.split`` assigns rows, longest first, to the micro-batch with the fewest tokens. If k of the longest
    rows fit into the budget and there are at least num_rows/k micro-batches, one gets more than k rows only while their
    tokens leave enough of the budget. Consecutive rows, as for shared prompts, it cuts into parts of which the largest
    is as small as possible, and parts of k rows fit.

    >>> num_micro_batches(448, longest=612, budget=10_000)
    28
    """
    if longest > budget:
        raise ValueError(
            f"data.micro_batch_tokens is {budget:,}, but a single completion may have {longest:,} tokens with its "
            "prompt: raise it, or lower data.sampling.max_tokens"
        )
    return -(-num_rows // (budget // longest))


def set_micro_batches(trainer: L.Trainer, num_rows: int, longest: int, budget: int | None) -> TokenBudget | None:
    """Set how many micro-batches Lightning accumulates, from the budget of tokens, if there is one."""
    if budget is None:
        return None
    number = num_micro_batches(num_rows, longest, budget)
    if trainer.accumulate_grad_batches not in (1, number):
        raise ValueError(
            f"data.micro_batch_tokens {budget:,} means {number} micro-batches, but trainer.accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}: set one of the two"
        )
    trainer.accumulate_grad_batches = number
    rank_zero_info(
        f"at most {number} micro-batches a step, of up to {budget:,} tokens each (up to {longest:,} a completion)"
    )
    return TokenBudget(max_tokens=budget, num_micro_batches=number, num_rows=num_rows)
