"""Real vLLM in the process of the tests fails while generating: it is rebuilt, and the results do not change."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from lgrpo import Sampling
from lgrpo.engines import EngineError, Faults, VLLMEngine
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, disturb, mismatch, prompts

pytest.importorskip("vllm")

SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def engine(policy):
    engine = VLLMEngine()
    engine.load_weights(policy.weights(), step=3)
    yield engine
    engine.close()


def raising(model, arguments):
    raise RuntimeError("CUDA error: an illegal memory access")


def allocating(model, arguments):
    torch.empty(2**60, dtype=torch.uint8)


def failing(engine, fault, calls=3):
    """Make vLLM's model fail after so many calls."""

    def hook(model, arguments, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] > calls:
            fault(model, arguments)

    engine._loader.llm.on_model(lambda model: model.register_forward_pre_hook(hook))


@pytest.mark.parametrize("fault", [raising, allocating])
def test_same_completions_after_a_failure(policy, engine, fault):
    """The policy has changed since the sync: vLLM must be rebuilt with the behaviour policy."""
    questions = prompts(policy, *TEXTS)
    record = engine.load_weights(policy.weights(), step=4)
    expected, before, received = (
        engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer),
        replace(engine.faults),
        [],
    )
    assert mismatch(policy, questions, expected) <= TOLERANCE
    disturb(policy)
    failing(engine, fault)
    threads = torch.get_num_threads()
    with pytest.warns(UserWarning, match="recovering from failure 1 of at most 3: vLLM failed while generating"):
        groups = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer, lambda *group: received.append(group))
    assert groups == expected
    assert sorted(index for index, _ in received) == [0, 1, 2, 3]
    assert all(groups[index] == group for index, group in received)
    assert {c.version for group in groups for c in group} == {record.version} == {engine.state.version}
    assert engine.state.ledger[-1] is record
    assert engine.faults - before == Faults(num_failures=1, num_restarts=1)
    assert engine.faults.recovery_seconds > 0
    assert torch.get_num_threads() == threads


def test_answered_prompts_are_not_sampled_again(policy, engine):
    """One prompt's short completions are finished before the failure."""
    questions, received = prompts(policy, *TEXTS), []
    engine.load_weights(policy.weights(), step=5)
    expected = engine.generate(questions, 1, SAMPLING, 1, policy.tokenizer)
    lengths = sorted(len(group[0].token_ids) for group in expected)
    assert lengths[0] < lengths[-1] - 1
    failing(engine, raising, calls=lengths[0] + 1)
    with pytest.warns(UserWarning, match="recovering"):
        groups = engine.generate(questions, 1, SAMPLING, 1, policy.tokenizer, lambda index, _: received.append(index))
    assert groups == expected
    assert sorted(received) == [0, 1, 2, 3]


def test_error_of_the_callback_is_not_a_failure(policy, engine):
    before = replace(engine.faults)

    def broken(index, group):
        raise KeyError("a bug in a reward")

    with pytest.raises(KeyError, match="a bug in a reward"):
        engine.generate(prompts(policy, *TEXTS), 2, SAMPLING, 0, policy.tokenizer, broken)
    assert engine.faults == before


@contextlib.contextmanager
def always_failing(engine, fault):
    """Make the current and every rebuilt vLLM fail."""
    build = engine._build

    def broken(*arguments):
        llm = build(*arguments)
        llm.on_model(lambda model: model.register_forward_pre_hook(fault))
        return llm

    engine._build = broken
    failing(engine, fault, calls=0)
    yield
    engine._build = build


@pytest.mark.slow("starts vLLM again")
def test_repeated_failures(policy, engine):
    """The run stops with advice, the weights can still be saved, and the next sync works."""
    held = engine.held_weights()
    engine.budget.max_failures = 1
    with (
        always_failing(engine, allocating),
        pytest.warns(UserWarning, match="failure 1 of at most 1"),
        pytest.raises(EngineError, match=r"failed 2 times(.|\n)*lower max_num_seqs(.|\n)*--ckpt_path last"),
    ):
        engine.generate(prompts(policy, *TEXTS), 2, SAMPLING, 0, policy.tokenizer)
    saved = engine.state_dict()
    assert saved["version"] == engine.state.ledger[-1].version
    assert all(torch.equal(saved["weights"][name], tensor) for name, tensor in held.items())
    engine.close()
    engine.load_weights(policy.weights(), step=6)
    questions = prompts(policy, *TEXTS)
    assert mismatch(policy, questions, engine.generate(questions, 2, SAMPLING, 0, policy.tokenizer)) <= TOLERANCE


@pytest.mark.slow("starts vLLM again")
def test_no_memory_to_rebuild(policy, engine):
    """The weights were rescued before: they are in the checkpoint that is written at the end."""
    held = engine.held_weights()
    failing(engine, raising)
    engine.kv_cache_gib, before = 1e-6, engine.kv_cache_gib
    with pytest.warns(UserWarning, match="recovering"), pytest.raises(EngineError, match="no memory for the KV cache"):
        engine.generate(prompts(policy, *TEXTS), 2, SAMPLING, 0, policy.tokenizer)
    saved = engine.state_dict()["weights"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in held.items())
    with pytest.raises(EngineError, match="could not be rebuilt"):
        engine.generate(prompts(policy, *TEXTS), 2, SAMPLING, 0, policy.tokenizer)
    engine.kv_cache_gib = before
    engine.load_weights(policy.weights(), step=7)


@pytest.mark.slow("starts vLLM again")
def test_damaged_weights_are_neither_sampled_nor_saved(policy, engine):
    def damaging(model, arguments):
        model.model.norm.weight.data.mul_(1.5)
        raise RuntimeError("broken")

    failing(engine, damaging)
    with (
        pytest.warns(UserWarning, match="recovering"),
        pytest.raises(EngineError, match=r"with it the behaviour policy it held \(.*model\.norm\.weight differs"),
    ):
        engine.generate(prompts(policy, *TEXTS), 2, SAMPLING, 0, policy.tokenizer)
    with pytest.raises(EngineError, match="with it the behaviour policy"):
        engine.state_dict()
    engine.load_weights(policy.weights(), step=8)
