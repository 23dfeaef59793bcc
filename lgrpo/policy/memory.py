"""Memory of an update: estimated from the sizes of the model, and measured."""

from __future__ import annotations

import resource
import sys
from bisect import bisect
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from lgrpo.policy.causal import CausalPolicy
from lgrpo.run.sizes import format_bytes


def activation_bytes(
    config: PretrainedConfig, tokens: float, bytes_each: int, checkpointed: bool, budget: float = 1.0
) -> float:
    """Return the bytes that the layers keep of a micro-batch for the backward pass.

    With checkpointing that is the input of each layer. ``budget`` is ``policy.activation_memory``. Torch applies it to
    the range between a layer's inputs, its weights included, and all activations it would keep; so it has no effect if
    the weights are larger than the activations.
    """
    text = config.get_text_config()
    width, inner = text.hidden_size, getattr(text, "intermediate_size", 4 * text.hidden_size)
    inputs = tokens * width * bytes_each
    if checkpointed:
        return text.num_hidden_layers * inputs
    everything = tokens * (10 * width + 3 * inner) * bytes_each
    least = inputs + 4 * width * (4 * width + 3 * inner)
    return text.num_hidden_layers * min(everything, budget * everything + (1 - budget) * least)


def logit_bytes(config: PretrainedConfig, tokens: float, chunk_size: int) -> float:
    """Return the bytes of a chunk of logits: the logits, their gradient, and a temporary copy."""
    return 3 * min(chunk_size, tokens) * config.get_text_config().vocab_size * 4


def local_bytes(parameter: Tensor) -> int:
    """Return the bytes of this process's shard of a parameter."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def used_memory(trainer: L.Trainer) -> dict[str, float]:
    """Return the metric of memory, in GiB, the largest of all ranks: the GPU's peak so far, or the resident memory."""
    device = trainer.strategy.root_device
    kind = "gpu" if device.type == "cuda" else "resident"
    if device.type == "cuda":
        used = float(torch.cuda.max_memory_allocated(device))
    elif sys.platform == "linux":
        used = float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    else:
        used = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if trainer.world_size > 1:
        used = float(trainer.strategy.reduce(torch.tensor(used, device=device), reduce_op="max"))
    return {f"memory/{kind}": used / 2**30}


def check_memory(policy: CausalPolicy, trainer: L.Trainer, budget: int | None) -> None:
    """Raise a ``ValueError`` if an update in micro-batches of ``budget`` tokens does not fit into free GPU memory."""
    device = trainer.strategy.root_device
    if budget is None or device.type != "cuda":
        return
    config, is_checkpointed = policy.model.config, policy.gradient_checkpointing
    bytes_each = 2 if "16" in str(trainer.precision) else 4

    def required(tokens: float) -> float:
        kept = activation_bytes(config, tokens, bytes_each, is_checkpointed, policy.activation_memory)
        return kept + logit_bytes(config, tokens, policy.chunk_size)

    state = 3 * sum(local_bytes(p) for p in policy.parameters() if p.requires_grad)  # gradients, at most two moments
    check_token_budget(budget, required, state, torch.cuda.mem_get_info(device)[0])


def check_token_budget(budget: int, required: Callable[[float], float], state: float, free: float) -> None:
    """Raise a ``ValueError`` if a micro-batch needs more memory than is free.

    ``budget`` is its number of tokens, ``required`` returns the bytes of activations and logits of so many tokens, and
    ``state`` are the bytes of gradients and optimizer state, which are not allocated yet.
    """
    if required(budget) + state > free:
        fitting = max(0, bisect(range(budget), free - state, key=required) - 1)
        raise ValueError(
            f"micro-batches of data.micro_batch_tokens {budget:,} would need about {format_bytes(required(budget))} "
            f"beside {format_bytes(state)} of gradients and optimizer, and {format_bytes(free)} are free: about "
            f"{fitting:,} tokens fit. Lower it, set policy.gradient_checkpointing, or lower policy.chunk_size"
        )
