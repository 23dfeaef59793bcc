"""Engines with weights in the trainer's compute precision: real vLLM, in process, in a pool, and as a server.

The tests use float16, because vLLM's build for CPUs aborts on processors without bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lgrpo.engines import EnginePool, TransformersEngine, VLLMEngine, VLLMServerEngine
from tests.engines.conftest import build_policy
from tests.engines.pool.test_pool import ask
from tests.engines.vllm.test_vllm import TEXTS, as_ids, disturb, mismatch, prompts

HALF = torch.float16


def weights_of(policy):
    return replace(policy.weights(), compute_dtype=HALF)


@pytest.mark.parametrize(
    "make",
    [VLLMEngine, lambda: EnginePool(VLLMEngine(max_model_len=32), num_processes=1), VLLMServerEngine],
    ids=["in process", "pool", "server"],
)
@pytest.mark.slow("starts vLLM in process, in a pool and as a server")
def test_trainers_precision_is_used(make):
    """Syncs are verified in that precision, also later ones, and one after a resume."""
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
def test_own_precision_takes_precedence(make):
    pytest.importorskip("vllm")
    policy, engine = build_policy(), make()
    try:
        engine.load_weights(weights_of(policy), step=0)
        assert {tensor.dtype for tensor in engine.held_weights().values()} == {torch.float32}
    finally:
        engine.close()
