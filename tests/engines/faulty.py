"""Engines with faults: a server's worker that runs out of memory on request, and weights that change after loading."""

from __future__ import annotations

import time

import torch

from lgrpo.engines import TransformersEngine
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.vllm.worker_extension import WeightReport
from lgrpo.weights import PolicyWeights


class FaultyWorker(WeightReport):
    def exhaust_memory(self) -> None:
        """Fail in the next step."""
        self._lgrpo_model().register_forward_pre_hook(lambda *_: torch.empty(2**60, dtype=torch.uint8))

    def slow_down(self, seconds: float) -> None:
        """Take at least so long for each step from now on."""
        if not hasattr(self, "_pause"):
            self._lgrpo_model().register_forward_pre_hook(lambda *_: time.sleep(self._pause))
        self._pause = seconds


class Distorted(TransformersEngine):
    """An engine whose weights change between loading and verification."""

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        manifest = super().receive_weights(weights, step, version)
        with torch.no_grad():
            self._model.get_submodule("model.norm").weight.mul_(1.5)
        return manifest
