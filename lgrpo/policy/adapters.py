"""LoRA through peft: low-rank adapters on a model whose own weights stand still.

The reference is a second adapter on the same model, at first without effect: there is no second model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

POLICY, REFERENCE = "policy", "reference"
_BASE = ".base_layer."
_OWN = ".lora_"


@dataclass(kw_only=True, frozen=True)
class LoRA:
    """Train low-rank adapters, W + (alpha / rank) · B A, and leave the model's own weights as they are."""

    rank: int = 16
    """Columns of B and rows of A."""
    alpha: float = 32.0
    """The adapters' weight, before it is divided by the rank."""
    modules: list[str] | None = None
    """The last part of the names of the linear layers that get one, such as q_proj; by default all but the head."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be 1 or more")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0")
        if self.modules is not None and not self.modules:
            raise ValueError("lora.modules is an empty list: leave it out for all linear layers but the head")


def add_adapter(model: nn.Module, lora: LoRA, head: nn.Module | None, name: str = POLICY) -> None:
    """Puts an adapter into every layer it is meant for, and freezes the rest. At first it changes nothing."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("policy.lora needs peft: pip install 'lgrpo[lora]'") from error
    linear = {
        path.replace(_BASE, ".").removesuffix(".base_layer").rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and _OWN not in path
    }
    modules = sorted(linear) if lora.modules is None else lora.modules
    if unknown := [module for module in modules if module not in linear]:
        raise ValueError(
            f"policy.lora.modules names {', '.join(unknown)}: the linear layers of {type(model).__name__} are "
            f"{', '.join(sorted(linear))}"
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, lora_dropout=0.0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # the reference beside the policy
        inject_adapter_in_model(config, model, name)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(f".{POLICY}." in path and _OWN in path)
        if _OWN in path:
            parameter.data = parameter.data.float()  # small steps are lost in half precision
    _activate(model, POLICY)


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """For the time being the model is the reference."""
    _activate(model, REFERENCE)
    try:
        yield
    finally:
        _activate(model, POLICY)


@torch.no_grad()
def copy_to_reference(model: nn.Module) -> None:
    """The reference becomes what the policy is."""
    parameters = dict(model.named_parameters())
    for path, parameter in parameters.items():
        if _OWN in path and f".{REFERENCE}." in path:
            parameter.copy_(parameters[path.replace(f".{REFERENCE}.", f".{POLICY}.")])


def is_base(path: str) -> bool:
    """Whether a tensor of a model with adapters, by its name there, is one of those that stand still."""
    return _OWN not in path


def is_reference(path: str) -> bool:
    """Whether a tensor is the reference adapter's."""
    return _OWN in path and f".{REFERENCE}." in path


def base_tensors(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights below the adapters, under the names they have without any."""
    for path, tensor in state:
        if is_base(path):
            yield path.replace(_BASE, "."), tensor


def adapter_tensors(model: nn.Module, state: Iterable[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    """An adapter's own, ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``, the latter times alpha / rank."""
    layers = _layers(model)
    for path, tensor in state:
        layer, mark, rest = path.partition(_OWN)
        if mark and f".{name}." in rest:
            side = rest[0]
            yield f"{layer}.lora_{side}.weight", tensor * layers[layer].scaling[name] if side == "B" else tensor


def _layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def _activate(model: nn.Module, name: str) -> None:
    """Which adapter acts. peft's own way freezes the others too, in the middle of a step."""
    for layer in _layers(model).values():
        layer._active_adapter = [name]
