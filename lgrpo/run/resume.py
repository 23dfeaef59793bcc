"""Settings that a resumed run must have in common with its checkpoint, and the effect of those that differ."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

CHECKPOINT_FORMAT = 3
"""Version of lgrpo's part of a checkpoint. Raise it with every change that makes older checkpoints unreadable."""

ResumeSettings = dict[str, Any]
"""Values by the name of a setting."""

REQUIRED = {
    "model": "the weights of one architecture do not fit another",
    "model config": "the weights would compute other logits",
    "lora": "the adapters in the checkpoint have different shapes or a different scale",
    "base": "the adapters in the checkpoint belong to another model",
    "tokenizer": "the rollouts in the checkpoint are token ids, which would now mean different text",
    "tokenization": "prompts would be split into other tokens, or completions would end with another token",
    "chat template": "prompts would be other texts than those the policy was trained on",
    "data.num_prompts": "the run would continue with different prompts, some never seen and some seen twice",
    "data.group_size": "the groups in the checkpoint have another size",
    "data.reuse": "it determines which rollout a step belongs to, so rollouts would be skipped or repeated",
    "data.lead": "the rollouts in the checkpoint would be trained on at another step than they were sampled for",
    "data.prompts": "positions in the run would stand for different prompts, some never seen and some seen twice",
    "world size": "a partly trained rollout cannot be distributed over another number of processes",
}
"""Settings that must not change, and why."""

CHANGEABLE = {
    "weight_sync": "from the next sync on, the behaviour policy has another lag",
    "data.seed": "prompts and completions from here on differ from those of the run that was stopped",
    "data.shuffle": "prompts from here on come in another order, some never seen and some seen twice",
    "data.difficulty": "prompts from here on are drawn differently, and a new kind has measured nothing yet",
    "data.sampling": "completions from here on are sampled differently",
    "data.advantage": "advantages from here on are computed differently",
    "data.dynamic_sampling": "completions from here on are selected differently",
    "data.partial": "other groups are left unfinished; if it is turned off, those of the checkpoint are lost",
    "data.generate_ahead": "the samples are the same, but they are drawn at another time",
    "data.behaviour_logprobs": "ratios from here on have another denominator",
    "environment": "episodes from here on are of another environment",
    "max_turns": "episodes from here on end after another number of turns",
    "max_tokens_per_turn": "turns from here on end after another number of tokens",
    "max_contexts": "episodes from here on have another number of contexts",
    "dropped_text": "dropped observations from here on are replaced by another text",
    "loss": "steps from here on minimise another loss",
    "model.step_rule": "updates from here on are scaled by another rule",
    "trainer.accumulate_grad_batches": "the gradient is the same except for rounding",
}
"""Settings that may change, and the effect."""


_SPLIT_TEXT = "Unbelievable!  3.14159 × 1,024 = x_1^2\n\tdef été(naïve): return 'don't' # 東京\r\n>0123456789 "
"""Text with words, numbers, code, spaces and other scripts, which tokenizers split in different ways."""


class ResumeError(ValueError):
    """A checkpoint that this run cannot be resumed from."""


def save_state(checkpoint: dict[str, Any], settings: ResumeSettings, **state: Any) -> None:
    """Add lgrpo's state to a checkpoint, with the settings of the run."""
    checkpoint["grpo"] = {"format": CHECKPOINT_FORMAT, "settings": settings, **state}


def load_state(checkpoint: dict[str, Any], settings: ResumeSettings) -> dict[str, Any]:
    """Return lgrpo's state in a checkpoint; raise a ``ResumeError`` if the run cannot be resumed from it."""
    if "grpo" not in checkpoint:
        raise ResumeError("the checkpoint was not written by a GRPOModule: it contains no rollout to continue with")
    state = checkpoint["grpo"]
    if (found := state.get("format", 1)) != CHECKPOINT_FORMAT:
        age = "an older" if found < CHECKPOINT_FORMAT else "a newer"
        raise ResumeError(
            f"the checkpoint was written by {age} version of lgrpo (format {found}, this version reads "
            f"{CHECKPOINT_FORMAT}). Resume it with that version, or export its policy (lgrpo export) and start "
            "another run from it"
        )
    if "lr_schedulers" not in checkpoint:  # of a sharded checkpoint, optimizer_states are in other files
        raise ResumeError(
            "the checkpoint holds weights only (checkpoint.save_weights_only), so the run cannot be resumed from it. "
            "Export its policy (lgrpo export) and start another run from it"
        )
    compare_settings(state["settings"], settings)
    return state


def compare_settings(old: ResumeSettings, new: ResumeSettings) -> None:
    """Warn about settings that changed since the checkpoint, and raise a ``ResumeError`` if one must not change."""
    changed = [name for name in new if name in old and old[name] != new[name]]
    if refused := [_line(name, old, new, REQUIRED[name]) for name in changed if name in REQUIRED]:
        raise ResumeError(
            "this run cannot be resumed from the checkpoint:\n"
            + "\n".join(refused)
            + "\nUse the settings it was written with (config.yaml in the run folder), or start another run"
        )
    if allowed := [_line(name, old, new, CHANGEABLE[name]) for name in changed if name in CHANGEABLE]:
        warnings.warn("the checkpoint was written with other settings:\n" + "\n".join(allowed), stacklevel=2)


def check_policy(checkpoint: Mapping[str, Any], policy: ResumeSettings) -> None:
    """Raise a ``ValueError`` if a checkpoint was trained with another model or tokenizer than the policy's.

    Only what both sides describe is compared, and nothing is taken from the checkpoint. Metrics of such a checkpoint
    would be wrong without an error: token ids would mean other text, or prompts would be other tokens.
    """
    trained = checkpoint.get("grpo", {}).get("settings", {})
    changed = [
        _different_parts(name, trained, policy) for name in policy if trained.get(name, policy[name]) != policy[name]
    ]
    if changed:
        others = " and ".join(f"another {name} ({_short(before)}, now {_short(now)})" for name, before, now in changed)
        raise ValueError(
            f"the checkpoint was trained with {others}: use the policy settings of its run (config.yaml in the run "
            "folder)"
        )


def architecture_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the parts of a model's config that determine the shapes of its weights."""
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
    return _described(config, names)


def computation_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the parts of a model's config that determine its logits and are not visible in the shapes of weights."""
    names = ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window")
    return _described(config, names)


def _described(config: PretrainedConfig, names: Iterable[str]) -> dict[str, Any]:
    text = config.get_text_config()
    return {name: describe(value) for name in names if (value := getattr(text, name, None)) is not None}


def fingerprint(parts: Iterable[str]) -> str:
    """Return a short hash of a sequence of strings.

    >>> fingerprint(["ab", "c"]) == fingerprint(["a", "bc"])
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()[:12]


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's vocabulary."""
    return fingerprint(f"{token} {i}" for token, i in sorted(tokenizer.get_vocab().items()))


def tokenization_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of how a tokenizer splits a text: tokenizers of one vocabulary may differ in this."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(_SPLIT_TEXT).input_ids)
    return fingerprint([*tokens, str(tokenizer.eos_token)])


def chat_template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of a tokenizer's chat template, or of its templates by name; None if it has none."""
    template = tokenizer.chat_template
    return None if template is None else fingerprint([json.dumps(template, sort_keys=True)])


def describe(value: Any) -> Any:
    """Return an object as plain data: its class and its public attributes, recursively."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [describe(item) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if is_dataclass(value):
        attributes = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        attributes = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return {"class": type(value).__name__} | {name: describe(item) for name, item in attributes.items()}


def _line(name: str, old: ResumeSettings, new: ResumeSettings, effect: str) -> str:
    _, before, now = _different_parts(name, old, new)
    return f"  {name} was {_short(before)} and is now {_short(now)}: {effect}"


def _different_parts(name: str, old: ResumeSettings, new: ResumeSettings) -> tuple[str, Any, Any]:
    """Return the name of a setting, its old and its new value; of two dictionaries, only the parts that differ."""
    before, now = old[name], new[name]
    if isinstance(before, dict) and isinstance(now, dict):
        names = [key for key in (before | now) if before.get(key) != now.get(key)]
        before, now = ({key: values.get(key) for key in names} for values in (before, now))
    return name, before, now


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "…"
