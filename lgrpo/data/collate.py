"""From prompts and their scored completions to one RolloutBatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lgrpo.types import Completion, Prompt, RolloutBatch


def collate_rollout(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    rewards: Tensor,
    *,
    group_size: int,
    pad_token_id: int,
    temperature: float,
    max_tokens: int,
    rollout: int,
) -> RolloutBatch:
    """Rows of prompt, completion, padding. ``prompts[i]`` belongs to ``completions[i]``; siblings side by side.

    The advantages are 0: they are known once the rollout is whole, over all ranks.
    """
    starts = torch.tensor([len(p.token_ids) for p in prompts])
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    size, width = len(completions), int((starts + lengths).max())
    tokens = torch.full((size, width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(size, width, dtype=torch.float32)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(completion.token_ids)
        tokens[i, :end] = torch.tensor(prompt.token_ids + completion.token_ids)
        logprobs[i, start:end] = torch.tensor(completion.logprobs, dtype=torch.float32)
    column = torch.arange(width)
    attention_mask = column < (starts + lengths)[:, None]
    completion_mask = attention_mask & (column >= starts[:, None])
    return RolloutBatch(
        tokens=tokens,
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        loss_mask=completion_mask.clone(),
        behaviour_logprobs=logprobs,
        rewards=rewards.float(),
        advantages=torch.zeros(size, width),
        behaviour_step=torch.tensor([c.behaviour_step for c in completions]),
        positions=torch.tensor([p.position for p in prompts]),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
        rows=torch.arange(size),
        group_size=group_size,
        temperature=temperature,
        max_tokens=max_tokens,
        rollout=rollout,
    )
