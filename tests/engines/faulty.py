"""A server's worker that runs out of memory when it is told to."""

from __future__ import annotations

import torch

from lgrpo.engines.vllm_weights import WeightReport


class FaultyWorker(WeightReport):
    def exhaust_memory(self) -> None:
        """From the next step on."""
        self._lgrpo_model().register_forward_pre_hook(lambda *_: torch.empty(2**60, dtype=torch.uint8))
