"""Choice of the transfer, and the folder from which servers start."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lgrpo.engines.recovery import EngineError
from lgrpo.engines.servers.transfer.adapter import AdapterTransfer
from lgrpo.engines.servers.transfer.base import WeightTransfer
from lgrpo.engines.servers.transfer.file import FileTransfer
from lgrpo.engines.servers.transfer.nccl import NCCLTransfer
from lgrpo.engines.weight_files import shared_memory
from lgrpo.weights import PolicyWeights


@dataclass(kw_only=True, frozen=True)
class TransferSettings:
    """Settings of ``VLLMServerEngine`` that select and configure the transfer."""

    name: Literal["file", "nccl"]
    address: str | None
    weights_dir: str | None
    adapters: bool

    def __post_init__(self) -> None:
        if self.address is not None and self.name != "nccl":
            raise ValueError(f"transfer_address applies to transfer 'nccl', and transfer is {self.name!r}")

    def create(self, weights: PolicyWeights, timeout: float) -> WeightTransfer:
        """Create the transfer for these weights, with a folder that has everything but weights to start servers from.

        Each request may take ``timeout`` seconds.
        """
        if self.name == "nccl" and not torch.cuda.is_available():
            raise EngineError("transfer 'nccl' sends from GPU to GPU, and there is no GPU here: use 'file'")
        folder = Path(tempfile.mkdtemp(prefix="lgrpo-weights-", dir=self.weights_dir or shared_memory()))
        folder.chmod(0o700)
        weights.config.save_pretrained(folder)
        numbering_tokenizer(weights.config.get_text_config().vocab_size).save_pretrained(folder)
        if self.adapters and weights.adapter is not None:
            return AdapterTransfer(folder, timeout, weights.adapter.rank)
        if self.name == "nccl":
            return NCCLTransfer(folder, timeout, self.address)
        return FileTransfer(folder, timeout)


def numbering_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that spells token 7 as ``<7>``: vLLM requires one, although only ids are exchanged."""
    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<0>")
