"""Recorded completions made fit for a run, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from lgrpo.engines.base import Sampling

if TYPE_CHECKING:
    from lgrpo.tasks.recording import Recording


def check_sampling(recording: Recording, sampling: Sampling) -> None:
    """Refuses log-probabilities taken at another temperature: their ratio to the policy's would mean nothing."""
    if recording.table["logprobs"].null_count == len(recording.table):
        return
    for fact in recording.facts:
        temperature = fact.get("sampling", {}).get("temperature", sampling.temperature)
        if temperature != sampling.temperature:
            raise ValueError(
                f"{recording.name} was sampled at temperature {temperature}, and its log-probabilities are taken at "
                f"it; data.sampling.temperature is {sampling.temperature}: set it to the same"
            )


def tokenised(recording: Recording, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
    """The table with token ids for every completion: those of a text are the policy's tokenizer's, its end included."""
    table = recording.table.combine_chunks()  # rows are then found at once, however many files there were
    if table["token_ids"].null_count == 0 and not recording.has_strangers:
        return table
    columns = (table[name].to_pylist() for name in ("completion", "token_ids", "finish_reason"))
    ids: list[list[int]] = []
    for row, (text, token_ids, finish_reason) in enumerate(zip(*columns, strict=True)):
        if token_ids is None:
            token_ids = token_ids_of(text, finish_reason, tokenizer)
            if tokenizer.unk_token_id in token_ids and (tokenizer.unk_token or "") not in text:
                raise ValueError(
                    f"completion {row} of {recording.name} has characters the tokenizer cannot spell: {text[:200]!r}"
                )
        elif recording.has_strangers and not tokenizer.decode(token_ids, skip_special_tokens=True).startswith(text):
            raise ValueError(
                f"the token ids of completion {row} of {recording.name} do not spell its text {text[:60]!r} with the "
                "policy's tokenizer: leave token_ids and logprobs out to have the text tokenised"
            )
        ids.append(token_ids)
    place = table.column_names.index("token_ids")
    return table.set_column(place, table.schema.field(place), pa.array(ids, type=table.schema.field(place).type))


def token_ids_of(text: str, finish_reason: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A completion's tokens, the end of sequence included unless it was cut off."""
    token_ids: Any = tokenizer(text, add_special_tokens=False).input_ids
    return [*token_ids, tokenizer.eos_token_id] if finish_reason == "stop" else list(token_ids)


def check_lengths(recording: Recording, max_tokens: int) -> None:
    """Refuses completions that are empty, or longer than the run allows."""
    lengths = pc.list_value_length(recording.table["token_ids"]).to_pylist()
    for row, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"completion {row} of {recording.name} is empty: there is nothing to train on")
        if length > max_tokens:
            raise ValueError(
                f"completion {row} of {recording.name} has {length} tokens, but data.sampling.max_tokens is "
                f"{max_tokens}: raise it to {max(lengths)}"
            )
