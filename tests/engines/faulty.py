"""Engines with faults: a server's worker that runs out of memory on request, weights that change, slow processes."""

from __future__ import annotations

import time

import torch

from lgrpo.engines import RolloutEngine, TransformersEngine, VLLMEngine
from lgrpo.engines.completions import Generation
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


class _StoppedAfterAGroup(RolloutEngine):
    """An engine for a pool that waits for the pool's stop after the first whole group of a new generation."""

    def generate_part(self, generation: Generation) -> None:
        if any(c.token_ids for group in generation.begun.values() for c in group):
            return super().generate_part(generation)
        serve, deadline = self.on_step, time.monotonic() + 60

        def wait() -> None:
            serve()
            while generation.groups and not generation.is_stopped and time.monotonic() < deadline:
                time.sleep(0.01)
                serve()

        self.on_step = wait
        try:
            super().generate_part(generation)
        finally:
            self.on_step = serve


class StoppedTransformers(_StoppedAfterAGroup, TransformersEngine):
    pass


class StoppedVLLM(_StoppedAfterAGroup, VLLMEngine):
    pass
