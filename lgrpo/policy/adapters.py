"""LoRA through peft: low-rank adapters on a model whose base weights are frozen.

The reference is a second adapter on the same model, so there is no second model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lgrpo.checks import check_count, check_range

POLICY, REFERENCE = "policy", "reference"
_BASE = ".base_layer."
_LORA = ".lora_"


@dataclass(kw_only=True, frozen=True)
class LoRA:
    """Low-rank adapters: W + (alpha / rank) · B A, with A and B trained and W frozen."""

    rank: int = 16
    """Number of columns of B and of rows of A."""
    alpha: float = 32.0
    """Scale of the adapters, before the division by the rank."""
    modules: list[str] | None = None
    """Last part of the names of the linear layers to adapt, such as q_proj. By default all but the head."""

    def __post_init__(self) -> None:
        check_count("lora.rank", self.rank, at_least=1)
        check_range("lora.alpha", self.alpha, above=0)
        if self.modules is not None and not self.modules:
            raise ValueError("lora.modules is an empty list: leave it out for all linear layers but the head")


def add_adapter(model: nn.Module, lora: LoRA, head: nn.Module | None, name: str = POLICY) -> None:
    """Add an adapter to the selected layers and freeze everything but the policy's adapter.

    A new adapter has B = 0, so it does not change the model's output.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("policy.lora needs peft: pip install 'lgrpo[lora]'") from error
    linear = {
        path.replace(_BASE, ".").removesuffix(".base_layer").rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and _LORA not in path
    }
    modules = sorted(linear) if lora.modules is None else lora.modules
    if unknown := [module for module in modules if module not in linear]:
        raise ValueError(
            f"policy.lora.modules names {', '.join(unknown)}: the linear layers of {type(model).__name__} are "
            f"{', '.join(sorted(linear))}"
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, lora_dropout=0.0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # it is the policy's
        inject_adapter_in_model(config, model, name)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(f".{POLICY}." in path and _LORA in path)
        if _LORA in path:
            parameter.data = parameter.data.float()  # half precision would lose small steps
    _activate(model, POLICY)


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Use the reference's adapter inside the context."""
    _activate(model, REFERENCE)
    try:
        yield
    finally:
        _activate(model, POLICY)


@torch.no_grad()
def copy_to_reference(model: nn.Module) -> None:
    """Copy the policy's adapter to the reference's."""
    parameters = dict(model.named_parameters())
    for path, parameter in parameters.items():
        if _LORA in path and f".{REFERENCE}." in path:
            parameter.copy_(parameters[path.replace(f".{REFERENCE}.", f".{POLICY}.")])


def is_base(path: str) -> bool:
    """Return whether a tensor of a model with adapters, by its name, is a base weight."""
    return _LORA not in path


def is_reference(path: str) -> bool:
    """Return whether a tensor belongs to the reference's adapter."""
    return _LORA in path and f".{REFERENCE}." in path


def base_tensors(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the base weights by their names in a model without adapters."""
    for path, tensor in state:
        if is_base(path):
            yield path.replace(_BASE, "."), tensor


def adapter_tensors(model: nn.Module, state: Iterable[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``, the latter times alpha / rank."""
    layers = _layers(model)
    for path, tensor in state:
        layer, mark, rest = path.partition(_LORA)
        if mark and f".{name}." in rest:
            side = rest[0]
            yield f"{layer}.lora_{side}.weight", tensor * layers[layer].scaling[name] if side == "B" else tensor


def _layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}


def _activate(model: nn.Module, name: str) -> None:
    """Select the active adapter. Unlike peft's method this does not freeze the others in the middle of a step."""
    for layer in _layers(model).values():
        layer._active_adapter = [name]
