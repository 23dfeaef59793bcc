"""Engines with faults: a server's worker that runs out of memory on request, and weights that change after loading."""

from __future__ import annotations

import torch

from lgrpo.engines import TransformersEngine
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.vllm.worker_extension import WeightReport
from lgrpo.types import PolicyWeights


class FaultyWorker(WeightReport):
    def exhaust_memory(self) -> None:
        """Fail in the next step."""
        self._lgrpo_model().register_forward_pre_hook(lambda *_: torch.empty(2**60, dtype=torch.uint8))


class Distorted(TransformersEngine):
    """An engine whose weights change between loading and verification."""

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        manifest = super().receive_weights(weights, step, version)
        with torch.no_grad():
            self._model.get_submodule("model.norm").weight.mul_(1.5)
        return manifest
