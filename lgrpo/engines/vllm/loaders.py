"""How weights get into vLLM in the training process: whole, or only an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from lgrpo.engines.manifest import WeightManifest, WeightSyncError
from lgrpo.engines.vllm.adapter import adapter_checksums, adapter_weights, write_adapter
from lgrpo.engines.vllm.embedded import EmbeddedLLM
from lgrpo.engines.vllm.layout import Layout, WeightViews, checksums, engine_layout, read_parts
from lgrpo.engines.vllm.runtime import isolated
from lgrpo.engines.weight_files import temporary_folder
from lgrpo.weights import PolicyWeights


class WeightLoader(ABC):
    """Loads weights into one ``EmbeddedLLM``, and reads them back."""

    request: Any = None
    """vLLM's request for the adapter to apply, if any."""

    def __init__(self, llm: EmbeddedLLM) -> None:
        self.llm = llm
        self.manifest = WeightManifest()
        """The weights that were loaded last."""

    @abstractmethod
    def load(self, weights: PolicyWeights) -> WeightManifest:
        """Load weights. After an error vLLM cannot be used."""

    @abstractmethod
    def checksums(self) -> dict[str, int]:
        """Return checksums of vLLM's weights under the policy's names; raise ``LookupError`` if one is not found."""

    @abstractmethod
    def copies(self) -> dict[str, Tensor]:
        """Return copies of vLLM's weights under the policy's names."""


@final
class WholeLoader(WeightLoader):
    """Loads every tensor: first through vLLM, then, if vLLM stores tensors unchanged, directly into its memory."""

    def __init__(self, llm: EmbeddedLLM) -> None:
        super().__init__(llm)
        self.views: WeightViews | None = None
        """Views of the policy's tensors in vLLM's memory; None if it packs, pads or shards them."""
        self._layout: Layout = {}

    @torch.no_grad()
    def load(self, weights: PolicyWeights) -> WeightManifest:
        if self.views is not None and not self.views.is_current():
            self._layout, self.views = {}, None
        manifest = WeightManifest(dtype=self.llm.dtype)
        with isolated():
            if self.views is not None:
                self.views.copy_from(manifest.stream(weights, copy=False))
            else:
                iterator = manifest.stream(weights)
                self.llm.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        if not self._layout or manifest.shapes != self.manifest.shapes:
            self._layout = engine_layout(manifest.shapes)
            self.views = self._find_views(self._layout)
        self.manifest = manifest
        return manifest

    def _find_views(self, layout: Layout) -> WeightViews | None:
        model = self.llm.llm.llm_engine.model_config
        if model.quantization is not None or model.use_mla:  # vLLM derives further tensors from the weights
            return None
        return self.llm.on_model(lambda model: WeightViews.find(model, layout))

    def checksums(self) -> dict[str, int]:
        if self.views is not None and self.views.is_current():
            return self.views.checksums()
        return self.llm.on_model(lambda model: checksums(model, self._layout))

    def copies(self) -> dict[str, Tensor]:
        return self.llm.on_model(lambda model: {name: part.clone() for name, part in read_parts(model, self._layout)})


@final
class AdapterLoader(WeightLoader):
    """Loads the adapter only; vLLM has had the base weights since it was built."""

    def load(self, weights: PolicyWeights) -> WeightManifest:
        from vllm.lora.request import LoRARequest

        if weights.adapter is None:
            raise WeightSyncError("vLLM was built for adapters, and the weights have none")
        manifest = WeightManifest(dtype=self.llm.dtype)
        number = 1 + (self.request.lora_int_id if self.request else 0)
        with temporary_folder() as folder, isolated():
            write_adapter(folder, weights.adapter.rank, manifest.stream(weights.adapter.tensors()))
            self.request = LoRARequest(f"{number}", number, str(folder))
            if not self.llm.llm.llm_engine.add_lora(self.request):
                raise WeightSyncError("vLLM did not load the adapter")
        self.manifest = manifest
        return manifest

    def checksums(self) -> dict[str, int]:
        return self.llm.on_worker(adapter_checksums, self.manifest.shapes)

    def copies(self) -> dict[str, Tensor]:
        return self.llm.on_worker(adapter_weights, self.manifest.shapes)
