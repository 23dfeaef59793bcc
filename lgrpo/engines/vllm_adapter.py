"""Adapters on their way into vLLM, and read back where it applies them.

vLLM is given an adapter as peft would save it. It multiplies B by alpha / rank: here that is done already, so that what
it holds can be compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lgrpo.engines.vllm_layout import FUSED, gathered
from lgrpo.functional import named_checksums

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those vLLM makes room for."""
_PREFIX = "base_model.model."


def room_for(rank: int) -> int:
    """The rank vLLM has to make room for.

    >>> room_for(4), room_for(16)
    (8, 16)
    """
    if rank > RANKS[-1]:
        raise ValueError(f"lora.rank is {rank}; vLLM takes adapters of rank {RANKS[-1]} at most")
    return next(room for room in RANKS if room >= rank)


def adapter_flags(rank: int) -> dict[str, Any]:
    """What vLLM has to be started with, to apply one adapter at a time."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(rank)}


def write_adapter(folder: Path, rank: int, tensors: Iterable[tuple[str, Tensor]], base: str = "") -> None:
    """An adapter as a folder of peft's."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(own, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in own})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "base_model_name_or_path": base}))


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The inverse: the tensors under the policy's names."""
    return {n.removeprefix(_PREFIX): tensor for n, tensor in load_file(folder / "adapter_model.safetensors").items()}


@torch.no_grad()
def applied_parts(worker: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """The one adapter a worker applies, under the policy's names, in the memory it is applied from."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slots = [slot for slot, name in enumerate(manager.lora_index_to_id) if name is not None]
    if len(slots) != 1:
        raise LookupError(f"vLLM applies {len(slots)} adapters, not one")
    place = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}
    for name, (rows, columns) in shapes.items():
        path, _, side = name.removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        fused, index = place.get(leaf, (leaf, 0))
        layer = manager.modules.get(f"{parent}.{fused}")
        if layer is None:
            raise LookupError(f"vLLM has no adapter at {path}")
        stacked = layer.lora_a_stacked if side == "lora_A" else layer.lora_b_stacked
        part = stacked[index][slots[0], 0, :rows, :columns]
        yield name, gathered(gathered(part, 0, rows), 1, columns)


def adapter_checksums(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Checksums of the adapter a worker applies."""
    return named_checksums(applied_parts(worker, shapes))


def adapter_weights(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """A copy of the adapter a worker applies."""
    return {name: part.clone() for name, part in applied_parts(worker, shapes)}
