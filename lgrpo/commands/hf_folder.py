"""Load a policy from a checkpoint and write it as a Hugging Face folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from lgrpo.commands.settings import policy_from_settings
from lgrpo.functional import combined_checksum, named_checksums
from lgrpo.policy import CausalPolicy, is_reference
from lgrpo.run.resume import check_policy
from lgrpo.run.sharded import read_sharded

PREFIX = "policy."


def load_policy(path: Path, settings: Namespace) -> tuple[CausalPolicy, int]:
    """Return the policy of a checkpoint, and its optimizer step; raise if it was trained with another tokenizer."""
    checkpoint = read_checkpoint(path)
    state, step = checkpoint["state_dict"], checkpoint["global_step"]
    policy = policy_from_settings(settings)
    policy.build()
    saved = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    saved = {name: tensor for name, tensor in saved.items() if not is_reference(name)}
    check_policy(checkpoint, policy.resume_settings())
    try:
        policy.load_state_dict(policy.omitted_weights() | saved)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint {path} does not fit the config's model: {error}") from error
    return policy, step


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint, sharded or not, with its merged weights as ``state_dict``. No code in it is executed."""
    if not path.is_dir():
        return torch.load(path, map_location="cpu", weights_only=True)
    checkpoint, sharded = read_sharded(path)
    return checkpoint | {"state_dict": sharded["state_dict"]}


def write_model_folder(policy: CausalPolicy, folder: Path, dtype_name: str | None) -> str:
    """Write weights, config, generation config and tokenizer; return the checksum of the written weights."""
    dtype = getattr(torch, dtype_name) if dtype_name else policy.dtype
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in policy.weights()}
    config = copy.deepcopy(policy.model.config)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=policy.trust_remote_code)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=policy.tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=policy.trust_remote_code)
    return verified_checksum(weights.items(), written.state_dict())


def write_adapter_folder(policy: CausalPolicy, folder: Path) -> str:
    """Write the adapter in the format of peft, with its scale multiplied into B; return its checksum."""
    from lgrpo.engines.vllm.adapter import read_adapter, write_adapter

    adapter = policy.weights().adapter
    assert adapter is not None
    tensors = dict(adapter.tensors())
    write_adapter(folder, adapter.rank, tensors.items(), base=policy.name or "")
    policy.tokenizer.save_pretrained(folder)
    return verified_checksum(tensors.items(), read_adapter(folder))


def verified_checksum(weights: Iterable[tuple[str, Tensor]], written: dict[str, Tensor]) -> str:
    """Return the checksum of the weights; raise if the tensors read from the folder differ."""
    expected = named_checksums((name, tensor.cpu()) for name, tensor in weights)
    found = named_checksums(written.items())
    if different := [name for name in expected | found if expected.get(name) != found.get(name)]:
        raise ValueError(f"the tensor {different[0]} in the folder differs from the policy's: export again")
    return combined_checksum(expected)
