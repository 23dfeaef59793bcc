"""Worker extension of vLLM servers: reports the weights of a worker, and how it computes log-probabilities."""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from torch import nn

from lgrpo.engines.vllm.adapter import adapter_checksums
from lgrpo.engines.vllm.layout import Layout, checksums, read_parts


class WeightReport:
    """Methods added to the worker of a vLLM server: report version and checksums of its weights, and write them.

    Servers you start yourself need ``--worker-extension-cls lgrpo.engines.vllm.worker_extension.WeightReport``.
    """

    _lgrpo_version: int | None = None

    def lgrpo_set_version(self, version: int) -> None:
        self._lgrpo_version = version

    def lgrpo_version(self) -> dict[str, int | None]:
        return {"version": self._lgrpo_version}

    def lgrpo_logprobs_mode(self) -> dict[str, str]:
        return {"logprobs_mode": str(self.vllm_config.model_config.logprobs_mode)}  # type: ignore[attr-defined]

    def lgrpo_checksums(self, layout: Layout) -> dict[str, str]:
        return {name: f"{value:016x}" for name, value in checksums(self._lgrpo_model(), layout).items()}

    def lgrpo_adapter_checksums(self, shapes: dict) -> dict[str, str]:
        return {name: f"{value:016x}" for name, value in adapter_checksums(self, shapes).items()}

    def lgrpo_write_weights(self, folder: str, layout: Layout) -> None:
        parts = read_parts(self._lgrpo_model(), layout)
        tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in parts}
        if self.rank == 0:  # type: ignore[attr-defined] # every worker has gathered whole tensors
            save_file(tensors, f"{folder}/model.safetensors")

    def _lgrpo_model(self) -> nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]
