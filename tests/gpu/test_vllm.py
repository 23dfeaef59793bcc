"""vLLM on a GPU: sleep mode, syncs in bfloat16, pools and servers on the same GPU. ``pytest tests/gpu -s``."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace

import pytest
import torch

from lgrpo import CausalPolicy, Prompt, Sampling, TransformersEngine
from lgrpo.callbacks import MismatchGuard
from lgrpo.callbacks.mismatch_guard import EngineMismatchError
from lgrpo.engines import EngineError, EnginePool, Timeouts, VLLMEngine, VLLMServerEngine
from lgrpo.engines.servers.transfer import nccl
from tests.engines.kept import batch_of
from tests.gpu import SHAPE
from tests.helpers import fit

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

APART = {"NCCL_HOSTID": "trainer", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
APART |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
"""NCCL requires one GPU per rank. Different host ids make trainer and server two machines that use sockets."""
if torch.cuda.is_available():
    os.environ |= APART  # before NCCL reads them, which it does once

CONFIG = SHAPE | {"max_position_embeddings": 1024, "vocab_size": 32000}


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = CausalPolicy(config=CONFIG, characters="0123456789>")
    policy.build()
    return policy.cuda()


def prompts(count=16):
    return [Prompt(text="…", token_ids=[2 + (i + j) % 10 for j in range(20)], row={}, position=i) for i in range(count)]


def mean_mismatch(policy, questions, groups):
    total, count = 0.0, 0
    for prompt, group in zip(questions, groups, strict=True):
        for c in group:
            tokens = torch.tensor([prompt.token_ids + c.token_ids], device="cuda")
            mask = torch.arange(tokens.shape[1], device="cuda")[None] >= len(prompt.token_ids)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                expected, _ = policy(tokens, mask, 1.0)
            total += float((expected[mask].cpu() - torch.tensor(c.logprobs)).abs().sum())
            count += len(c.token_ids)
    return total / count


def disturb(policy):
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)


def server_engine(**settings):
    return VLLMServerEngine(
        dtype="bfloat16",
        gpu_memory_utilization=0.2,
        max_model_len=256,
        environment_variables={"NCCL_HOSTID": "server"},
        **settings,
    )


def test_in_process_with_sleep_mode(policy):
    engine = VLLMEngine(dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=256, seeded=True)
    questions, sampling = prompts(), Sampling(max_tokens=64)
    engine.load_weights(policy.weights(), step=0, num_rollouts=2)
    first = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
    assert mean_mismatch(policy, questions, first) < 0.05
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 20 * 2**30, "sleeping releases memory"
    held = engine.state_dict()["weights"]
    assert all(torch.equal(held[name], tensor.to(torch.bfloat16)) for name, tensor in policy.weights())
    engine.sleep()
    assert engine.generate(questions, 4, sampling, 0, policy.tokenizer) == first, "sleep level 1 keeps the weights"
    engine.finish_cycle()
    engine.sleep()
    disturb(policy)
    record = engine.load_weights(policy.weights(), step=2)
    groups = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
    assert record.version == 1
    assert engine._loader.views is not None, "later syncs copy directly into vLLM's memory"
    assert mean_mismatch(policy, questions, groups) < 0.1
    for seeded in (True, False, True, False):
        engine._is_seeded = seeded
        start = time.perf_counter()
        engine.generate(prompts(64), 8, Sampling(max_tokens=200), 1, policy.tokenizer)
        print(f"seeded {seeded}: 512 x 200 tokens in {time.perf_counter() - start:.2f} s")
    engine.close()


def test_kept_tokens(policy):
    """In bfloat16 several tokens often are as likely as the last of top_k; ratios differ from 1 by rounding only."""
    disturb(policy)
    engine = VLLMEngine(dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=256)
    engine.load_weights(policy.weights(), step=0)
    for truncation in ({"top_k": 64}, {"top_k": 64, "top_p": 0.9}, {"top_k": 64, "min_p": 0.05}):
        questions, sampling = prompts(), Sampling(max_tokens=64, **truncation)
        groups = engine.generate(questions, 4, sampling.with_kept(), 0, policy.tokenizer)
        batch = batch_of(questions, groups, sampling)
        tokens, mask, kept = batch.tokens.cuda(), batch.completion_mask.cuda(), [part.cuda() for part in batch.kept]
        with torch.autocast("cuda", torch.bfloat16):
            logprobs, _ = policy(tokens, mask, 1.0, kept=(kept[0], kept[1]))
        (gradient,) = torch.autograd.grad(logprobs.sum(), [policy.model.get_input_embeddings().weight])
        assert bool(gradient.isfinite().all())
        difference = (logprobs.detach().cpu() - batch.behaviour_logprobs)[batch.completion_mask].abs()
        num_incomplete = sum(len(c.kept.incomplete) for group in groups for c in group)
        print(
            f"{truncation}: mismatch {float(difference.mean()):.4f}, {num_incomplete} of {len(difference)} incomplete"
        )
        assert float(difference.mean()) < 0.1
        assert num_incomplete < 0.1 * len(difference)
    engine.close()


@pytest.mark.parametrize("pooled", [False, True])
def test_trainers_precision_is_used(policy, pooled):
    own = VLLMEngine(kv_cache_gib=1, gpu_memory_utilization=0.1, max_model_len=64, enforce_eager=True)
    engine = EnginePool(own) if pooled else own
    try:
        run = fit(
            v=4,
            rollouts=2,
            policy=CausalPolicy(config=CONFIG, characters="0123456789>"),
            data={"engine": engine},
            trainer={"accelerator": "gpu", "precision": "bf16-mixed"},
        )
        assert {parameter.dtype for parameter in run.module.policy.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in engine.held_weights().values()} == {torch.bfloat16}
        assert run.logged[0]["train/engine_mismatch_mean"] < 0.05
    finally:
        engine.close()


class OtherTemperature(TransformersEngine):
    """Samples at another temperature than the run's."""

    def sample(self, generation):
        generation.sampling = replace(generation.sampling, temperature=0.5)
        super().sample(generation)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_mismatch_guard(is_wrong):
    """A run in bfloat16 passes the guard, and one that samples at another temperature is stopped at its first step."""
    own = {"kv_cache_gib": 1, "gpu_memory_utilization": 0.1, "max_model_len": 64, "enforce_eager": True}
    engine = OtherTemperature(dtype="bfloat16") if is_wrong else VLLMEngine(**own)
    config = CONFIG | ({"initializer_range": 0.1} if is_wrong else {})  # not close to a uniform distribution
    settings = {
        "v": 1,
        "rollouts": 4,
        "policy": CausalPolicy(config=config, characters="0123456789>"),
        "data": {"engine": engine},
        "callbacks": [MismatchGuard()],
        "trainer": {"accelerator": "gpu", "precision": "bf16-mixed"},
    }
    try:
        if is_wrong:
            with pytest.raises(EngineMismatchError, match="at step 0, engine and policy disagree"):
                fit(**settings)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*engine and policy disagree")
                run = fit(**settings)
            print("mismatch", [metrics["train/engine_mismatch_mean"] for metrics in run.logged])
    finally:
        engine.close()


def test_pool_on_the_same_gpu(policy):
    engine = VLLMEngine(dtype="bfloat16", gpu_memory_utilization=0.1, kv_cache_gib=4, max_model_len=256, seeded=True)
    pool, questions, sampling = EnginePool(engine), prompts(), Sampling(max_tokens=64)
    try:
        for step in range(3):
            record = pool.load_weights(policy.weights(), step, num_rollouts=1)
            groups = pool.generate(questions, 4, sampling, 0, policy.tokenizer)
            print(record, mean_mismatch(policy, questions, groups))
            assert mean_mismatch(policy, questions, groups) < 0.1
            held = pool.state_dict()["weights"]
            assert all(torch.equal(held[name], tensor.to(torch.bfloat16).cpu()) for name, tensor in policy.weights())
            if step < 2:
                pool.finish_cycle()
            awake = torch.cuda.mem_get_info()[0]
            pool.sleep()
            assert torch.cuda.mem_get_info()[0] - awake > 6 * 2**30, "both sleep"
            disturb(policy)
        assert pool.generate(questions, 4, sampling, 0, policy.tokenizer) == groups, "sleep keeps the weights"
        pool._workers.running[0].kill()
        with pytest.warns(UserWarning, match="recovering"):
            again = pool.generate(questions, 4, sampling, 0, policy.tokenizer)
        assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]
    finally:
        pool.close()


@pytest.mark.parametrize("transfer", ["file", "nccl"])
def test_server_on_the_same_gpu(policy, transfer):
    engine = server_engine(transfer=transfer)
    try:
        questions, sampling = prompts(), Sampling(max_tokens=64)
        for step in range(2):
            record = engine.load_weights(policy.weights(), step)
            groups = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
            print(record, mean_mismatch(policy, questions, groups))
            assert mean_mismatch(policy, questions, groups) < 0.1
            held = engine.state_dict()["weights"]
            assert all(torch.equal(held[name], tensor.to(torch.bfloat16).cpu()) for name, tensor in policy.weights())
            disturb(policy)
        with engine.holding(policy.weights(), step=9):
            borrowed = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
            assert mean_mismatch(policy, questions, borrowed) < 0.2
        groups = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
        assert mean_mismatch(policy, questions, groups) > 0.1
    finally:
        engine.close()


def test_nccl_is_rejected_on_the_same_gpu(policy):
    engine = VLLMServerEngine(dtype="bfloat16", transfer="nccl", devices=[[torch.cuda.current_device()]])
    try:
        with pytest.raises(EngineError, match="is assigned to the trainer and to server 0, and NCCL requires"):
            engine.load_weights(policy.weights(), 0)
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:recovering from failure")
def test_nccl_after_a_server_was_killed(policy, monkeypatch):
    """A server killed between two syncs, and one killed during a broadcast, which would then never end."""
    engine, broadcast = server_engine(transfer="nccl", timeouts=Timeouts(sync=60)), nccl.broadcast
    questions, sampling = prompts(), Sampling(max_tokens=64)

    def kill():
        os.killpg(engine.group.servers[0].process.pid, signal.SIGKILL)

    def sync_and_sample(step):
        start = time.perf_counter()
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.01 * torch.randn_like(p))
        record = engine.load_weights(policy.weights(), step)
        print(f"sync {step}: {time.perf_counter() - start:.1f} s, {record}")
        groups = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
        assert mean_mismatch(policy, questions, groups) < 0.1
        held = engine.state_dict()["weights"]
        assert all(torch.equal(held[name], tensor.to(torch.bfloat16).cpu()) for name, tensor in policy.weights())

    def broadcast_to_killed_server(*arguments):
        kill()
        broadcast(*arguments)

    try:
        engine.load_weights(policy.weights(), 0)
        first = engine.group.transfer._group
        sync_and_sample(1)
        assert engine.group.transfer._group is first, "one group serves all syncs"
        kill()
        sync_and_sample(2)  # restarts it from files
        sync_and_sample(3)  # creates a new group
        second = engine.group.transfer._group
        assert second is not first
        assert engine.faults.num_restarts == 1
        with monkeypatch.context() as patch:
            patch.setattr(nccl, "broadcast", broadcast_to_killed_server)
            sync_and_sample(4)
        assert engine.group.transfer._group is None
        sync_and_sample(5)
        assert engine.group.transfer._group is not second
        assert engine.faults.num_restarts == 2
        torch.cuda.synchronize()  # nothing of the failed broadcast is pending
    finally:
        engine.close()
