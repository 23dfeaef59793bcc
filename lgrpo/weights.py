"""Weights on their way from the policy to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

NamedTensors: TypeAlias = "Callable[[], Iterator[tuple[str, Tensor]]]"


@contextmanager
def whole_iteration(source: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Iterate over tensors of a policy, and at the end, also after a failure, take those that are left.

    If one rank stops early, the others wait for it: they gather each tensor of a sharded policy together.
    """
    tensors = source()
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


@dataclass(kw_only=True, slots=True)
class Adapter:
    """Low-rank updates of frozen weights: W of a layer becomes W + B A."""

    rank: int
    base: NamedTensors
    """Frozen weights by their Hugging Face names."""
    tensors: NamedTensors
    """``LAYER.lora_A.weight`` [rank, in] and ``LAYER.lora_B.weight`` [out, rank] of every adapted layer."""

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with the updates applied."""
        updates = dict(self.tensors())
        for name, tensor in self.base():
            layer = name.removesuffix(".weight")
            if (a := updates.get(f"{layer}.lora_A.weight")) is not None:
                b = updates[f"{layer}.lora_B.weight"]
                tensor = (tensor.float() + b.float() @ a.float()).to(tensor.dtype)
            yield name, tensor


@dataclass(kw_only=True, slots=True)
class PolicyWeights:
    """Weights of a policy for an engine, by their Hugging Face names, produced one tensor at a time.

    Taking a tensor of a sharded policy gathers it, so all ranks must take the same tensors in the same order: see
    ``whole_iteration``.
    """

    config: PretrainedConfig
    """Architecture of the model, from which an engine builds its copy."""
    tensors: NamedTensors
    adapter: Adapter | None = None
    """The same weights as frozen base and trained adapter: an engine that has the base needs only the adapter."""
    compute_dtype: torch.dtype | None = None
    """Precision of the trainer's computation, if lower than that of the stored weights."""
    checksums: dict[str, int] | None = None
    """Checksums computed by the sender, complete after the last tensor; None if the receiver must compute them."""

    @classmethod
    def adapted(cls, config: PretrainedConfig, adapter: Adapter) -> PolicyWeights:
        """Return weights given as frozen base and adapter."""
        return cls(config=config, tensors=adapter.merged, adapter=adapter)

    @classmethod
    def of(cls, config: PretrainedConfig, held: Mapping[str, Tensor], adapter: Adapter | None = None) -> PolicyWeights:
        """Return weights that an engine has held: whole tensors, or, with an adapter, other tensors of that adapter."""
        if adapter is None:
            return cls(config=config, tensors=lambda: iter(held.items()))
        return cls.adapted(config, replace(adapter, tensors=lambda: iter(held.items())))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()
