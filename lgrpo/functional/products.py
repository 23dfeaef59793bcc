"""Matrix products on a CPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_IS_LINUX_ON_ARM = sys.platform == "linux" and platform.machine() == "aarch64"


@contextmanager
def quick_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """float32 products by the BLAS library on ARM processors, where torch would hand them to oneDNN.

    oneDNN prepares each product for about 0.6 ms whatever its size: decoding 256 rows of a small model takes a third of
    the time without it, and large products are no slower. Elsewhere, and in bfloat16, nothing changes.

    >>> before = torch.backends.mkldnn.enabled
    >>> with quick_products(torch.device("cpu"), torch.float32):
    ...     product = torch.ones(2, 3) @ torch.ones(3, 2)
    >>> product[0], torch.backends.mkldnn.enabled == before
    (tensor([3., 3.]), True)
    """
    was_enabled = torch.backends.mkldnn.enabled
    applies = _IS_LINUX_ON_ARM and device.type == "cpu" and dtype == torch.float32
    if not (applies and was_enabled) or torch.is_autocast_enabled("cpu"):
        yield
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was_enabled
