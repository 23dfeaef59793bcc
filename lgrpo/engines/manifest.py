"""Manifest and record of a sync: which weights were sent, and the proof that the engine holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lgrpo.engines.recovery import EngineError
from lgrpo.functional import CHUNK_BYTES, as_numbers, chunks, combined_checksum, joined, tensor_checksums
from lgrpo.weights import PolicyWeights


class WeightSyncError(RuntimeError):
    """A sync failed: the engine does not hold the policy's weights."""


@contextmanager
def sync_errors() -> Iterator[None]:
    """Turn an ``EngineError`` inside into a ``WeightSyncError``."""
    try:
        yield
    except EngineError as error:
        raise WeightSyncError(f"the sync failed: {error}") from error


@dataclass(kw_only=True, slots=True)
class SyncRecord:
    """One verified sync."""

    version: int
    """Number of the sync in the run, from 0. Every completion carries the version of its weights."""
    step: int
    """Optimizer step of the weights."""
    checksum: str
    """Combined checksum of all weights, as reported by the engine."""
    num_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dictionary."""
        return asdict(self)


@dataclass(kw_only=True, slots=True)
class WeightManifest:
    """Names, shapes and checksums of the weights sent to an engine, recorded while they are streamed.

    ``stream`` or ``record`` is called for all tensors; then ``check_finite`` and ``compare`` check them.
    """

    dtype: torch.dtype | None = None
    """Precision in which weights are sent; None: the policy's."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    _recorded: list[tuple[list[str], Tensor, Tensor]] = field(default_factory=list)
    """Names, checksums and largest values per chunk, kept on the device because reading each would block."""
    _provided: dict[str, int] | None = None
    """Checksums that came with the weights, and are not computed again."""

    def stream(self, weights: Iterable[tuple[str, Tensor]], copy: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights one at a time, cast to ``dtype``, and record them.

        On a GPU a chunk of tensors is recorded before the first of them is yielded.

        Args:
            weights: Names and tensors.
            copy: Whether each tensor has its own memory; otherwise it may share the policy's.
        """
        if isinstance(weights, PolicyWeights):
            self._provided = weights.checksums
        cast = ((name, tensor.detach().to(self.dtype or tensor.dtype, copy=copy)) for name, tensor in weights)
        for chunk in chunks(cast, CHUNK_BYTES if torch.cuda.is_available() else 0):
            self.record(chunk)
            for name in list(chunk):
                yield name, chunk.pop(name)

    def record(self, chunk: Mapping[str, Tensor]) -> None:
        """Record tensors that have the engine's precision already."""
        tensors = list(chunk.values())
        self.shapes |= {name: tuple(tensor.shape) for name, tensor in chunk.items()}
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._provided is None:
            self._recorded.append((list(chunk), tensor_checksums(tensors), largest(tensors)))

    @property
    def checksums(self) -> dict[str, int]:
        """Checksum of every tensor. Valid once all are recorded."""
        if self._provided is not None:
            return self._provided
        return dict(zip(self._names(), as_numbers([sums for _, sums, _ in self._recorded]), strict=True))

    def check_finite(self) -> None:
        """Raise a ``WeightSyncError`` if a recorded tensor is not finite."""
        extremes = joined([extremes for _, _, extremes in self._recorded])
        for name, is_finite in zip(self._names(), extremes.isfinite().tolist(), strict=True):
            if not is_finite:
                raise WeightSyncError(
                    f"the policy's {name} is not finite: the engine would sample noise without an error"
                )

    def _names(self) -> Iterator[str]:
        return (name for names, _, _ in self._recorded for name in names)

    def compare(self, held: Mapping[str, int]) -> str:
        """Return the combined checksum, or raise a ``WeightSyncError`` that names the first tensor that differs."""
        expected = self.checksums
        for name, checksum in expected.items():
            if name not in held:
                raise WeightSyncError(f"the engine does not report {name}, which was sent to it")
            if held[name] != checksum:
                raise WeightSyncError(
                    f"the engine's {name} differs from the policy's after the sync (checksum {held[name]:016x}, "
                    f"expected {checksum:016x})"
                )
        return combined_checksum(expected)


def largest(tensors: list[Tensor]) -> Tensor:
    """Return one number per tensor that is finite if all its values are: the largest absolute value, or the sum."""
    first = tensors[0].device
    if first.type == "cuda" and all(t.device == first and t.is_floating_point() and t.numel() for t in tensors):
        return torch.stack(torch._foreach_norm(tensors, math.inf)).float()
    return torch.stack([tensor.sum().float().to(first) for tensor in tensors])
