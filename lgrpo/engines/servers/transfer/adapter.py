"""LoRA adapters as files that servers apply to a base they were started with."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, final

from torch import Tensor

from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.transfer.base import WeightTransfer, parse_checksums
from lgrpo.engines.vllm.adapter import adapter_flags, read_adapter, write_adapter
from lgrpo.engines.weight_files import write_folder
from lgrpo.weights import PolicyWeights


@final
class AdapterTransfer(WeightTransfer):
    """Adapter files, loaded through vLLM's LoRA routes. The base weights are written once, before servers start."""

    environment: ClassVar = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def __init__(self, folder: Path, timeout: float, rank: int) -> None:
        super().__init__(folder, timeout)
        self.flags = adapter_flags(rank)
        self.adapter_rank = rank
        self._base = WeightManifest()
        self._number = 0

    def write(self, weights: PolicyWeights, sent: WeightManifest) -> None:
        assert weights.adapter is not None
        if not self._base.shapes:
            self._base = WeightManifest(dtype=sent.dtype)
            write_folder(self.folder, self._base.stream(weights.adapter.base()))
        before = self._adapter
        self._number += 1
        write_adapter(self._adapter, weights.adapter.rank, sent.stream(weights.adapter.tensors()))
        self.model = f"policy-{secrets.token_hex(4)}"  # a new name, because vLLM may have loaded the previous one
        shutil.rmtree(before, ignore_errors=True)

    def reload(self, server: VLLMServer) -> None:
        body = {"lora_name": self.model, "lora_path": str(self._adapter), "load_inplace": True}
        server.call("POST", "/v1/load_lora_adapter", self.timeout, is_json=False, json=body)
        for name in server.adapters - {self.model}:
            server.call("POST", "/v1/unload_lora_adapter", self.timeout, is_json=False, json={"lora_name": name})
        server.adapters = {self.model}

    def on_connect(self, servers: Sequence[VLLMServer]) -> None:
        for server in servers:
            self._base.compare(self._checksums(server, self._base))
            self.reload(server)

    def checksums(self, server: VLLMServer) -> dict[str, int]:
        return parse_checksums(server.rpc("lgrpo_adapter_checksums", self.timeout, shapes=self.sent.shapes))

    def held_weights(self, servers: Sequence[VLLMServer]) -> dict[str, Tensor]:
        return read_adapter(self._adapter)

    @property
    def _adapter(self) -> Path:
        """Folder of the current adapter."""
        return self.folder / f"adapter-{self._number}"
