"""Completions built from sampled or recorded tokens, and where a completion ends."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import Sampling
from lgrpo.engines.recovery import EngineFailure
from lgrpo.types import Completion


def eos_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return every token that ends a sequence, according to the tokenizer and to the model's config."""
    named = config.eos_token_id
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {i for i in ids if i is not None}


def sampled_completion(
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: str | None,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    version: int,
) -> Completion:
    """Return a sampled completion, cut after the first stop string; raise an ``EngineFailure`` if it is incomplete."""
    if finish_reason not in ("stop", "length"):
        raise EngineFailure(f"a completion was aborted ({finish_reason}) after {len(token_ids)} tokens")
    if len(logprobs) != len(token_ids):
        raise EngineFailure(f"a completion of {len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    if sampling.stop and any(s in text for s in sampling.stop):
        length = _length_with_stop(token_ids, sampling.stop, tokenizer)
        token_ids, logprobs, finish_reason = token_ids[:length], logprobs[:length], "stop"
        text = text_before_stop(tokenizer.decode(token_ids, skip_special_tokens=True), sampling.stop)
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=text,
        finish_reason="stop" if finish_reason == "stop" else "length",
        behaviour_step=step,
        version=version,
    )


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string.

    >>> text_before_stop("4 + 5 = 9. Next", ["Next", "."])
    '4 + 5 = 9'
    """
    starts = [start for s in stop if (start := text.find(s)) >= 0]
    return text[: min(starts)] if starts else text


def _length_with_stop(token_ids: list[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens up to the one that completes a stop string."""

    def has_stop(length: int) -> bool:
        text = tokenizer.decode(token_ids[:length])
        return any(s in text for s in stop)

    if not has_stop(len(token_ids) - 1):  # the usual case of an engine that stops by itself
        return len(token_ids)
    return next(length for length in range(1, len(token_ids) + 1) if has_stop(length))
