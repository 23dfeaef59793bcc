"""Tensors straight into those of a model that keeps them as they come: here plain modules, on a GPU vLLM's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lgrpo.engines.vllm_layout import Places, engine_layout

SHAPES = {"q_proj.weight": (4, 2), "k_proj.weight": (2, 2), "v_proj.weight": (2, 2), "norm.weight": (3,)}


def engine_model(rows: int = 8) -> nn.ModuleDict:
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.zeros(3))
    return nn.ModuleDict({"qkv_proj": nn.Linear(2, rows, bias=False), "norm": norm})


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def test_every_tensor_lies_where_it_belongs():
    model, given = engine_model(), weights()
    places = Places.found(model, engine_layout(SHAPES))
    assert places is not None
    places.fill(reversed(given.items()))
    joined = torch.cat([given[f"{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model["qkv_proj"].weight, joined)
    assert torch.equal(model["norm"].weight, given["norm.weight"])
    assert all(torch.equal(places.tensors[name], tensor) for name, tensor in given.items())


def test_a_model_that_pads_is_left_to_vllm():
    assert Places.found(engine_model(rows=16), engine_layout(SHAPES)) is None


def test_a_model_that_is_read_through_a_kernel_is_left_to_vllm():
    """What is read there is a copy: it would be filled, and compared, beside the weights that vLLM samples from."""
    model = engine_model()
    model["qkv_proj"].cpu_linear = lambda x, weight, bias: nn.functional.linear(x, weight, bias)
    assert Places.found(model, engine_layout(SHAPES)) is None


def test_a_weight_that_nothing_reaches():
    model = engine_model()
    model["late"] = nn.Linear(2, 2, bias=False)
    with pytest.raises(LookupError, match=r"late\.weight was not among the weights"):
        Places(model, engine_layout(SHAPES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("v_proj.weight"), "v_proj.weight is missing"),
        (lambda given: given.update(other=torch.zeros(1)), "was not given other"),
        (lambda given: given.update({"norm.weight": torch.zeros(1)}), r"norm.weight of shape \(1,\)"),
    ],
)
def test_weights_of_another_kind(change, message):
    given = weights()
    change(given)
    with pytest.raises(LookupError, match=message):
        Places(engine_model(), engine_layout(SHAPES)).fill(given.items())


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: setattr(module, "weight", nn.Parameter(module.weight.detach().clone())),
        lambda module: setattr(module.weight, "data", module.weight.detach().clone()),
        lambda module: delattr(module, "weight"),
    ],
)
def test_a_tensor_that_is_somewhere_else_by_now(replace):
    model = engine_model()
    places = Places(model, engine_layout(SHAPES))
    places.fill(weights().items())
    assert places.are_current(), "its numbers may change"
    replace(model["norm"])
    assert not places.are_current(), "a checksum of what it found would be that of other tensors than vLLM's"
