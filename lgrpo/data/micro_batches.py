"""How many micro-batches a step is cut into, from a budget of tokens."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities import rank_zero_info


def micro_batches_for(num_rows: int, longest: int, budget: int) -> int:
    """So many that none has more tokens than the budget, whatever the lengths turn out to be.

    ``RolloutBatch.split`` deals rows by length to the lightest piece: where k of the longest rows fit into the budget
    and there are k times as many places as rows, a piece gets a row beyond its k-th only while it is short enough.

    >>> micro_batches_for(448, longest=612, budget=10_000)
    28
    """
    if longest > budget:
        raise ValueError(
            f"data.micro_batch_tokens is {budget:,}, but a single completion may have {longest:,} tokens with its "
            "prompt: raise it, or lower data.sampling.max_tokens"
        )
    return -(-num_rows // (budget // longest))


def keep_to_budget(trainer: L.Trainer, num_rows: int, longest: int, budget: int) -> None:
    """Sets how many micro-batches Lightning accumulates."""
    number = micro_batches_for(num_rows, longest, budget)
    if trainer.accumulate_grad_batches not in (1, number):
        raise ValueError(
            f"data.micro_batch_tokens {budget:,} means {number} micro-batches, and trainer.accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}: set one of the two"
        )
    trainer.accumulate_grad_batches = number
    rank_zero_info(f"Steps of {number} micro-batches: {budget:,} tokens at most, completions of {longest:,} or fewer.")
