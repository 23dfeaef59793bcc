"""Size of vLLM's key-value cache without a measurement, so that several engines can start on one GPU at a time."""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig

from lgrpo.engines.vllm.engine import VLLMEngine
from lgrpo.weights import PolicyWeights, whole_iteration

_BATCHED_TOKENS = 16384
"""Most tokens that vLLM computes at a time by default."""
_MARGIN = 1.5
"""Factor for memory that the estimate does not know."""
_CONSTANT = 2**29
"""Bytes of CUDA graphs and libraries."""


def with_cache_size(
    engine: VLLMEngine, weights: PolicyWeights, dtype: torch.dtype | None, total_bytes: int
) -> VLLMEngine:
    """Return a copy of an engine with a fixed ``kv_cache_gib``, or the engine if it has one or cannot be estimated.

    By default vLLM measures the free memory while it starts, which fails if another process allocates meanwhile.

    Args:
        engine: Engine to copy, which has no processes or memory yet.
        weights: Weights that it will hold.
        dtype: Precision in which it will hold them; None: theirs.
        total_bytes: Memory of the GPU.
    """
    if engine.kv_cache_gib is not None:
        return engine
    with whole_iteration(weights.tensors) as tensors:
        weight_bytes = sum(tensor.numel() * (dtype or tensor.dtype).itemsize for _, tensor in tensors)
    share = engine.gpu_memory_utilization * total_bytes
    size = cache_bytes(weights.config, weight_bytes, share, engine.max_num_seqs)
    if size is None:
        return engine
    engine = copy.copy(engine)
    engine.kv_cache_gib = size / 2**30
    return engine


def cache_bytes(config: PretrainedConfig, weight_bytes: float, share: float, max_num_seqs: int) -> float | None:
    """Return the bytes of ``share`` that weights, activations and logits leave; None if that is less than half of it.

    >>> from transformers import Qwen2Config
    >>> config = Qwen2Config(hidden_size=1536, intermediate_size=8960, vocab_size=151936)
    >>> round(cache_bytes(config, 2.9 * 2**30, 28 * 2**30, max_num_seqs=512) / 2**30, 1)
    22.6
    >>> cache_bytes(config, 2.9 * 2**30, 4.8 * 2**30, max_num_seqs=512) is None
    True
    """
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "vocab_size")]
    hidden, intermediate, vocabulary = (size if isinstance(size, int) else 0 for size in sizes)
    if 0 in (hidden, intermediate, vocabulary):
        return None
    activations = _BATCHED_TOKENS * (2 * intermediate + 4 * hidden) * 2
    logits = max_num_seqs * vocabulary * 8
    size = share - weight_bytes - _MARGIN * (activations + logits) - _CONSTANT
    return size if size >= share / 2 else None
