"""What is noted of weights on their way, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PretrainedConfig

from lgrpo import TransformersEngine
from lgrpo.engines import WeightSyncError
from lgrpo.engines.ledger import Sent
from lgrpo.functional import named_checksums
from lgrpo.types import PolicyWeights
from tests.engines.faulty import Distorted

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 3, generator=draw) for name in "abc"}


def sent_of(given: dict[str, torch.Tensor], **settings) -> tuple[Sent, dict[str, torch.Tensor]]:
    sent = Sent(**settings)
    return sent, dict(sent.through(given.items()))


def test_they_arrive_as_they_went_in_memory_of_their_own():
    given = weights()
    sent, taken = sent_of(given)
    assert list(taken) == list(given)
    assert all(torch.equal(taken[name], given[name]) for name in given)
    assert all(taken[name].data_ptr() != given[name].data_ptr() for name in given)
    assert sent.checksums == named_checksums(given.items())
    assert (sent.num_bytes, sent.shapes) == (3 * 8 * 3 * 4, dict.fromkeys("abc", (8, 3)))


def test_checksums_that_came_with_them_are_not_taken_again():
    given, noted = weights(), {}
    sent = Sent()

    def tensors():
        yield from given.items()
        noted.update({name: number for number, name in enumerate(given)})

    taken = dict(sent.through(PolicyWeights(config=PretrainedConfig(), tensors=tensors, noted=noted)))
    assert all(torch.equal(taken[name], given[name]) for name in given)
    assert sent.checksums == {"a": 0, "b": 1, "c": 2}
    assert (sent.num_bytes, sent.shapes) == (3 * 8 * 3 * 4, dict.fromkeys("abc", (8, 3)))
    sent.refuse_noise()
    sent.compare({"a": 0, "b": 1, "c": 2})
    with pytest.raises(WeightSyncError, match="c differs"):
        sent.compare({"a": 0, "b": 1, "c": 3})


def test_they_are_noted_in_the_precision_of_the_engine():
    sent, taken = sent_of(weights(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in taken.values()} == {torch.bfloat16}
    assert sent.checksums == named_checksums(taken.items())
    assert sent.num_bytes == 3 * 8 * 3 * 2


def test_a_difference_or_a_tensor_that_is_missing():
    given = weights()
    sent, held = sent_of(given)
    assert sent.compare(named_checksums(held.items())) == sent.compare(named_checksums(given.items()))
    held["b"][0, 0] += 1
    with pytest.raises(WeightSyncError, match="the engine's b differs"):
        sent.compare(named_checksums(held.items()))
    del held["b"]
    with pytest.raises(WeightSyncError, match="does not report b"):
        sent.compare(named_checksums(held.items()))


@pytest.mark.parametrize("noise", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_noise(noise, device):
    given = {name: tensor.to(device) for name, tensor in weights().items()}
    given["b"] = given["b"].bfloat16()  # beside others in float32
    sent_of(given)[0].refuse_noise()
    given["c"][7, 2] = noise
    with pytest.raises(WeightSyncError, match="the policy's c is not finite"):
        sent_of(given)[0].refuse_noise()


def test_an_engine_that_does_not_hold_what_it_was_given(policy):
    assert TransformersEngine().load_weights(policy.weights(), step=0).version == 0
    with pytest.raises(WeightSyncError, match="differs from the policy's after the sync"):
        Distorted().load_weights(policy.weights(), step=0)
