"""Syncs of adapters only, to real vLLM in process and as a server, verified bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, LoRA, Sampling
from lgrpo.callbacks import ExactResume
from lgrpo.engines import EngineError, Timeouts, VLLMEngine, VLLMServerEngine, WeightSyncError
from lgrpo.engines.vllm.adapter import supported_rank
from lgrpo.policy import make_reference
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, mismatch, prompts
from tests.helpers import fit, tiny_policy
from tests.policy.test_adapters import adapted, perturb

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def policy():
    policy = adapted()
    perturb(policy)
    return policy


@pytest.fixture(
    scope="module", params=[VLLMEngine, pytest.param(VLLMServerEngine, marks=pytest.mark.slow("starts a server"))]
)
def engine(policy, request):
    engine = request.param(timeouts=Timeouts(generate=60))
    engine.load_weights(policy.weights(), 0)
    yield engine
    engine.close()


def sample(engine, policy):
    return engine.generate(prompts(policy, *TEXTS), 3, Sampling(max_tokens=6), 0, policy.tokenizer)


def drift(engine, policy):
    return mismatch(policy, prompts(policy, *TEXTS), sample(engine, policy))


@pytest.mark.slow("starts vLLM twice")
def test_samples_from_the_adapters(engine, policy):
    assert drift(engine, policy) < TOLERANCE
    perturb(policy)
    assert drift(engine, policy) > 100 * TOLERANCE  # it still holds the previous ones
    record = engine.load_weights(policy.weights(), 1)
    assert drift(engine, policy) < TOLERANCE
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert record.num_bytes == 4 * trained  # nothing else was sent


def test_holding_other_weights(engine, policy):
    before = sample(engine, policy)
    version = engine.state.version
    reference = make_reference(policy)
    perturb(policy)
    with engine.holding(policy.weights(), 9):
        assert drift(engine, policy) < TOLERANCE
    assert (engine.state.version, engine.state.adapter_rank) == (version, 4)
    assert sample(engine, policy) == before
    with engine.holding(reference.weights(), 9):
        assert [[c.token_ids for c in group] for group in sample(engine, policy)] == [
            [c.token_ids for c in group] for group in before
        ]


def test_state_contains_only_adapters(engine, policy):
    state = engine.state_dict()
    assert all(".lora_" in name for name in state["weights"])
    before = sample(engine, policy)
    perturb(policy)
    engine.load_weights(policy.weights(), 2)
    assert sample(engine, policy) != before
    engine.load_state_dict(state, policy.weights())
    assert sample(engine, policy) == before
    with pytest.raises(EngineError, match=r"adapters, and the policy has none: set policy\.lora"):
        engine.load_state_dict(state)
    engine.load_state_dict(state, policy.weights())


def test_mismatch_names_the_tensor(engine, policy, monkeypatch):
    """One number of an adapter is changed on the way."""
    module = (
        "lgrpo.engines.vllm.loaders" if isinstance(engine, VLLMEngine) else "lgrpo.engines.servers.transfer.adapter"
    )
    import importlib

    loader = importlib.import_module(module)
    write = loader.write_adapter

    def spoil(folder, rank, tensors):
        def spoiled():
            for name, tensor in tensors:
                if "up_proj.lora_B" in name:
                    tensor[0, 0] += 1e-3
                yield name, tensor

        write(folder, rank, spoiled())

    monkeypatch.setattr(loader, "write_adapter", spoil)
    with pytest.raises(WeightSyncError, match=r"up_proj\.lora_B\.weight differs from the policy's after the sync"):
        engine.load_weights(policy.weights(), 3)
    monkeypatch.undo()
    engine.load_weights(policy.weights(), 3)
    assert drift(engine, policy) < TOLERANCE


@pytest.mark.slow("starts a server")
def test_killed_server(engine, policy):
    """The restarted server loads base and adapter, and gives the same answers."""
    if not isinstance(engine, VLLMServerEngine):
        pytest.skip("only servers are separate processes")
    before = sample(engine, policy)
    os.killpg(engine.group.servers[0].process.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="ended with exit code -9"):
        assert sample(engine, policy) == before
    assert engine.faults.num_restarts == 1


@pytest.mark.slow("starts vLLM twice")
def test_resume(engine, tmp_path):
    """A run resumed inside a cycle, with the engine's adapters, ends the same."""
    if isinstance(engine, VLLMServerEngine):
        pytest.skip("the engines differ only in how adapters are loaded, which is tested above")

    def settings(save):
        callbacks = [ExactResume()]
        if save:
            callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        return {
            "v": 3,
            "rollouts": 4,
            "policy": tiny_policy(lora=LoRA(rank=4)),
            "loss": ClippedLoss(kl_coef=0.1),
            "callbacks": callbacks,
            "data": {"engine": engine},
            "trainer": {"enable_checkpointing": save, "default_root_dir": str(tmp_path)},
        }

    engine.close()
    engine.state.ledger.clear()
    straight = fit(**settings(True))
    assert straight.recorder.lags == [0, 1, 2, 0]
    engine.close()
    resumed = fit(**settings(False), ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.recorder.lags == [2, 0]
    for old, new in zip(straight.recorder.rollouts[2:], resumed.recorder.rollouts, strict=True):
        assert torch.equal(old.tokens, new.tokens)


def test_unsupported_rank():
    with pytest.raises(ValueError, match="vLLM supports adapters of rank 512 at most"):
        supported_rank(513)
