"""The reference: a frozen copy of the policy, or of its adapter, and its log-probabilities of a rollout."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from lgrpo.policy import adapters
from lgrpo.policy.causal import CausalPolicy
from lgrpo.policy.sequences import read_in_context
from lgrpo.types import RolloutBatch
from lgrpo.weights import PolicyWeights


@final
class AdapterReference:
    """The reference of a policy with adapters: the policy's model with a second, frozen adapter."""

    def __init__(self, policy: CausalPolicy) -> None:
        self._policy = policy

    def __call__(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        with adapters.as_reference(self._policy.model):
            return self._policy(*arguments, **named)

    def weights(self) -> PolicyWeights:
        """Return the weights by their Hugging Face names."""
        return self._policy.adapted_weights(adapters.REFERENCE)

    def update_from(self, policy: CausalPolicy, decay: float) -> None:
        """Copy the policy's adapter; a ``decay`` other than 0 is an error."""
        if decay:
            raise ValueError(
                f"reference_refresh.decay is {decay}: the mean of two adapters' A and B is not the mean of their "
                "products. With LoRA set it to 0"
            )
        policy.free_gathered()
        adapters.copy_to_reference(policy.model)


Reference: TypeAlias = CausalPolicy | AdapterReference


def make_reference(policy: CausalPolicy) -> Reference:
    """Return a frozen copy of the policy; with LoRA, a frozen copy of its adapter."""
    if policy.lora is None:
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
        reference.is_frozen = True
        return reference
    adapters.add_adapter(policy.model, policy.lora, policy.model.get_output_embeddings(), adapters.REFERENCE)
    adapters.copy_to_reference(policy.model)
    return AdapterReference(policy)


class ReferenceLogprobs:
    """log π_ref of the current rollout, computed on its first pass and reused on the later ones.

    Call ``clear`` after changing the reference.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, reference: Reference, batch: RolloutBatch) -> Tensor:
        """Return log π_ref [B, T] of a micro-batch, without gradient."""
        key = (batch.rollout, *batch.rows.tolist())
        if key not in self._cached:
            with torch.no_grad():
                logprobs, _ = read_in_context(reference, batch)
            current = {k: v for k, v in self._cached.items() if k[0] == batch.rollout}
            self._cached = current | {key: logprobs}
        return self._cached[key]

    def clear(self) -> None:
        """Drop all log-probabilities."""
        self._cached = {}
