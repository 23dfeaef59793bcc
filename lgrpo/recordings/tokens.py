"""Token ids of recorded completions, and checks that a run can use them."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from lgrpo.contexts import context_lengths
from lgrpo.engines.completions import Sampling
from lgrpo.recordings.recording import Recording, with_column
from lgrpo.tasks.template import longest_token


def check_sampling(recording: Recording, sampling: Sampling) -> None:
    """Raise an error if log-probabilities are those of another distribution: ratios to them would be wrong."""
    if recording.table["logprobs"].null_count == len(recording.table):
        return
    for metadata in recording.metadata:
        recorded = metadata.get("sampling", {})
        temperature = recorded.get("temperature", sampling.temperature)
        if temperature != sampling.temperature:
            raise ValueError(
                f"{recording.name} was sampled at temperature {temperature}, which its log-probabilities include, but "
                f"data.sampling.temperature is {sampling.temperature}: set it to the same"
            )
        everything = {"top_k": (None, 0, -1), "top_p": (None, 1), "min_p": (None, 0)}
        truncated = [name for name, values in everything.items() if recorded.get(name) not in values]
        if truncated and (lacking := _num_without_kept(recording)):
            raise ValueError(
                f"{recording.name} was sampled with {', '.join(f'{name} {recorded[name]}' for name in truncated)}, and "
                f"{lacking} completions have log-probabilities without the tokens that could have been drawn "
                "(kept_token_ids and kept_counts, which RolloutRecorder writes), so there is no ratio to them. Remove "
                "the column logprobs and choose a loss that needs none, such as configs/algorithms/asymre.yaml"
            )


def _num_without_kept(recording: Recording) -> int:
    """Return the number of completions that have log-probabilities, but not the tokens that could have been drawn."""
    lengths, sets = pc.list_value_length(recording.table["logprobs"]), recording.table["kept_counts"]
    return pc.sum(pc.and_(pc.greater(pc.fill_null(lengths, 0), 0), pc.is_null(sets))).as_py() or 0


def tokenised(recording: Recording, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> pa.Table:
    """Return the table with token ids for every completion; texts without ids are tokenised, with their end token.

    A text that is certainly longer than ``max_tokens`` is an error, and not tokenised.
    """
    table = recording.table.combine_chunks()  # makes access to single rows fast, however many files there were
    if table["token_ids"].null_count == 0 and not recording.has_unknown_tokenizer:
        return table
    columns = (table[name].to_pylist() for name in ("completion", "token_ids", "finish_reason"))
    ids: list[list[int]] = []
    max_characters = math.inf if max_tokens is None else max_tokens * longest_token(tokenizer)
    for row, (text, token_ids, finish_reason) in enumerate(zip(*columns, strict=True)):
        if token_ids is None:
            if len(text) > max_characters:
                raise ValueError(
                    f"completion {row} of {recording.name} has {len(text)} characters, but data.sampling.max_tokens is "
                    f"{max_tokens}: raise it, or leave the completion out"
                )
            token_ids = completion_token_ids(text, finish_reason, tokenizer)
            if not token_ids:
                raise ValueError(f"completion {row} of {recording.name} is empty: there is nothing to train on")
            if tokenizer.unk_token_id in token_ids and (tokenizer.unk_token or "") not in text:
                raise ValueError(
                    f"completion {row} of {recording.name} has characters the tokenizer cannot encode: {text[:200]!r}"
                )
        elif recording.has_unknown_tokenizer and not _decodes_to(token_ids, text, tokenizer):
            raise ValueError(
                f"the policy's tokenizer does not decode the token ids of completion {row} of {recording.name} to its "
                f"text {text[:60]!r}: leave token_ids and logprobs out to have the text tokenised"
            )
        ids.append(token_ids)
    return with_column(table, "token_ids", ids)


def _decodes_to(token_ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.decode(token_ids, skip_special_tokens=True).startswith(text))


def completion_token_ids(text: str, finish_reason: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a completion, including the end-of-sequence token, if there is one, unless truncated."""
    token_ids: Any = tokenizer(text, add_special_tokens=False).input_ids
    has_end = finish_reason == "stop" and tokenizer.eos_token_id is not None
    return [*token_ids, tokenizer.eos_token_id] if has_end else list(token_ids)


def check_completion_lengths(recording: Recording, max_tokens: int) -> None:
    """Raise an error if a completion, or a context of an episode, is longer than the run allows."""
    lengths = pc.list_value_length(recording.table["token_ids"]).to_pylist()
    for row, own in _context_lengths(recording).items():
        lengths[row] = max(own)
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"completion {row} of {recording.name} has {length} tokens, but data.sampling.max_tokens is "
                f"{max_tokens}: raise it to {max(lengths)}"
            )


def max_contexts(recording: Recording) -> int:
    """Return the largest number of contexts of a completion."""
    return max((len(lengths) for lengths in _context_lengths(recording).values()), default=1)


def _context_lengths(recording: Recording) -> dict[int, list[int]]:
    """Return the lengths of the contexts of each episode with dropped observations, by row."""
    rows = recording.table["dropped"].is_valid().to_numpy().nonzero()[0].tolist()
    completions = recording.completions(rows, "recorded") if rows else []
    return {row: context_lengths(one.contexts) for row, one in zip(rows, completions, strict=True)}
