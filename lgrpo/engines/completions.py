"""Where a completion ends, and one that an engine outside gave."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import EngineFailure, Sampling
from lgrpo.types import Completion


def eos_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a sequence: the tokenizer's, and those the model's config names."""
    named = config.eos_token_id
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {i for i in ids if i is not None}


def completion_from(
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: str | None,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    version: int,
) -> Completion:
    """A completion as an engine outside gave it, cut behind the first stop string, refused where it was broken off."""
    if finish_reason not in ("stop", "length"):
        raise EngineFailure(f"a completion was broken off ({finish_reason}) after {len(token_ids)} tokens")
    if len(logprobs) != len(token_ids):
        raise EngineFailure(f"a completion of {len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    if sampling.stop and any(s in text for s in sampling.stop):
        kept = next(
            n for n in range(1, len(token_ids) + 1) if any(s in tokenizer.decode(token_ids[:n]) for s in sampling.stop)
        )
        token_ids, logprobs, finish_reason = token_ids[:kept], logprobs[:kept], "stop"
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
    """The text before the first stop string."""
    places = [place for s in stop if (place := text.find(s)) >= 0]
    return text[: min(places)] if places else text
