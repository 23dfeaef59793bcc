"""Copies directly into the tensors of a model that stores weights unchanged; here plain modules instead of vLLM's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lgrpo.engines.vllm.layout import WeightViews, engine_layout

SHAPES = {"q_proj.weight": (4, 2), "k_proj.weight": (2, 2), "v_proj.weight": (2, 2), "norm.weight": (3,)}


def engine_model(rows: int = 8) -> nn.ModuleDict:
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.zeros(3))
    return nn.ModuleDict({"qkv_proj": nn.Linear(2, rows, bias=False), "norm": norm})


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def test_every_tensor_is_copied_to_its_view():
    model, given = engine_model(), weights()
    views = WeightViews.find(model, engine_layout(SHAPES))
    assert views is not None
    views.copy_from(reversed(given.items()))
    joined = torch.cat([given[f"{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model["qkv_proj"].weight, joined)
    assert torch.equal(model["norm"].weight, given["norm.weight"])
    assert all(torch.equal(views.tensors[name], tensor) for name, tensor in given.items())


def test_no_views_of_a_padded_model():
    assert WeightViews.find(engine_model(rows=16), engine_layout(SHAPES)) is None


def test_no_views_of_a_packed_model():
    """Reading through the kernel gives a copy, which vLLM does not sample from."""
    model = engine_model()
    model["qkv_proj"].cpu_linear = lambda x, weight, bias: nn.functional.linear(x, weight, bias)
    assert WeightViews.find(model, engine_layout(SHAPES)) is None


def test_weight_that_was_not_synced():
    model = engine_model()
    model["late"] = nn.Linear(2, 2, bias=False)
    with pytest.raises(LookupError, match=r"late\.weight was not among the synced weights"):
        WeightViews(model, engine_layout(SHAPES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("v_proj.weight"), "v_proj.weight is missing"),
        (lambda given: given.update(other=torch.zeros(1)), "did not have other"),
        (lambda given: given.update({"norm.weight": torch.zeros(1)}), r"norm.weight of shape \(1,\)"),
    ],
)
def test_weights_that_differ_from_the_first_sync(change, message):
    given = weights()
    change(given)
    with pytest.raises(LookupError, match=message):
        WeightViews(engine_model(), engine_layout(SHAPES)).copy_from(given.items())


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: setattr(module, "weight", nn.Parameter(module.weight.detach().clone())),
        lambda module: setattr(module.weight, "data", module.weight.detach().clone()),
        lambda module: delattr(module, "weight"),
    ],
)
def test_replaced_tensor(replace):
    model = engine_model()
    views = WeightViews(model, engine_layout(SHAPES))
    views.copy_from(weights().items())
    assert views.is_current(), "values may change"
    replace(model["norm"])
    assert not views.is_current(), "checksums of the old tensors would not be those of vLLM's"
