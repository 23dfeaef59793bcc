"""What a run and the checkpoint it goes on from must agree on, and what it means where they do not."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

Settings = dict[str, Any]

REFUSED = {
    "model": "the weights of one architecture do not fit another",
    "lora": "the adapters in the checkpoint have other shapes, or another weight",
    "base": "the adapters in the checkpoint belong to another model",
    "tokenizer": "the rollouts in the checkpoint are token ids, which now would mean other text",
    "data.num_prompts": "the prompts from here on would be other ones, some never seen and some seen twice",
    "data.group_size": "the rollouts at hand have groups of another size",
    "data.reuse": "which rollout a step belongs to follows from it, so rollouts would be skipped or repeated",
    "data.lead": "the rollouts already sampled would be trained on at another time than they were sampled for",
    "data.prompts": "positions in the run would stand for other prompts, some never seen and some seen twice",
    "world size": "a rollout in the middle of its passes cannot be dealt anew",
}
"""Settings a run cannot go on without, and why."""

NOTED = {
    "weight_sync": "from the next sync on, the behaviour policy lags otherwise than before",
    "data.seed": "prompts and completions from here on are not those of the run that was stopped",
    "data.shuffle": "prompts from here on come in another order, some never seen and some seen twice",
    "data.sampling": "completions from here on are drawn otherwise",
    "data.dynamic_sampling": "completions from here on are chosen otherwise",
    "data.generate_ahead": "the samples are the same, when they are drawn is not",
    "data.behaviour_logprobs": "ratios from here on have another denominator",
    "loss": "steps from here on descend another loss",
    "trainer.accumulate_grad_batches": "the gradient is the same but for rounding",
}
"""Settings a run may change, and what that does."""


class ResumeError(ValueError):
    """A checkpoint this run cannot go on from."""


def compare_settings(old: Settings, new: Settings) -> None:
    """Warns of what a run changes, and refuses what it cannot.

    Args:
        old: Of the run that wrote the checkpoint.
        new: Of this run.
    """
    differing = [name for name in new if name in old and old[name] != new[name]]
    if refused := [_line(name, old, new, REFUSED[name]) for name in differing if name in REFUSED]:
        raise ResumeError(
            "this run cannot go on from the checkpoint:\n"
            + "\n".join(refused)
            + "\nGo on with the settings it was made with (config.yaml in the folder of the run), or begin another run"
        )
    if noted := [_line(name, old, new, NOTED[name]) for name in differing if name in NOTED]:
        warnings.warn("the checkpoint was made with other settings:\n" + "\n".join(noted), stacklevel=2)


def architecture_of(config: PretrainedConfig) -> dict[str, Any]:
    """What of a model's config decides the shape of its weights."""
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
    )
    text = config.get_text_config()
    return {name: getattr(text, name) for name in names if getattr(text, name, None) is not None}


def fingerprint(parts: Iterable[str]) -> str:
    """A few letters that stand for all of it.

    >>> fingerprint(["ab", "c"]) == fingerprint(["a", "bc"])
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()[:12]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that spell alike."""
    return fingerprint(f"{token} {i}" for token, i in sorted(tokenizer.get_vocab().items()))


def describe(thing: Any) -> Any:
    """An object as plain data: its class and what it was made with, as far as that is public."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Mapping):
        return {str(key): describe(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set):
        return [describe(value) for value in thing]
    if callable(thing) and hasattr(thing, "__qualname__"):
        return thing.__qualname__
    if is_dataclass(thing):
        values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    else:
        values = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    return {"class": type(thing).__name__} | {name: describe(value) for name, value in values.items()}


def _line(name: str, old: Settings, new: Settings, meaning: str) -> str:
    before, now = old[name], new[name]
    if isinstance(before, dict) and isinstance(now, dict):  # what is the same need not be read
        names = [key for key in (before | now) if before.get(key) != now.get(key)]
        before, now = ({key: values.get(key) for key in names} for values in (before, now))
    return f"  {name} was {_short(before)}, here it is {_short(now)}: {meaning}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "…"
