"""Real vLLM in the process of the tests. All tests share one engine, because it takes seconds to start."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import AdaptiveWeightSync, Prompt, ReplayEngine, RolloutRecorder, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.engines import EngineError, NoWeightsError, VLLMEngine, WeightSyncError
from lgrpo.engines.completions import Generation
from lgrpo.engines.vllm.runtime import explain
from lgrpo.types import RECORDED
from lgrpo.weights import PolicyWeights
from tests.engines.episodes import check_continued_episodes, check_dropping_episodes, check_episodes, check_limits
from tests.engines.kept import batch_of, check_kept
from tests.engines.partial import SAMPLING, TRUNCATED, check_continued
from tests.helpers import MODEL, fit, largest_difference, tiny_policy

pytest.importorskip("vllm")

TEXTS = ("12>", "3456789>", "0>", "98>")
LONG = "1234567890" * 4 + ">"
"""A prompt that fills a block of vLLM's prefix cache, which must not be used after a sync."""
TOLERANCE = 1e-4


def prompts(policy, *texts):
    return [
        Prompt(text=t, token_ids=policy.tokenizer(t).input_ids, row={}, position=10 + i) for i, t in enumerate(texts)
    ]


def disturb(policy, scale=0.3):
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(scale * torch.randn_like(p))


def as_ids(groups):
    return [[c.token_ids for c in group] for group in groups]


def mismatch(policy, questions, groups, temperature=1.0):
    """Largest difference of a token's log-probability between engine and policy."""
    worst = 0.0
    for prompt, group in zip(questions, groups, strict=True):
        for c in group:
            tokens = torch.tensor([prompt.token_ids + c.token_ids])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt.token_ids)
            expected, _ = policy(tokens, mask, temperature)
            worst = max(worst, float((expected[mask] - torch.tensor(c.logprobs)).detach().abs().max()))
    return worst


class TestStartUp:
    def test_missing_vllm_names_the_extra(self, policy, monkeypatch):
        monkeypatch.setitem(sys.modules, "vllm", None)
        with pytest.raises(EngineError, match=r"pip install 'lgrpo\[vllm\]'"):
            VLLMEngine().load_weights(policy.weights(), 0)

    def test_unsupported_architecture(self):
        config = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 1, "n_head": 1, "n_positions": 32}
        old = tiny_policy(config=config, attention="eager")
        old.build()
        with pytest.raises(EngineError, match=r"vLLM cannot serve OpenAIGPTLMHeadModel"):
            VLLMEngine().load_weights(old.weights(), 0)

    @pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
    def test_sharding(self, option):
        """Ranks that share a sharded vLLM would each give it their own prompts, and get wrong completions."""
        with pytest.raises(ValueError, match=rf"options {option}: .* Use lgrpo\.engines\.VLLMServerEngine"):
            VLLMEngine(options={option: 2})

    def test_no_memory_for_the_cache(self, policy):
        with pytest.raises(EngineError, match=r"no memory for the KV cache.*kv_cache_gib"):
            VLLMEngine(kv_cache_gib=1e-6).load_weights(policy.weights(), 0)

    def test_memory_released_by_another_process_during_profiling(self):
        """The message is the beginning of vLLM 0.26's on a GPU that two runs shared."""
        message = (
            "Error in memory profiling. Initial free memory 136.09 GiB, current free memory 136.73 GiB. This happens"
        )
        explanation = explain(AssertionError(message), tiny_policy().config)
        assert re.match(
            r"vLLM measures .* released meanwhile, .*another process.*set kv_cache_gib.*136.73 GiB", explanation
        )

    def test_no_weights_before_the_first_sync(self, policy):
        with pytest.raises(NoWeightsError, match="WeightSync"):
            VLLMEngine().generate(prompts(policy, "1>"), 2, Sampling(), 0, policy.tokenizer)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    policy = tiny_policy(config=MODEL | {"max_position_embeddings": 64})
    policy.build()
    return policy


@pytest.fixture(scope="module")
def engine(policy):
    engine = VLLMEngine(options={"block_size": 32})
    engine.load_weights(policy.weights(), step=3)
    yield engine
    engine.close()


def test_episodes(policy, engine):
    check_episodes(policy, engine, prompts(policy, *TEXTS), TOLERANCE)


def test_limits_of_prompts(policy, engine):
    check_limits(policy, engine, prompts(policy, *TEXTS))


def test_episodes_that_drop_observations(policy, engine, tmp_path):
    """Contexts share no more than their beginning, which vLLM's prefix cache may have."""
    check_dropping_episodes(policy, engine, prompts(policy, *TEXTS), TOLERANCE, tmp_path)


def test_logprobs_agree_before_and_after_a_sync(policy, engine):
    questions = prompts(policy, *TEXTS, LONG)
    for step in (3, 4):
        for temperature in (0.5, 1.0, 1.7):
            sampling = Sampling(temperature=temperature, max_tokens=12)
            groups = engine.generate(questions, 5, sampling, 0, policy.tokenizer)
            assert mismatch(policy, questions, groups, temperature) <= TOLERANCE
            assert {c.behaviour_step for c in chain(*groups)} == {step}
        disturb(policy)
        if step == 3:
            stale = engine.generate(questions, 5, Sampling(max_tokens=12), 0, policy.tokenizer)
            assert mismatch(policy, questions, stale) > 0.05, "the policy moved, the engine did not"
            record = engine.load_weights(policy.weights(), step=4)
            assert (record.version, record.step) == (1, 4)
    engine.load_weights(policy.weights(), step=5)
    assert [r.version for r in engine.state.ledger] == [0, 1, 2]


def test_held_weights_equal_the_policys_bit_for_bit(policy, engine):
    held = engine.held_weights()
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert held.keys() == dict(policy.weights()).keys()


def test_samples_do_not_depend_on_batch_or_order(policy, engine):
    sampling, questions = Sampling(max_tokens=10), prompts(policy, *TEXTS)
    together = as_ids(engine.generate(questions, 4, sampling, 7, policy.tokenizer))
    backwards = as_ids(engine.generate(questions[::-1], 4, sampling, 7, policy.tokenizer))[::-1]
    alone = [as_ids(engine.generate([q], 4, sampling, 7, policy.tokenizer))[0] for q in questions]
    assert together == backwards == alone
    assert together != as_ids(engine.generate(questions, 4, sampling, 8, policy.tokenizer))
    assert len({tuple(ids) for ids in together[1]}) > 1


def test_continued_episodes(policy, engine, tmp_path):
    """Cut within the first turns and within later ones, and continued with other weights each time."""
    check_continued_episodes(policy, engine, prompts(policy, *TEXTS), TOLERANCE, [3, 4], tmp_path)


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED])
def test_continued_completions(policy, engine, sampling):
    check_continued(engine, policy, prompts(policy, *TEXTS, LONG), TOLERANCE, sampling=sampling)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=50), replace(TRUNCATED, max_tokens=50)])
def test_quick_decoding_changes_only_the_number_of_calls(policy, engine, monkeypatch, sampling):
    llm = engine._loader.llm.llm.llm_engine
    processor, manager = llm.output_processor, llm.engine_core.engine_core.scheduler.kv_cache_manager
    process, allocate = type(processor).process_outputs, type(manager).allocate_slots
    calls = Counter()

    def count_outputs(self, outputs, *arguments, **options):
        calls["outputs"] += len(outputs)
        return process(self, outputs, *arguments, **options)

    def count_allocations(self, *arguments, **options):
        calls["allocations"] += 1
        return allocate(self, *arguments, **options)

    monkeypatch.setattr(type(processor), "process_outputs", count_outputs)
    monkeypatch.setattr(type(manager), "allocate_slots", count_allocations)
    questions = prompts(policy, *TEXTS, LONG[-10:])
    quick = engine.generate(questions, 4, sampling, 7, policy.tokenizer)
    tokens, quick_calls = sum(len(c.token_ids) for c in chain(*quick)), calls.copy()
    calls.clear()
    monkeypatch.setattr("lgrpo.engines.vllm.runtime.quick_decoding", contextlib.nullcontext)
    assert engine.generate(questions, 4, sampling, 7, policy.tokenizer) == quick
    assert max(len(c.token_ids) for c in chain(*quick)) > 32, "several blocks of the cache"
    assert (calls["outputs"], calls["allocations"]) == (tokens, tokens)
    assert quick_calls["outputs"] == 20, "one for each completion"
    assert quick_calls["allocations"] < tokens / 5


def test_kept_tokens(policy, engine):
    check_kept(policy, engine, prompts(policy, *TEXTS, LONG), TOLERANCE)


def test_more_tokens_that_could_be_drawn_than_vllm_returns(policy, engine, monkeypatch):
    """All tokens are equally likely, so vLLM keeps all with top_k 4; it returns only 4. Ratios stay exact."""
    uniform = copy.deepcopy(policy)
    with torch.no_grad():
        uniform.model.model.norm.weight.zero_()
    monkeypatch.setattr("lgrpo.engines.vllm.requests.num_likeliest", lambda *_: 4)
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=12, top_k=4)
    with engine.holding(uniform.weights(), step=99):
        groups = engine.generate(questions, 5, sampling.with_kept(), 0, policy.tokenizer)
    completions = list(chain(*groups))
    assert all(c.kept.incomplete == tuple(range(len(c.token_ids))) for c in completions)
    sizes = {count for c in completions for count in c.kept.counts}
    assert sizes == {1, 4}, "a drawn token is one of the four, or a set of its own"
    batch = batch_of(questions, groups, sampling)
    with torch.no_grad():
        logprobs, _ = uniform(batch.tokens, batch.completion_mask, 1.0, kept=batch.kept)
    assert torch.allclose(logprobs, batch.behaviour_logprobs, atol=TOLERANCE)
    assert set(logprobs[batch.completion_mask].exp().round(decimals=3).tolist()) == {0.25, 1.0}


def test_continued_completions_without_seeds_do_not_repeat_draws(policy, engine, monkeypatch):
    """vLLM's own generators are seeded before each call, also if the same prompt comes first again."""
    monkeypatch.setattr(engine, "_is_seeded", False)
    uniform = copy.deepcopy(policy)
    with torch.no_grad():
        for p in uniform.parameters():
            p.mul_(1e-3)
    questions, begun, parts = prompts(policy, "12>"), {}, []
    with engine.holding(uniform.weights(), step=99):
        for _ in range(3):
            part = Generation(
                questions, 4, Sampling(max_tokens=40), 7, policy.tokenizer, None, 99, engine.state.version
            )
            part.begun, part.is_partial = begun, True
            steps = iter(range(100))
            monkeypatch.setattr(engine, "on_step", lambda p=part, s=steps: setattr(p, "is_stopped", next(s) >= 5))
            before = [len(c.token_ids) for c in part.begun_of(0)]
            engine.generate_part(part)
            begun = part.unfinished or part.groups
            parts.append([c.token_ids[n:] for c, n in zip(begun[0], before, strict=True)])
            begun = part.unfinished
    assert all(a != b for a, b in pairwise(parts))
    assert sum(len(set(map(tuple, sampled))) for sampled in zip(*parts, strict=True)) >= 10, parts


def test_copies_of_a_prompt_draw_from_different_streams(policy, engine):
    first, second = engine.generate(prompts(policy, "12>", "12>"), 4, Sampling(max_tokens=10), 7, policy.tokenizer)
    assert as_ids([first]) != as_ids([second])


def test_without_seeds_rollouts_draw_different_numbers(policy, engine):
    """vLLM then draws from the process's generators, which are restored for the trainer after each call."""
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=10)
    engine._is_seeded = False
    try:
        state = torch.get_rng_state()
        first, second, again = (
            as_ids(engine.generate(questions, 4, sampling, seed, policy.tokenizer)) for seed in (1, 2, 1)
        )
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        engine._is_seeded = True
    assert first != second
    assert first == again


def test_stop_strings(policy, engine):
    questions = prompts(policy, *TEXTS)
    plain = engine.generate(questions, 8, Sampling(max_tokens=20), 0, policy.tokenizer)
    stopped = engine.generate(questions, 8, Sampling(max_tokens=20, stop=["7", "31"]), 0, policy.tokenizer)
    cut = 0
    for a, b in zip(chain(*plain), chain(*stopped), strict=True):
        assert a.token_ids[: len(b.token_ids)] == b.token_ids
        assert not any(s in b.text for s in ("7", "31"))
        cut += len(b.token_ids) < len(a.token_ids)
    assert cut > 0


def test_holding_other_weights(policy, engine):
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=8)
    before, step, syncs = (
        engine.generate(questions, 4, sampling, 0, policy.tokenizer),
        engine.state.step,
        len(engine.state.ledger),
    )
    other = tiny_policy()
    other.build()
    with engine.holding(other.weights(), step=99):
        borrowed = engine.generate(questions, 4, sampling, 0, policy.tokenizer)
        assert mismatch(other, questions, borrowed) <= TOLERANCE
    assert engine.generate(questions, 4, sampling, 0, policy.tokenizer) == before
    assert (engine.state.step, len(engine.state.ledger)) == (step, syncs)


def test_mismatch_names_the_tensor(policy, engine):
    """The weights are changed between loading and verification."""
    check = engine.held_checksums

    def damaged(manifest):
        engine._loader.llm.on_model(lambda model: model.model.layers[0].post_attention_layernorm.weight.data.mul_(1.5))
        return check(manifest)

    engine.held_checksums = damaged
    try:
        with pytest.raises(WeightSyncError, match=r"layers\.0\.post_attention_layernorm\.weight differs"):
            engine.load_weights(policy.weights(), step=6)
    finally:
        engine.held_checksums = check
    engine.load_weights(policy.weights(), step=6)


def test_non_finite_weights_are_rejected(policy, engine):
    other = tiny_policy()
    other.build()
    with torch.no_grad():
        other.model.model.norm.weight[3] = float("nan")
    with pytest.raises(WeightSyncError, match=r"the policy's model\.norm\.weight is not finite"):
        engine.load_weights(other.weights(), step=7)
    with pytest.raises(NoWeightsError):
        engine.generate(prompts(policy, "1>"), 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    engine.load_weights(policy.weights(), step=7)


def test_missing_part_of_a_fused_tensor(policy, engine):
    """vLLM itself accepts q and v without k, and would sample from uninitialised memory."""

    def without_k():
        return ((name, tensor) for name, tensor in policy.weights() if "k_proj" not in name)

    with pytest.raises(WeightSyncError, match=r"k_proj|qkv_proj"):
        engine.load_weights(PolicyWeights(config=policy.model.config, tensors=without_k), step=8)
    engine.load_weights(policy.weights(), step=8)
    questions = prompts(policy, *TEXTS)
    groups = engine.generate(questions, 4, Sampling(max_tokens=8), 0, policy.tokenizer)
    assert mismatch(policy, questions, groups) <= TOLERANCE


def test_prompt_exceeds_the_context(policy, engine):
    with pytest.raises(ValueError, match=r"exceed vLLM's max_model_len of 64: '0000"):
        engine.generate(prompts(policy, "0" * 62), 2, Sampling(max_tokens=4), 0, policy.tokenizer)


def test_engine_works_after_a_timeout(policy, engine):
    questions = prompts(policy, *TEXTS)
    engine.timeouts, before = replace(engine.timeouts, generate=1e-9), engine.timeouts
    with pytest.raises(EngineError, match="16 of 16 completions unfinished after 1e-09 s"):
        engine.generate(questions, 4, Sampling(max_tokens=8), 0, policy.tokenizer)
    engine.timeouts = before
    assert len(engine.generate(questions, 4, Sampling(max_tokens=8), 0, policy.tokenizer)) == 4


def test_trainer_state_is_unchanged(policy, engine):
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    threads, hook = torch.get_num_threads(), sys.excepthook
    engine.load_weights(policy.weights(), step=9)
    engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer)
    assert (torch.rand(3).tolist(), random.random()) == expected
    assert (torch.get_num_threads(), sys.excepthook) == (threads, hook)


def test_full_run(engine):
    """v = 4: the embedded engine's lags, mismatch by rounding only, and the same samples with ``generate_ahead``."""
    settings = {"v": 4, "rollouts": 8, "trainer": {"limit_val_batches": 1.0, "num_sanity_val_steps": -1}}
    embedded = fit(**settings, data={"engine": TransformersEngine()})
    runs = [fit(**settings, data={"engine": engine, "generate_ahead": ahead}) for ahead in (False, True)]
    for run in runs:
        assert run.recorder.lags == embedded.recorder.lags == [0, 1, 2, 3] * 2
        fresh = [row for row in run.logged if row["train/lag"] == 0]
        assert all(row["train/engine_mismatch_max"] <= TOLERANCE for row in fresh)
        assert max(row["train/ratio_max"] for row in run.logged) > 1.001
    for a, b in zip(*(run.recorder.rollouts for run in runs), strict=True):
        assert torch.equal(a.tokens, b.tokens)
    assert largest_difference(runs[0].weights, runs[1].weights) <= 1e-5


def test_a_run_with_truncated_sampling(engine):
    """Partial rollouts of a policy that moves: at lag 0 ratios are 1, and never infinite."""
    sampling = Sampling(max_tokens=24, top_k=8, top_p=0.9)
    data = {"engine": engine, "sampling": sampling, "partial": True}
    run = fit(v=1, i=2, rollouts=4, learning_rate=0.1, data=data)
    for row in run.logged:
        assert 0 < row["train/ratio_min"] <= row["train/ratio_max"] < float("inf")
        if "train/engine_mismatch_max" in row:
            assert row["train/engine_mismatch_max"] <= TOLERANCE
        assert 1 < row["rollout/kept_tokens"] <= 8
        assert row["rollout/kept_incomplete"] == 0
    assert any("train/engine_mismatch_max" in row for row in run.logged)


def traces(rollouts):
    """Return the prompts, the steps of the weights, and the samples of rollouts."""
    return [(b.positions.tolist(), b.behaviour_step.tolist(), b.tokens.tolist()) for b in rollouts]


def check_resume(engine, folder):
    """Check with v = 4, i = 2, resumed from three steps, that prompts, versions and completions are the same."""

    def settings(**more):
        callbacks = [ExactResume(), *more.pop("callbacks", [])]
        trainer = {"default_root_dir": str(folder), **more.pop("trainer", {})}
        return {"v": 4, "i": 2, "rollouts": 6, "data": {"engine": engine}, "callbacks": callbacks, "trainer": trainer}

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight = fit(**settings(callbacks=[saving], trainer={"enable_checkpointing": True}))
    sampled = traces(straight.recorder.rollouts)
    ledger = [(record.version, record.step) for record in engine.state.ledger]
    for step in (3, 6, 9):
        run = fit(**settings(), ckpt_path=str(folder / f"step={step}.ckpt"))
        again = traces(run.recorder.rollouts)
        assert again == sampled[len(sampled) - len(again) :], f"from step {step}"
        assert [b.rollout for b in run.recorder.rollouts] == list(range(-(-step // 2), 6))
        assert run.recorder.lags == straight.recorder.lags[step:]
        assert [(record.version, record.step) for record in engine.state.ledger] == ledger


def test_resume(engine, tmp_path):
    check_resume(engine, tmp_path)


def test_adaptive_sync_recorded_and_replayed(engine, tmp_path):
    """Adaptive v samples one rollout at a time; a replay is bit for bit the same, also mixed with fresh rollouts."""
    settings = {"rollouts": 6, "learning_rate": 0.5, "seed": 3}
    known = len(engine.state.ledger)
    sync, recorder = AdaptiveWeightSync(budget=0.05, maximum=3), RolloutRecorder(path=str(tmp_path / "rollouts"))
    first = fit(v=0, callbacks=[sync, recorder], data={"engine": engine}, **settings)
    steps = [record.step for record in engine.state.ledger[known:]]
    assert steps[0] == 0
    assert len(steps) > 2
    assert all(1 <= later - sooner <= 3 for sooner, later in pairwise(steps))
    assert all(row["train/engine_mismatch_max"] < TOLERANCE for row in first.logged if row["train/lag"] == 0)
    replayed = fit(v=1, data={"engine": ReplayEngine(str(tmp_path / "rollouts"), engine)}, **settings)
    assert largest_difference(first.weights, replayed.weights) == 0
    mixed = fit(v=1, data={"engine": ReplayEngine(str(tmp_path / "rollouts"), engine, share=0.5)}, **settings)
    assert {row["rollout/recorded_fraction"] for row in mixed.logged} == {0.5}
    fresh = [batch.behaviour_step[batch.behaviour_step != RECORDED] for batch in mixed.recorder.rollouts]
    assert [set(steps.tolist()) for steps in fresh] == [{k} for k in range(6)]
