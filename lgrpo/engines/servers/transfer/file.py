"""Whole weights as files that servers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.transfer.base import WeightTransfer
from lgrpo.engines.weight_files import read_folder


@final
class FileTransfer(WeightTransfer):
    """Safetensors files in the shared folder. They are kept between syncs, so restarts and checkpoints read them."""

    def held_weights(self, servers: Sequence[VLLMServer]) -> dict[str, Tensor]:
        return read_folder(self.folder)
