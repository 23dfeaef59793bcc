"""The record of every sync: which weights an engine holds, and how it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lgrpo.functional import as_numbers, combined_checksum, tensor_checksum


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
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Checksums, still on the device they were taken on: fetching each by itself would wait for it."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Plain sums, to see whether a tensor is finite."""

    def through(self, weights: Iterable[tuple[str, Tensor]], copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weights one at a time, each in memory of its own; without ``copy``, in the policy's where that can be."""
        for name, tensor in weights:
            tensor = tensor.detach()
            cast = tensor.to(self.dtype or tensor.dtype, copy=copy)
            self.totals[name] = cast.sum()
            self.sums[name] = tensor_checksum(cast)
            self.shapes[name] = tuple(cast.shape)
            self.num_bytes += cast.numel() * cast.element_size()
            yield name, cast

    @property
    def checksums(self) -> dict[str, int]:
        """Of every tensor that went."""
        return as_numbers(self.sums)

    def refuse_noise(self) -> None:
        """An error where a tensor that went is not finite."""
        totals = list(self.totals.values())
        flags = torch.stack([total.to(totals[0].device) for total in totals]).isfinite().tolist() if totals else []
        if noise := [name for name, flag in zip(self.totals, flags, strict=True) if not flag]:
            raise WeightSyncError(f"the policy's {noise[0]} is not finite: an engine would sample from noise, silently")

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
