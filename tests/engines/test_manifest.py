"""The manifest of a sync, and the weights it rejects."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PretrainedConfig

from lgrpo import TransformersEngine
from lgrpo.engines import WeightSyncError
from lgrpo.engines.manifest import WeightManifest
from lgrpo.functional import named_checksums
from lgrpo.weights import PolicyWeights
from tests.engines.faulty import Distorted

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 3, generator=draw) for name in "abc"}


def manifest_of(given: dict[str, torch.Tensor], **settings) -> tuple[WeightManifest, dict[str, torch.Tensor]]:
    manifest = WeightManifest(**settings)
    return manifest, dict(manifest.stream(given.items()))


def test_streamed_tensors_are_equal_copies():
    given = weights()
    manifest, taken = manifest_of(given)
    assert list(taken) == list(given)
    assert all(torch.equal(taken[name], given[name]) for name in given)
    assert all(taken[name].data_ptr() != given[name].data_ptr() for name in given)
    assert manifest.checksums == named_checksums(given.items())
    assert (manifest.num_bytes, manifest.shapes) == (3 * 8 * 3 * 4, dict.fromkeys("abc", (8, 3)))


def test_provided_checksums_are_not_computed_again():
    given, provided = weights(), {}
    manifest = WeightManifest()

    def tensors():
        yield from given.items()
        provided.update({name: number for number, name in enumerate(given)})

    taken = dict(manifest.stream(PolicyWeights(config=PretrainedConfig(), tensors=tensors, checksums=provided)))
    assert all(torch.equal(taken[name], given[name]) for name in given)
    assert manifest.checksums == {"a": 0, "b": 1, "c": 2}
    assert (manifest.num_bytes, manifest.shapes) == (3 * 8 * 3 * 4, dict.fromkeys("abc", (8, 3)))
    manifest.check_finite()
    manifest.compare({"a": 0, "b": 1, "c": 2})
    with pytest.raises(WeightSyncError, match="c differs"):
        manifest.compare({"a": 0, "b": 1, "c": 3})


def test_recorded_in_the_engines_precision():
    manifest, taken = manifest_of(weights(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in taken.values()} == {torch.bfloat16}
    assert manifest.checksums == named_checksums(taken.items())
    assert manifest.num_bytes == 3 * 8 * 3 * 2


def test_different_or_missing_tensor():
    given = weights()
    manifest, held = manifest_of(given)
    assert manifest.compare(named_checksums(held.items())) == manifest.compare(named_checksums(given.items()))
    held["b"][0, 0] += 1
    with pytest.raises(WeightSyncError, match="the engine's b differs"):
        manifest.compare(named_checksums(held.items()))
    del held["b"]
    with pytest.raises(WeightSyncError, match="does not report b"):
        manifest.compare(named_checksums(held.items()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_non_finite_tensor(value, device):
    given = {name: tensor.to(device) for name, tensor in weights().items()}
    given["b"] = given["b"].bfloat16()  # beside others in float32
    manifest_of(given)[0].check_finite()
    given["c"][7, 2] = value
    with pytest.raises(WeightSyncError, match="the policy's c is not finite"):
        manifest_of(given)[0].check_finite()


def test_engine_that_changes_its_weights(policy):
    assert TransformersEngine().load_weights(policy.weights(), step=0).version == 0
    with pytest.raises(WeightSyncError, match="differs from the policy's after the sync"):
        Distorted().load_weights(policy.weights(), step=0)
