"""Weights in a checkpoint: without those that can be loaded again by the policy's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lgrpo.functional import combined_checksum, named_checksums
from lgrpo.policy.adapters import is_reference
from lgrpo.policy.causal import CausalPolicy
from lgrpo.policy.reference import Reference
from lgrpo.run.resume import ResumeError

_PREFIX = "policy."
"""Prefix of the policy's weights in the state of the Lightning module."""
_REFERENCE = "reference."
"""Prefix of the reference's weights."""


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
        weights = {n: w for n, w in weights.items() if not (n.startswith(_REFERENCE) or is_reference(n))}
    checkpoint["state_dict"] = policy.omitted_weights(_PREFIX) | weights


class InitialReference:
    """Keeps the reference out of checkpoints while it is the model that the policy was loaded from.

    Such a checkpoint holds a checksum of the weights instead. The module calls ``start`` when it has made the
    reference, ``forget`` when it changes it, ``drop`` when a checkpoint is saved, and ``restore`` when one is loaded.
    """

    def __init__(self) -> None:
        self._is_initial = False
        self._checksum: str | None = None

    def start(self, is_initial: bool) -> None:
        """Note whether the reference has the weights of the policy's source."""
        self._is_initial, self._checksum = is_initial, None

    def forget(self) -> None:
        """Note that the reference has other weights."""
        self._is_initial = False

    def note(self, reference: Reference | None) -> None:
        """Compute the checksum of an unchanged reference, so that a change by other code is noticed."""
        if self._is_initial and self._checksum is None:
            self._checksum = _checksum(reference)

    def drop(self, checkpoint: dict[str, Any], reference: Reference | None) -> str | None:
        """Remove the reference from a checkpoint if it can be loaded again; return its checksum, otherwise None."""
        self.note(reference)
        if not self._is_initial or _checksum(reference) != self._checksum:
            self._is_initial = False
            return None
        weights = checkpoint.get("state_dict", {})
        checkpoint["state_dict"] = {name: w for name, w in weights.items() if not name.startswith(_REFERENCE)}
        return self._checksum

    def restore(
        self, checkpoint: dict[str, Any], checksum: str | None, policy: CausalPolicy, reference: Reference | None
    ) -> None:
        """Add the reference to a checkpoint that has only its checksum; raise an error if its source has changed."""
        if checksum is None or not isinstance(reference, CausalPolicy):
            self._is_initial = False
            return
        if isinstance(reference, FSDPModule) or not checkpoint.get("state_dict"):
            raise ResumeError("the checkpoint omits the reference, so it can only be resumed by a run without FSDP")
        state = reference.state_dict() if self._is_initial else policy.source_state()
        if combined_checksum(named_checksums(state.items())) != checksum:
            raise ResumeError(
                f"the reference of this run is the model {policy.name!r} as it was when the run started, but that now "
                "has other weights: give policy.name the model that the run was started with"
            )
        checkpoint["state_dict"] |= {f"{_REFERENCE}{name}": weight for name, weight in state.items()}
        self._is_initial, self._checksum = True, checksum


def _checksum(reference: Reference | None) -> str | None:
    if not isinstance(reference, CausalPolicy):
        return None
    state: dict[str, Tensor] = reference.state_dict()
    return combined_checksum(named_checksums(state.items()))
