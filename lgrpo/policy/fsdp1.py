"""The first FSDP: the parameters of a layer are one flat tensor, sharded over processes.

FSDP2 needs none of this, because each of its parameters is a ``DTensor``.
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
    """Parameters that are gathered together."""

    module: FullyShardedDataParallel
    names: list[str]
    """Names of its tensors in the model before wrapping."""


def wrap_layers(
    root: nn.Module, model: nn.Module, layers: nn.ModuleList, mixed_precision: MixedPrecision | None
) -> list[Unit]:
    """Wrap ``root`` and each layer of ``model``; return their units, that of ``root`` first.

    The unit of ``root`` has the parameters outside the layers.
    """
    (path,) = (path for path, module in model.named_modules() if module is layers)
    names = list(model.state_dict())
    inside: list[list[str]] = []
    for index, layer in enumerate(layers):
        inside.append([name for name in names if name.startswith(f"{path}.{index}.")])
        layers[index] = wrap(layer, mixed_precision=mixed_precision, auto_wrap_policy=None)
    outside = [name for name in names if not name.startswith(f"{path}.")]
    wrapper = wrap(root, mixed_precision=mixed_precision, auto_wrap_policy=None)
    return [Unit(module, part) for module, part in zip([wrapper, *layers], [outside, *inside], strict=True)]


def free_gathered(units: list[Unit]) -> None:
    """Free gathered parameters.

    The root keeps its parameters gathered after a pass, and would not notice that its shard has changed since.
    """
    for module, _ in units:
        module.check_is_root()  # initialises what the first pass would
        handle = module._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(module, handle, True)


def gathered(model: nn.Module, units: list[Unit]) -> Iterator[tuple[str, Tensor]]:
    """Yield a full copy of every tensor by name, unit by unit. Between two units nothing stays gathered."""
    for module, names in units:
        unit = FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False)
        with torch.inference_mode(False), torch.no_grad(), unit:  # vLLM's inference mode would mark the parameters
            tensors = [attrgetter(name)(model).detach().clone() for name in names]
        yield from zip(names, tensors, strict=True)
