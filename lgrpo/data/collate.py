"""Prompts and their scored completions to a RolloutBatch, and back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from lgrpo.contexts import ranges
from lgrpo.data.kept import concatenated_kept, kept_of, kept_tensors
from lgrpo.engines import Sampling, completion_text
from lgrpo.rewards import FailedScore, Notes, NotYet, Score, SumScore, notes_of
from lgrpo.types import MIN_WIDTH, Completion, Prompt, RolloutBatch, Span

UNKNOWN_VERSION = -1
"""Version in the spans of a batch's completions: a batch has only the optimizer steps."""
_DEFAULTS: dict[str, Callable[[RolloutBatch], Tensor]] = {
    "contexts": lambda batch: batch.attention_mask.long(),
    "turn_rewards": lambda batch: torch.zeros_like(batch.advantages),
    "episode_failed": lambda batch: torch.zeros_like(batch.failed),
}
"""Values of fields that are None in a batch if none of its completions needs them."""


class Group(NamedTuple):
    """A prompt, its completions and their scores."""

    prompt: Prompt
    completions: Sequence[Completion]
    scores: Sequence[Score]


def collate_rollout(groups: Sequence[Group], pad_token_id: int, sampling: Sampling, rollout: int) -> RolloutBatch:
    """Return rows of prompt, completion, padding, group after group.

    Scores that are not known yet become NaN. Advantages are 0: they depend on the scores of all ranks.
    """
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    starts = torch.tensor([len(p.token_ids) for p in prompts])
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    size, width = len(completions), max(int((starts + lengths).max()), MIN_WIDTH)
    tokens = np.full((size, width), pad_token_id, dtype=np.int64)
    logprobs = np.zeros((size, width), dtype=np.float32)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(completion.token_ids)
        tokens[i, :end] = array("q", prompt.token_ids + completion.token_ids)  # faster than torch.tensor of a list
        logprobs[i, start:end] = array("f", completion.logprobs)  # raises TypeError for None
    column = torch.arange(width)
    attention_mask = column < (starts + lengths)[:, None]
    completion_mask = attention_mask & (column >= starts[:, None])
    for row, completion in enumerate(completions):
        for start, stop in completion.observed:
            completion_mask[row, starts[row] + start : starts[row] + stop] = False
    kept_ids, kept_counts = kept_tensors(prompts, completions, width)
    return RolloutBatch(
        tokens=torch.from_numpy(tokens),
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        loss_mask=completion_mask.clone(),
        behaviour_logprobs=torch.from_numpy(logprobs),
        rewards=as_rewards(scores),
        reward_parts=as_reward_parts(scores),
        notes=as_notes(scores),
        turn_rewards=_turn_rewards(completions, starts, width),
        episode_failed=_episode_failed(completions),
        contexts=_contexts(completions, starts, attention_mask),
        advantages=torch.zeros(size, width),
        behaviour_step=_behaviour_steps(completions, starts, width),
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        positions=torch.tensor([p.position for p in prompts]),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
        failed=torch.tensor(
            [isinstance(s, FailedScore) or c.failure is not None for s, c in zip(scores, completions, strict=True)]
        ),
        rows=torch.arange(size),
        group_size=len(groups[0].completions),
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        rollout=rollout,
    )


def _behaviour_steps(completions: Sequence[Completion], starts: Tensor, width: int) -> Tensor:
    """Return the behaviour step of each completion, or, if one has several, of each token."""
    steps = torch.tensor([c.behaviour_step for c in completions])
    if not any(c.earlier for c in completions):
        return steps
    steps = steps[:, None].repeat(1, width)
    for row, (completion, start) in enumerate(zip(completions, starts.tolist(), strict=True)):
        end = start + sum(span.num_tokens for span in completion.earlier)
        for span in reversed(completion.earlier):  # each fills the columns before its end; earlier ones then overwrite
            steps[row, :end] = span.step
            end -= span.num_tokens
    return steps


def _turn_rewards(completions: Sequence[Completion], starts: Tensor, width: int) -> Tensor | None:
    """Return the reward of each turn at its last token; None if no completion is an episode."""
    if all(c.turn_rewards is None for c in completions):
        return None
    rewards = torch.zeros(len(completions), width)
    for row, completion in enumerate(completions):
        for (_, stop), reward in zip(completion.turns, completion.turn_rewards or (), strict=False):
            rewards[row, int(starts[row]) + stop - 1] = reward
    return rewards


def _episode_failed(completions: Sequence[Completion]) -> Tensor | None:
    """Return which episodes a failure of their environment ended; None if no completion is an episode."""
    if all(c.turn_rewards is None for c in completions):
        return None
    return torch.tensor([c.failure is not None for c in completions])


def _contexts(completions: Sequence[Completion], starts: Tensor, attention_mask: Tensor) -> Tensor | None:
    """Return the contexts of each token, as bits; None if nothing was dropped."""
    if not any(c.dropped for c in completions):
        return None
    contexts = attention_mask.long()
    for row, (completion, start) in enumerate(zip(completions, starts.tolist(), strict=True)):
        if completion.dropped:
            own = torch.tensor(completion.contexts)
            contexts[row, :start] = (1 << int(own.max()).bit_length()) - 1
            contexts[row, start : start + len(own)] = own
    return contexts


def as_rewards(scores: Sequence[Score]) -> Tensor:
    """Return scores as a float32 tensor; NaN for scores that are not known yet."""
    return torch.tensor([torch.nan if isinstance(score, NotYet) else score for score in scores], dtype=torch.float32)


def as_reward_parts(scores: Sequence[Score]) -> Tensor | None:
    """Return each score of a sum and its weight, [B, 2, K] float32; None if a score is not a sum, or not known yet."""
    parts = [score.parts if isinstance(score, SumScore | FailedScore) else () for score in scores]
    if not parts or not parts[0] or len({len(part) for part in parts}) > 1:
        return None
    return torch.tensor(parts, dtype=torch.float32).transpose(1, 2)


def as_notes(scores: Sequence[Score]) -> list[Notes | None] | None:
    """Return the notes of each score; None if no score has any."""
    notes = [notes_of(score) for score in scores]
    return notes if any(own is not None for own in notes) else None


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return several batches as one, padded to the widest; fields that are not tensors come from the first."""
    width = max(batch.tokens.shape[1] for batch in batches)
    tensors: dict[str, Any] = {}
    has_spans = any(batch.behaviour_step.ndim == 2 for batch in batches)
    for f in fields(batches[0]):
        parts = [getattr(batch, f.name) for batch in batches]
        if f.name == "behaviour_step" and has_spans:
            parts = [batch.token_steps for batch in batches]
        if f.name in ("kept_ids", "kept_counts"):
            continue
        if f.name in _DEFAULTS and any(part is not None for part in parts):
            parts = [
                _DEFAULTS[f.name](batch) if part is None else part for batch, part in zip(batches, parts, strict=True)
            ]
        if any(part is None for part in parts):
            tensors[f.name] = None
        elif isinstance(parts[0], Tensor):
            tensors[f.name] = torch.cat([pad(p, (0, width - p.shape[1])) if p.ndim == 2 else p for p in parts])
    tensors["kept_ids"], tensors["kept_counts"] = concatenated_kept(batches, width)
    if any(batch.notes is not None for batch in batches):
        tensors["notes"] = [own for batch in batches for own in batch.notes or [None] * len(batch)]
    return replace(batches[0], **tensors | {"rows": torch.arange(len(tensors["rows"]))})


def completions_of(batch: RolloutBatch, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[Completion]:
    """Return the completions of a batch as the engine returned them."""
    completions = []
    for row in range(len(batch)):
        own = batch.columns(row)
        token_ids = batch.tokens[row][own].tolist()
        observed = tuple(ranges((~batch.completion_mask[row][own]).tolist()))
        last_turn = token_ids[observed[-1][1] if observed else 0 :]
        ends = [start - 1 for start, _ in observed] + [len(token_ids) - 1] * bool(token_ids)
        rewards = None if batch.turn_rewards is None else batch.turn_rewards[row][own][ends].tolist()
        failed = batch.episode_failed is not None and bool(batch.episode_failed[row])
        spans = [Span(*span, UNKNOWN_VERSION) for span in batch.spans(row)]
        completions.append(
            Completion(
                token_ids=token_ids,
                logprobs=batch.behaviour_logprobs[row][own].tolist(),
                text=completion_text(last_turn, sampling.stop or [], tokenizer),
                finish_reason="length" if bool(batch.truncated[row]) else "stop",
                behaviour_step=spans[-1].step,
                earlier=tuple(spans[:-1]),
                kept=kept_of(batch, row),
                observed=observed,
                dropped=batch.dropped(row),
                turn_rewards=None if rewards is None else tuple(rewards),
                failure=("errors", "the environment failed") if failed else None,
            )
        )
    return completions
