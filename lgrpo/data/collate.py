"""From prompts and their scored completions to one RolloutBatch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lgrpo.rewards import FailedScore, NotYet, Score
from lgrpo.types import Completion, Prompt, RolloutBatch


def collate_rollout(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: Sequence[Score],
    *,
    group_size: int,
    pad_token_id: int,
    temperature: float,
    max_tokens: int,
    rollout: int,
) -> RolloutBatch:
    """Rows of prompt, completion, padding. ``prompts[i]`` belongs to ``completions[i]``; siblings side by side.

    A score that is not there yet is NaN. The advantages are 0: they are known once all ranks' scores are.
    """
    starts = torch.tensor([len(p.token_ids) for p in prompts])
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    size, width = len(completions), int((starts + lengths).max())
    tokens = np.full((size, width), pad_token_id, dtype=np.int64)
    logprobs = np.zeros((size, width), dtype=np.float32)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(completion.token_ids)
        tokens[i, :end] = array("q", prompt.token_ids + completion.token_ids)  # torch reads lists slowly
        logprobs[i, start:end] = array("f", completion.logprobs)  # refuses what is not a number
    column = torch.arange(width)
    attention_mask = column < (starts + lengths)[:, None]
    completion_mask = attention_mask & (column >= starts[:, None])
    return RolloutBatch(
        tokens=torch.from_numpy(tokens),
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        loss_mask=completion_mask.clone(),
        behaviour_logprobs=torch.from_numpy(logprobs),
        rewards=as_rewards(scores),
        advantages=torch.zeros(size, width),
        behaviour_step=torch.tensor([c.behaviour_step for c in completions]),
        positions=torch.tensor([p.position for p in prompts]),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
        failed=torch.tensor([isinstance(score, FailedScore) for score in scores]),
        rows=torch.arange(size),
        group_size=group_size,
        temperature=temperature,
        max_tokens=max_tokens,
        rollout=rollout,
    )


def as_rewards(scores: Sequence[Score]) -> Tensor:
    """Scores as a tensor, float32; NaN where a score is not there yet."""
    return torch.tensor([torch.nan if isinstance(score, NotYet) else score for score in scores], dtype=torch.float32)


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Several batches as one, padded to the widest; what is not a tensor is the first one's."""
    width = max(batch.tokens.shape[1] for batch in batches)
    together: dict[str, Any] = {}
    for f in fields(batches[0]):
        parts = [getattr(batch, f.name) for batch in batches]
        if isinstance(parts[0], Tensor):
            together[f.name] = torch.cat([pad(p, (0, width - p.shape[1])) if p.ndim == 2 else p for p in parts])
    return replace(batches[0], **together | {"rows": torch.arange(len(together["rows"]))})


def pair_up(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> tuple[list[Prompt], list[Completion]]:
    """Each completion beside its prompt."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    return [p for p, _ in pairs], [c for _, c in pairs]
