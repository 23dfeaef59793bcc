"""Attention over packed rows, registered with transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lgrpo.functional import Keys, packed_attention

PACKED = "lgrpo_packed"
"""Name of this attention implementation in transformers."""


class UnsupportedAttentionError(ValueError):
    """An attention layer computes something that only the eager implementation of transformers supports."""


def _packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Adapt ``packed_attention`` to the interface of transformers: [1, heads, N, D] in, [1, N, heads, D] out.

    Without the bounds of sequences, as in ``generate``, it is transformers' SDPA attention.
    """
    if "cu_seq_lens_q" not in options:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]:
        raise UnsupportedAttentionError(f"attention with {unknown} cannot be packed")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
    bounds, longest, window = options["cu_seq_lens_q"], options["max_length_q"], options.get("sliding_window")
    keys = None
    if options.get("key_index") is not None:  # rows share prompts
        keys = Keys(options["key_index"], options["cu_seq_lens_k"], options["max_length_k"])
    return packed_attention(query, key, value, bounds, longest, scale, window, keys)[None], None


def _mask(*arguments: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return None if nothing is padded: the bounds of packed rows replace a mask."""
    return None if attention_mask is None else sdpa_mask(*arguments, attention_mask=attention_mask, **options)


AttentionInterface.register(PACKED, _packed)
AttentionMaskInterface.register(PACKED, _mask)
