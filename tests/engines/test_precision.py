"""Engines that hold weights in what the trainer computes in: real vLLM, in process, in a pool, as a server.

Here in float16: not every processor has bfloat16, and vLLM's build for CPUs ends without it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lgrpo.engines import EnginePool, TransformersEngine, VLLMEngine, VLLMServerEngine
from tests.engines.conftest import build_policy
from tests.engines.test_pool import ask
from tests.engines.test_vllm import TEXTS, as_ids, disturb, mismatch, prompts

HALF = torch.float16


def weights_of(policy):
    return replace(policy.weights(), computed_in=HALF)


@pytest.mark.parametrize(
    "make",
    [VLLMEngine, lambda: EnginePool(VLLMEngine(max_model_len=32), num_processes=1), VLLMServerEngine],
    ids=["in process", "pool", "server"],
)
def test_it_follows_the_trainer(make):
    """Every sync is verified in that precision, another one, and one after a resume, as well."""
    pytest.importorskip("vllm")
    policy, engine = build_policy(), make()
    try:
        for step in (0, 1):
            record = engine.load_weights(weights_of(policy), step)
            assert record.num_bytes == sum(2 * tensor.numel() for _, tensor in policy.weights())
            held = engine.held_weights()
            assert all(torch.equal(held[name], tensor.half()) for name, tensor in policy.weights())
            groups = ask(engine, policy)
            assert 1e-6 < mismatch(policy, prompts(policy, *TEXTS), groups) < 0.02
            kept = engine.state_dict()
            disturb(policy)
        engine.close()
        engine.load_state_dict(kept, weights_of(policy))
        assert as_ids(ask(engine, policy)) == as_ids(groups)
        engine.load_weights(weights_of(policy), step=2)
        assert {tensor.dtype for tensor in engine.held_weights().values()} == {HALF}
    finally:
        engine.close()


@pytest.mark.parametrize("make", [lambda: VLLMEngine(dtype="float32"), TransformersEngine])
def test_a_precision_of_its_own_comes_first(make):
    pytest.importorskip("vllm")
    policy, engine = build_policy(), make()
    try:
        engine.load_weights(weights_of(policy), step=0)
        assert {tensor.dtype for tensor in engine.held_weights().values()} == {torch.float32}
    finally:
        engine.close()
