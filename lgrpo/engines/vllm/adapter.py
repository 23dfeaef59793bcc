"""Adapters in vLLM: written as files it loads, and read back from the memory it applies them from.

The files have peft's format. vLLM multiplies B by alpha / rank; the policy's B includes that factor already, and alpha
is written as the rank, so that vLLM's tensors equal the policy's bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lgrpo.engines.vllm.layout import FUSED_INDEX, gather_shards
from lgrpo.functional import named_checksums

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports."""
_PREFIX = "base_model.model."


def supported_rank(rank: int) -> int:
    """Return the smallest rank that vLLM supports for an adapter of that rank.

    >>> supported_rank(4), supported_rank(16)
    (8, 16)
    """
    if rank > RANKS[-1]:
        raise ValueError(f"lora.rank is {rank}; vLLM supports adapters of rank {RANKS[-1]} at most")
    return next(supported for supported in RANKS if supported >= rank)


def adapter_flags(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for applying one adapter at a time."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": supported_rank(rank)}


def write_adapter(folder: Path, rank: int, tensors: Iterable[tuple[str, Tensor]], base: str = "") -> None:
    """Write an adapter as a folder in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    prefixed = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(prefixed, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in prefixed})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "base_model_name_or_path": base}))


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of such a folder under the policy's names."""
    return {n.removeprefix(_PREFIX): tensor for n, tensor in load_file(folder / "adapter_model.safetensors").items()}


@torch.no_grad()
def applied_parts(worker: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the one adapter that a worker applies, under the policy's names, as views of its memory."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slots = [slot for slot, name in enumerate(manager.lora_index_to_id) if name is not None]
    if len(slots) != 1:
        raise LookupError(f"vLLM applies {len(slots)} adapters, not one")
    for name, (rows, columns) in shapes.items():
        path, _, side = name.removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        fused, index = FUSED_INDEX.get(leaf, (leaf, 0))
        layer = manager.modules.get(f"{parent}.{fused}")
        if layer is None:
            raise LookupError(f"vLLM has no adapter at {path}")
        stacked = layer.lora_a_stacked if side == "lora_A" else layer.lora_b_stacked
        part = stacked[index][slots[0], 0, :rows, :columns]
        yield name, gather_shards(gather_shards(part, 0, rows), 1, columns)


def adapter_checksums(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return checksums of the adapter that a worker applies."""
    return named_checksums(applied_parts(worker, shapes))


def adapter_weights(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return a copy of the adapter that a worker applies."""
    return {name: part.clone() for name, part in applied_parts(worker, shapes)}
