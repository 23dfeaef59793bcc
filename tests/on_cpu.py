"""The first FSDP on CPU processes, which torch can do and Lightning does not offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp.wrap import _ConfigAutoWrap


class FSDPOnCPU(FSDPStrategy):
    """Lightning's own, but for the check that refuses it on a CPU by its class, and the device's number."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with super().model_sharded_context():
            _ConfigAutoWrap.kwargs["device_id"] = torch.device("cpu")
            yield


class PrecisionOnCPU(FSDPPrecision):
    """Autocast of the device at hand."""

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if "mixed" in self.precision else super().forward_context()
