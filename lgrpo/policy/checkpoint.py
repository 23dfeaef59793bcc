"""Weights of a policy in a checkpoint: with LoRA, those of the adapters alone."""

from __future__ import annotations

from typing import Any

from lgrpo.policy.adapters import is_reference
from lgrpo.policy.causal import CausalPolicy

_PREFIX = "policy."
"""Prefix of the policy's weights in the state of the Lightning module."""


def drop_omitted_weights(checkpoint: dict[str, Any], policy: CausalPolicy) -> None:
    """Remove the weights that can be loaded again by the policy's name."""
    omitted = policy.omitted_weights(_PREFIX)
    checkpoint["state_dict"] = {n: w for n, w in checkpoint.get("state_dict", {}).items() if n not in omitted}


def restore_omitted_weights(checkpoint: dict[str, Any], policy: CausalPolicy, has_reference: bool) -> None:
    """Add the weights that the checkpoint omits; without a reference, remove the reference's."""
    weights = checkpoint.get("state_dict")
    if not weights:  # a sharded checkpoint has them in other files
        return
    if not has_reference:
        weights = {n: w for n, w in weights.items() if not (n.startswith("reference.") or is_reference(n))}
    checkpoint["state_dict"] = policy.omitted_weights(_PREFIX) | weights
