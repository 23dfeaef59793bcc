"""Engines that fail: a server's worker that runs out of memory when told to, weights that change by themselves."""

from __future__ import annotations

import torch

from lgrpo.engines import TransformersEngine
from lgrpo.engines.ledger import Sent
from lgrpo.engines.vllm_weights import WeightReport
from lgrpo.types import PolicyWeights


class FaultyWorker(WeightReport):
    def exhaust_memory(self) -> None:
        """From the next step on."""
        self._lgrpo_model().register_forward_pre_hook(lambda *_: torch.empty(2**60, dtype=torch.uint8))


class Distorted(TransformersEngine):
    """One whose weights change between their arrival and the check."""

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        sent = super().receive(weights, version)
        with torch.no_grad():
            self._model.get_submodule("model.norm").weight.mul_(1.5)
        return sent
