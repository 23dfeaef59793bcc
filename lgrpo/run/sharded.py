"""Sharded checkpoints: folders with a file for each rank."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from lgrpo.run.checkpoints import META, AtomicCheckpointIO, damage


def consolidate(folder: Path, path: Path) -> None:
    """Write a sharded checkpoint as one file, in the format of a run that is not sharded."""
    if not (folder / META).is_file():
        raise ValueError(f"{folder} is not a sharded checkpoint: that is a folder with {META} and a file for each rank")
    if (problem := damage(folder)) is not None:
        raise ValueError(f"{folder} is damaged: {problem}")
    if path.exists():
        raise ValueError(f"{path} exists already, and nothing is overwritten")
    checkpoint, sharded = read_sharded(folder)
    checkpoint["state_dict"] = sharded.pop("state_dict")
    checkpoint["optimizer_states"] = [by_index(sharded[name]) for name in sorted(sharded)]
    writer = AtomicCheckpointIO()
    writer.save_checkpoint(checkpoint, path)
    if writer.failed is not None:
        raise OSError(f"{path} could not be written")


def read_sharded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts of a sharded checkpoint that are not sharded, and the others, merged.

    Loading executes no code from the checkpoint.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # slow to import

    with tempfile.TemporaryDirectory() as temporary:
        merged = Path(temporary) / "merged.pt"
        dcp_to_torch_save(folder, merged)
        sharded = torch.load(merged, map_location="cpu", weights_only=True)
    if "model" in sharded:  # the name that FSDPStrategy uses
        sharded["state_dict"] = sharded.pop("model")
    return torch.load(folder / META, map_location="cpu", weights_only=True), sharded


def by_index(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the indices of its parameters instead of their names.

    >>> by_index({"state": {"b": 5}, "param_groups": [{"lr": 1, "params": ["a", "b"]}]})
    {'state': {1: 5}, 'param_groups': [{'lr': 1, 'params': [0, 1]}]}
    """
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    index = {name: i for i, name in enumerate(names)}
    return {
        "state": {index[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [
            group | {"params": [index[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
