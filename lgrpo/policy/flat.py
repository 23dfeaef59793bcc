"""The first FSDP: the parameters of a block are one flat tensor, of which every process holds a part.

Its successor needs none of this: there each parameter knows how it is spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import wrap


class Unit(NamedTuple):
    """What is gathered at a time."""

    module: FullyShardedDataParallel
    names: list[str]
    """Of its tensors, as the model knew them before."""


def refuse(has_adapters: bool, is_compiled: bool, is_sharded: bool, world_size: int) -> None:
    """An error for what it cannot do, or was never seen to do."""
    if has_adapters:
        raise ValueError(
            "policy.lora with FSDPStrategy: it would keep adapters and what they lie on in one tensor, with "
            "gradients of all of it. Use configs/fsdp2.yaml (lightning.pytorch.strategies.ModelParallelStrategy)"
        )
    if is_compiled:
        raise ValueError(
            "policy.compile with FSDPStrategy: the two together have not been seen working. Use "
            "configs/fsdp2.yaml (lightning.pytorch.strategies.ModelParallelStrategy), or leave compile out"
        )
    if is_sharded and world_size == 1:
        raise ValueError(
            "FSDPStrategy has one process, over which nothing is spread, so no sharded checkpoint can be written: "
            "raise trainer.devices, or set state_dict_type to full in trainer.strategy.init_args"
        )


def wrap_layers(
    root: nn.Module, model: nn.Module, layers: nn.ModuleList, mixed_precision: MixedPrecision | None
) -> list[Unit]:
    """A unit for what lies outside the layers, its module ``root`` itself; then one for each layer of ``model``."""
    (path,) = (path for path, module in model.named_modules() if module is layers)
    names = list(model.state_dict())
    own: list[list[str]] = []
    for index, layer in enumerate(layers):
        own.append([name for name in names if name.startswith(f"{path}.{index}.")])
        layers[index] = wrap(layer, mixed_precision=mixed_precision, auto_wrap_policy=None)
    outside = [name for name in names if not name.startswith(f"{path}.")]
    whole = wrap(root, mixed_precision=mixed_precision, auto_wrap_policy=None)
    return [Unit(module, part) for module, part in zip([whole, *layers], [outside, *own], strict=True)]


def settle(units: list[Unit]) -> None:
    """Frees what is gathered. The outermost unit keeps it after a pass, and would not see that its part has changed."""
    for module, _ in units:
        module.check_is_root()  # sets up what the first pass would
        handle = module._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(module, handle, True)


def gathered(model: nn.Module, units: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names, each whole, one unit after the other. While they are taken none is unsettled."""
    for module, names in units:
        unit = FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False)
        with torch.inference_mode(False), torch.no_grad(), unit:  # vLLM would have inference mode, which leaves marks
            tensors = [attrgetter(name)(model).detach().clone() for name in names]
        yield from zip(names, tensors, strict=True)
