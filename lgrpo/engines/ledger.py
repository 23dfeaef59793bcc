"""The record of every sync: which weights an engine holds, and how it is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lgrpo.functional import AT_ONCE, as_numbers, chunks, combined_checksum, joined, tensor_checksums
from lgrpo.types import PolicyWeights


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights it was given."""


@dataclass(kw_only=True, slots=True)
class SyncRecord:
    """One sync, as it was verified."""

    version: int
    """Counts the syncs of a run, from 0. Every completion carries the version that sampled it."""
    step: int
    """Optimizer step of the weights."""
    checksum: str
    """Of all weights, as the engine reports them."""
    num_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True, slots=True)
class Sent:
    """What went to an engine, noted while it passes: names, shapes and checksums in the engine's own precision."""

    dtype: torch.dtype | None = None
    """Precision of the engine; None: the policy's."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    _noted: list[tuple[list[str], Tensor, Tensor]] = field(default_factory=list)
    """Names, their checksums and largest numbers, on the device: fetching each by itself would wait for it."""
    _given: dict[str, int] | None = None
    """Checksums that came with the weights, and need not be taken."""
    _fetched: dict[str, int] | None = None
    """Those that were, as numbers."""

    def through(self, weights: Iterable[tuple[str, Tensor]], copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weights one at a time, each in memory of its own; without ``copy``, in the policy's where that can be.

        On a GPU some are taken before the first of them is given on.
        """
        if isinstance(weights, PolicyWeights):
            self._given = weights.noted
        cast = ((name, tensor.detach().to(self.dtype or tensor.dtype, copy=copy)) for name, tensor in weights)
        for chunk in chunks(cast, AT_ONCE if torch.cuda.is_available() else 0):
            self.note(chunk)
            for name in list(chunk):
                yield name, chunk.pop(name)

    def note(self, chunk: Mapping[str, Tensor]) -> None:
        """Some that are in the engine's precision already."""
        tensors = list(chunk.values())
        self.shapes |= {name: tuple(tensor.shape) for name, tensor in chunk.items()}
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._given is None:
            self._noted.append((list(chunk), tensor_checksums(tensors), largest(tensors)))
            self._fetched = None

    @property
    def checksums(self) -> dict[str, int]:
        """Of every tensor that went, once all have."""
        if self._given is not None:
            return self._given
        if self._fetched is None:
            numbers = as_numbers([sums for _, sums, _ in self._noted])
            self._fetched = dict(zip(self._names(), numbers, strict=True))
        return self._fetched

    def refuse_noise(self) -> None:
        """An error where a tensor that went is not finite."""
        sizes = joined([sizes for _, _, sizes in self._noted])
        for name, is_finite in zip(self._names(), sizes.isfinite().tolist(), strict=True):
            if not is_finite:
                raise WeightSyncError(f"the policy's {name} is not finite: an engine would sample from noise, silently")

    def _names(self) -> Iterator[str]:
        return (name for names, _, _ in self._noted for name in names)

    def compare(self, held: Mapping[str, int]) -> str:
        """The checksum of what the engine holds, or an error that names the first tensor that differs."""
        sent = self.checksums
        for name, checksum in sent.items():
            if name not in held:
                raise WeightSyncError(f"the engine does not report {name}, which it was given")
            if held[name] != checksum:
                raise WeightSyncError(
                    f"the engine's {name} differs from the policy's after the sync (checksum {held[name]:016x}, "
                    f"expected {checksum:016x})"
                )
        return combined_checksum(sent)


def largest(tensors: list[Tensor]) -> Tensor:
    """Of each tensor the largest number by size, not finite where one of them is not."""
    first = tensors[0].device
    if first.type == "cuda" and all(t.device == first and t.is_floating_point() and t.numel() for t in tensors):
        return torch.stack(torch._foreach_norm(tensors, math.inf)).float()
    return torch.stack([tensor.sum().float().to(first) for tensor in tensors])
