"""FSDP1 on CPU processes: torch supports it, Lightning does not offer it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp.wrap import _ConfigAutoWrap


class FSDPOnCPU(FSDPStrategy):
    """``FSDPStrategy`` without the check that refuses CPUs, and with a CPU as its device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with super().model_sharded_context():
            _ConfigAutoWrap.kwargs["device_id"] = torch.device("cpu")
            yield


class PrecisionOnCPU(FSDPPrecision):
    """``FSDPPrecision`` that autocasts on the CPU."""

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if "mixed" in self.precision else super().forward_context()
