"""The tokens that truncated sampling kept, in rollouts and checkpoints."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lgrpo.engines import EngineError, RolloutEngine, Sampling
from lgrpo.kept import Kept
from lgrpo.types import Completion, Prompt, RolloutBatch


def check_truncation(sampling: Sampling, engine: RolloutEngine) -> None:
    """Raise an error if tokens are left out of the draw when training, and the engine does not say which."""
    if not sampling.is_truncated or engine.returns_kept == "yes":
        return
    name = type(engine).__name__
    if engine.returns_kept == "no":
        raise ValueError(
            f"data.sampling sets top_k, top_p or min_p, but {name} does not return the tokens that could have been "
            "drawn, over which π_θ/π_α must be taken: sample the whole distribution when training, and truncate in "
            "data.evaluation.sampling only"
        )
    if not sampling.top_k:
        raise ValueError(
            f"data.sampling sets top_p or min_p, but {name} returns the tokens that could have been drawn, over which "
            "π_θ/π_α must be taken, only if their number is limited: set data.sampling.top_k too (for example 64)"
        )


def kept_tensors(
    prompts: Sequence[Prompt], completions: Sequence[Completion], width: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``kept_ids`` and ``kept_counts`` of a batch of rows of that width; None if no completion has sets."""
    if all(completion.kept is None for completion in completions):
        return None, None
    longest = max(len(completion.kept.token_ids) for completion in completions if completion.kept is not None)
    ids = np.zeros((len(completions), longest), dtype=np.int32)
    counts = np.zeros((len(completions), width), dtype=np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if (kept := completion.kept) is None:
            continue
        own, sizes = np.frombuffer(kept.token_ids, dtype=np.int32), np.frombuffer(kept.counts, dtype=np.int32)
        if (own == np.repeat(completion.token_ids, sizes)).sum() != (sizes > 0).sum():
            raise EngineError(
                f"a completion of {prompt.text[:60]!r} has a token that is not among those that could have been drawn"
            )
        ids[row, : len(own)] = own
        counts[row, len(prompt.token_ids) : len(prompt.token_ids) + len(sizes)] = sizes
    return torch.from_numpy(ids), torch.from_numpy(counts)


def concatenated_kept(batches: Sequence[RolloutBatch], width: int) -> tuple[Tensor | None, Tensor | None]:
    """Return ``kept_ids`` and ``kept_counts`` of several batches as one; rows of batches without sets have none."""
    if all(batch.kept is None for batch in batches):
        return None, None
    ids, counts = zip(*(batch.kept or _no_sets(batch) for batch in batches), strict=True)
    longest = max(own.shape[1] for own in ids)
    return tuple(  # type: ignore[return-value]
        torch.cat([pad(own, (0, size - own.shape[1])) for own in part])
        for part, size in ((ids, longest), (counts, width))
    )


def _no_sets(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    return batch.tokens.new_zeros(len(batch), 0, dtype=torch.int32), torch.zeros_like(batch.tokens, dtype=torch.int32)


def kept_of(batch: RolloutBatch, row: int) -> Kept | None:
    """Return the sets of a row's completion; None if it has none."""
    if batch.kept is None:
        return None
    ids, counts = batch.kept[0][row], batch.kept[1][row][batch.columns(row)]
    if not bool(counts.any()):
        return None
    return Kept(token_ids=array("i", ids[: int(counts.sum())].tolist()), counts=array("i", counts.tolist()))


def kept_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean size of the sets, and the share of them that is incomplete."""
    kept = [completion.kept for completion in completions if completion.kept is not None]
    num_sets = max(sum(len(own) - own.counts.count(0) for own in kept), 1)
    return {
        "rollout/kept_tokens": sum(len(own.token_ids) for own in kept) / num_sets,
        "rollout/kept_incomplete": sum(len(own.incomplete) for own in kept) / num_sets,
    }


def packed_kept(kept: Kept | None) -> dict[str, Any] | None:
    """Return the sets of a completion as tensors, for a checkpoint."""
    if kept is None:
        return None
    token_ids, counts = (torch.tensor(values, dtype=torch.int32) for values in (kept.token_ids, kept.counts))
    return {"token_ids": token_ids, "counts": counts, "incomplete": kept.incomplete}


def unpacked_kept(state: dict[str, Any] | None) -> Kept | None:
    """Invert ``packed_kept``."""
    if state is None:
        return None
    token_ids, counts = (array("i", state[name].tolist()) for name in ("token_ids", "counts"))
    return Kept(token_ids=token_ids, counts=counts, incomplete=state["incomplete"])
