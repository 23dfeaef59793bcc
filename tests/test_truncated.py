"""Training with truncated sampling: ratios over the tokens that could have been drawn, wherever completions go."""

from __future__ import annotations

import itertools
from array import array

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lgrpo import (
    ClippedLoss,
    Completion,
    LoRA,
    Prompt,
    ReplayEngine,
    RolloutRecorder,
    Sampling,
    TransformersEngine,
)
from lgrpo.callbacks import ExactResume, ImprovementMonitor
from lgrpo.data import Evaluation
from lgrpo.data.collate import completions_of, concatenate
from lgrpo.data.kept import check_truncation, kept_tensors
from lgrpo.data.late import split_groups
from lgrpo.data.partial import PartialRollouts
from lgrpo.engines import EngineError, EnginePool, EnvironmentEngine, VLLMEngine, VLLMServerEngine
from lgrpo.engines.episode import Episode
from lgrpo.kept import Kept
from lgrpo.recordings import Recording
from lgrpo.report import read_series
from lgrpo.rewards import EnvironmentReward, Reward
from lgrpo.tasks import SortDigits
from tests.data.test_scoring import Late, sort_digits
from tests.engines.kept import dense_distributions, sets_of, sharp_policy
from tests.environments.diaries import Counting
from tests.helpers import build, fit, largest_difference
from tests.test_in_flight import in_flight
from tests.test_overlap import SaveEveryStep, SlowSteps
from tests.test_partial import Weights, by_position, spans_of

TRUNCATIONS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "cold": {"top_p": 0.8, "temperature": 0.7},
    "hot": {"top_p": 0.8, "temperature": 1.6},
}
SAMPLING = Sampling(max_tokens=6, top_p=0.9)


def train(sampling=SAMPLING, data=None, **settings):
    return fit(**{"policy": sharp_policy(), "data": {"sampling": sampling} | (data or {})} | settings)


def check_sets(run, weights, sampling):
    """Check sets and log-probabilities of all rollouts with the weights of each token; return the sizes of the sets."""
    sizes = []
    for batch in run.recorder.rollouts:
        for step in set(batch.token_steps[batch.completion_mask].tolist()):
            run.module.policy.load_state_dict(weights.at[step])
            expected = dense_distributions(run.module.policy, batch, sampling)
            own = batch.completion_mask & (batch.token_steps == step)
            assert torch.equal(sets_of(batch)[own], expected[own] > -torch.inf)
            drawn = expected.gather(-1, batch.tokens[..., None])[..., 0]
            assert torch.allclose(drawn[own], batch.behaviour_logprobs[own], atol=1e-4)
        assert bool((batch.kept[1][~batch.completion_mask] == 0).all())
        sizes += batch.kept[1][batch.completion_mask].tolist()
    return sizes


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_at_lag_0_every_ratio_is_one(name):
    sampling, weights = Sampling(max_tokens=6, **TRUNCATIONS[name]), Weights()
    run = train(sampling, rollouts=3, trainer={"accumulate_grad_batches": 2}, callbacks=[weights])
    for row in run.logged:
        assert max(abs(row[f"train/ratio_{which}"] - 1) for which in ("min", "max", "mean")) <= 1e-5
        assert row["train/engine_mismatch_max"] <= 1e-5
    sizes = check_sets(run, weights, sampling)
    assert len(set(sizes)) > 1 or name == "top_k"
    assert sum(sizes) / len(sizes) < 10
    assert [row["rollout/kept_tokens"] for row in run.logged] == pytest.approx(
        [float(batch.kept_counts.sum() / batch.completion_mask.sum()) for batch in run.recorder.rollouts]
    )
    assert all(row["rollout/kept_incomplete"] == 0 for row in run.logged)


def test_recomputed_logprobs_give_a_ratio_of_exactly_one():
    for row in train(rollouts=3, data={"behaviour_logprobs": "policy"}).logged:
        assert row["train/ratio_max"] == row["train/ratio_min"] == 1.0
        assert row["train/entropy"] > 0


def test_without_the_sets_the_mean_ratio_is_the_kept_probability():
    """Ratios over all tokens lose the probability of the dropped ones, at lag 0 too."""
    sampling = Sampling(max_tokens=6, top_p=0.7)
    run = train(sampling, rollouts=1, data={"num_prompts": 64, "group_size": 8})
    (batch,), policy = run.recorder.rollouts, sharp_policy()
    own = batch.completion_mask
    with torch.no_grad():
        whole, _ = policy(batch.tokens, own, 1.0)
        kept, _ = policy(batch.tokens, own, 1.0, kept=batch.kept)
        probabilities = dense_distributions(policy, batch, Sampling()).exp()
    mass = torch.where(sets_of(batch), probabilities, 0.0).sum(-1)[own]
    ratio = (whole - batch.behaviour_logprobs)[own].exp()
    assert torch.allclose(ratio, mass, atol=1e-5)
    assert 0.7 <= float(ratio.mean()) < 0.95
    assert torch.allclose(kept[own], batch.behaviour_logprobs[own], atol=1e-5)


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("chunk_size", [5, 1024])
def test_the_policy_equals_dense_masked_logits(attention, chunk_size):
    """Log-probabilities, entropies and the gradient of every weight."""
    sampling = Sampling(max_tokens=6, top_p=0.8, temperature=0.8)
    (batch,) = train(sampling, rollouts=1).recorder.rollouts
    weight = torch.where(batch.completion_mask, torch.randn(batch.tokens.shape, generator=torch.Generator()), 0.0)
    gradients = []
    for dense in (False, True):
        policy = sharp_policy(attention=attention, chunk_size=chunk_size)
        if dense:
            logits = torch.zeros(*batch.tokens.shape, policy.num_logits)
            for row, length in enumerate(batch.lengths.tolist()):
                logits[row, 1:length] = policy.model(input_ids=batch.tokens[row : row + 1, :length]).logits[0, :-1]
            masked = (logits.double() / 0.8).masked_fill(~sets_of(batch) & batch.completion_mask[..., None], -torch.inf)
            logprobs = masked.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]
        else:
            logprobs, entropy = policy(batch.tokens, batch.completion_mask, 0.8, kept=batch.kept)
            assert bool((entropy[batch.completion_mask] >= -1e-6).all())
        own = logprobs[batch.completion_mask].double()
        (weight[batch.completion_mask] * own).sum().backward()
        gradients.append((own, {name: p.grad for name, p in policy.named_parameters()}))
    (ours, our_gradients), (theirs, their_gradients) = gradients
    assert torch.allclose(ours, theirs, atol=1e-5)
    for name, gradient in their_gradients.items():
        scale = float(gradient.abs().max())
        assert float((our_gradients[name] - gradient).abs().max()) <= 1e-5 * max(scale, 1.0), name


@pytest.mark.slow("compiles")
def test_compiled():
    (batch,) = train(rollouts=1).recorder.rollouts
    found = []
    for compiled in (False, True):
        policy = sharp_policy(compile=compiled)
        logprobs, _ = policy(batch.tokens, batch.completion_mask, 1.0, kept=batch.kept)
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in policy.parameters())])
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-4) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_the_reference_is_renormalised_too(lora):
    """It equals the policy at first, so the KL is 0 then; over whole distributions it would not be."""
    run = train(rollouts=3, loss=ClippedLoss(kl_coef=0.1), policy=sharp_policy(lora=lora), learning_rate=0.05)
    divergences = [row["train/kl_reference"] for row in run.logged]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-6


@pytest.mark.parametrize(("v", "i"), [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("loss", [ClippedLoss(), ClippedLoss(0.1, 0.1, centre="proximal", kl_coef=0.05)])
def test_a_policy_that_moves_keeps_finite_ratios(v, i, loss):
    """Whatever it makes of the dropped tokens, the drawn ones stay in their sets."""
    weights = Weights()
    run = train(v=v, i=i, rollouts=4, loss=loss, learning_rate=0.05, callbacks=[weights])
    for row in run.logged:
        assert all(torch.isfinite(torch.tensor(row[f"train/ratio_{which}"])) for which in ("min", "max", "mean"))
        assert row["train/ratio_min"] > 0
        assert torch.isfinite(torch.tensor(row["train/loss"]))
    assert max(row["train/ratio_max"] for row in run.logged) > 1.01, "the policy hardly moved"
    check_sets(run, weights, SAMPLING)


def test_micro_batches_have_the_gradient_of_the_whole():
    whole, split = (
        train(rollouts=1, trainer={"accumulate_grad_batches": number}).recorder.gradients[-1] for number in (1, 5)
    )
    assert largest_difference(whole, split) <= 1e-5


def test_pieces_of_a_batch_have_the_sets_of_their_rows():
    (batch,) = train(rollouts=1).recorder.rollouts
    masks = sets_of(batch)
    for piece in batch.split(3):
        assert torch.equal(sets_of(piece), masks[piece.rows, : piece.tokens.shape[1]])
        assert piece.kept_ids.shape[1] == int(piece.kept_counts.sum(1).max())
    for row, completion in enumerate(completions_of(batch, sharp_policy().tokenizer, SAMPLING)):
        assert completion.kept.counts.tolist() == batch.kept_counts[row][batch.columns(row)].tolist()
        assert len(completion.kept.token_ids) == sum(completion.kept.counts)


def test_groups_without_sets_join_those_with_sets():
    """As when a run is resumed with other sampling: their tokens were drawn from whole distributions."""
    policy = sharp_policy()
    (truncated,), (plain,) = (train(s, rollouts=1).recorder.rollouts for s in (SAMPLING, Sampling(max_tokens=5)))
    assert plain.kept is None
    for order in itertools.permutations([truncated, plain]):
        both = concatenate(order)
        with torch.no_grad():
            logprobs, _ = policy(both.tokens, both.completion_mask, 1.0, kept=both.kept)
        assert torch.allclose(logprobs, both.behaviour_logprobs, atol=1e-4)
    again = concatenate(split_groups(truncated))
    assert torch.equal(sets_of(again), sets_of(truncated))


def test_late_groups_keep_their_sets():
    weights = Weights()
    run = train(rollouts=6, learning_rate=0.3, data={"task": sort_digits(Late())}, callbacks=[weights])
    assert max(row["rollout/late_joined"] for row in run.logged) > 0
    check_sets(run, weights, SAMPLING)


LONG = Sampling(max_tokens=24, top_p=0.9)
PARTIAL = {"partial": PartialRollouts(extra_prompts=4, max_spans=8)}


def test_partial_rollouts_are_the_same_if_the_weights_stay():
    whole, run = (train(LONG, rollouts=8, learning_rate=0.0, data=data) for data in ({}, PARTIAL))
    assert sum(len(spans) > 1 for spans in spans_of(run)) > 1, "nothing was continued"
    weights = Weights()
    weights.at = {step: sharp_policy().state_dict() for step in range(8)}
    check_sets(run, weights, LONG)
    ours, theirs = by_position(run), by_position(whole)
    for position in ours.keys() & theirs.keys():
        assert [tokens for tokens, _ in ours[position]] == [tokens for tokens, _ in theirs[position]]


def test_continued_completions_have_the_sets_of_each_of_their_weights():
    weights = Weights()
    run = train(LONG, rollouts=8, learning_rate=0.03, data=PARTIAL, callbacks=[weights])
    assert sum(len(spans) > 1 for spans in spans_of(run)) > 1
    assert largest_difference(weights.at[7], weights.at[0]) > 0.01
    check_sets(run, weights, LONG)


def test_syncs_in_flight():
    weights, sampling = Weights(), Sampling(max_tokens=16, top_p=0.9)
    run = in_flight(data={"sampling": sampling}, learning_rate=0.05, callbacks=[weights])
    assert any(len(spans) > 1 for spans in spans_of(run))
    check_sets(run, weights, sampling)


@pytest.mark.parametrize("partial", [False, PartialRollouts(extra_prompts=2, max_spans=8)])
def test_episodes(partial):
    """Observed tokens have no sets, and those of later turns stay with their tokens."""
    sampling, weights = Sampling(max_tokens=20, top_p=0.9, stop=list("56789")), Weights()
    engine = EnvironmentEngine(Counting(), SlowSteps() if partial else None, max_tokens_per_turn=5, limits=None)
    task = SortDigits(num_digits=2, num_held_out=20, reward=EnvironmentReward())
    data = {"task": task, "engine": engine, "partial": partial}
    run = train(sampling, rollouts=4, data=data, learning_rate=0.02, callbacks=[weights])
    check_sets(run, weights, sampling)
    assert all(row["rollout/turns"] > 1 for row in run.logged)
    assert all(row["rollout/observed_length"] > 0 for row in run.logged)


def test_an_unfinished_episode_has_the_sets_of_its_part():
    def turn(*sizes):
        kept = Kept(token_ids=array("i", range(sum(sizes))), counts=array("i", sizes))
        ids = list(range(len(sizes)))
        return Completion(
            token_ids=ids, logprobs=[-1.0] * len(ids), text="", finish_reason=None, behaviour_step=0, kept=kept
        )

    episode = Episode(0, 0, Prompt(token_ids=[1], text="0>", row={}, position=0))
    assert episode.completion(0, 0).kept is None
    episode.add_turn(turn(2, 1))
    episode.add_observation([7, 8], "78")
    episode.part = turn(3)
    assert episode.completion(0, 0).kept.counts.tolist() == [2, 1, 0, 0, 3]
    episode.add_turn(turn(3, 4))
    assert episode.completion(0, 0).kept.counts.tolist() == [2, 1, 0, 0, 3, 4]
    episode.drop(0, [9])
    assert episode.completion(0, 0).kept.counts.tolist() == [2, 1, 0, 0, 0, 3, 4]


def test_stop_strings_cut_the_sets():
    sampling, weights = Sampling(max_tokens=8, top_p=0.95, stop=["12", "7"]), Weights()
    run = train(sampling, rollouts=2, callbacks=[weights])
    check_sets(run, weights, sampling)


@pytest.mark.parametrize("data", [{}, PARTIAL | {"generate_ahead": True}])
def test_resumed_from_every_step(tmp_path, data):
    settings = {"v": 2, "i": 2, "rollouts": 4, "learning_rate": 0.05, "optimizer": torch.optim.AdamW}
    sampling = LONG if data else SAMPLING

    def run(callbacks=(), **more):
        loss = ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1)
        own = [ExactResume(), *callbacks]
        return train(sampling, loss=loss, data=data, callbacks=own, **settings, **more)

    whole = run([SaveEveryStep(tmp_path)])
    assert any(len(spans) > 1 for spans in spans_of(whole)) == bool(data)
    for step in range(1, 8):
        torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        again = run(ckpt_path=str(tmp_path / f"{step}.ckpt"))
        assert largest_difference(again.weights, whole.weights) == 0, step


def test_recorded_and_replayed(tmp_path):
    recorder = RolloutRecorder(path=str(tmp_path))
    settings = {"v": 2, "i": 2, "rollouts": 4, "learning_rate": 0.1, "loss": ClippedLoss(0.05, 0.05, kl_coef=0.1)}
    task = SortDigits(num_digits=2, num_held_out=92)
    run = train(data={"task": task}, callbacks=[recorder], **settings)
    again = train(data={"task": task, "engine": ReplayEngine(str(tmp_path))}, **settings)
    assert largest_difference(run.weights, again.weights) == 0
    for one, other in zip(run.recorder.rollouts, again.recorder.rollouts, strict=True):
        assert torch.equal(sets_of(one), sets_of(other))
    table = Recording.read(str(tmp_path)).table
    assert all(len(row["kept_counts"]) == len(row["token_ids"]) for row in table.to_pylist())
    mixed = train(
        Sampling(max_tokens=6), rollouts=2, data={"task": task, "engine": ReplayEngine(str(tmp_path), share=0.5)}
    )
    batch = mixed.recorder.rollouts[0]
    recorded = batch.is_recorded
    assert bool((batch.kept[1][recorded].sum(1) > 0).all())
    assert bool((batch.kept[1][~recorded] == 0).all()), "they were drawn from whole distributions"
    assert mixed.logged[0]["train/engine_mismatch_max"] <= 1e-5


def test_the_monitor_and_its_held_out_prompts(tmp_path):
    """Ratios of whole completions at lag 0 are 1, those of held-out prompts of the old weights are finite."""
    logger = CSVLogger(str(tmp_path), name="metrics")
    trainer = {"logger": logger, "limit_val_batches": 1.0, "default_root_dir": str(tmp_path)}
    train(rollouts=3, callbacks=[ImprovementMonitor(1, 8)], trainer=trainer, learning_rate=0.0)
    series = {name: [value for _, value in points] for name, points in read_series(tmp_path).items()}
    assert series["monitor/tv"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert series["monitor/kl"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert series["calibration/predicted"] == pytest.approx([0, 0], abs=1e-4)


def test_an_evaluation_does_not_ask_for_sets():
    """Neither with sampling of its own nor with that of training; and rewards do not receive them."""

    asked, seen = [], []

    class Watches(TransformersEngine):
        def sample(self, generation):
            asked.append((generation.sampling.top_p, generation.sampling.returns_kept))
            super().sample(generation)

    class Sees(Reward):
        is_inline = True

        def score(self, prompt, completion):
            seen.append(completion.kept)
            return float(len(completion.token_ids))

    task = SortDigits(num_digits=2, num_held_out=20, reward=Sees())
    for own in (None, Sampling(max_tokens=6, top_p=0.5)):
        asked.clear()
        data = {"engine": Watches(), "task": task, "evaluation": Evaluation(sampling=own)}
        train(rollouts=1, data=data, trainer={"limit_val_batches": 1.0})
        assert (0.9, True) in asked
        assert (0.9 if own is None else 0.5, False) in asked
    assert set(seen) == {None}


@pytest.mark.slow("starts a pool")
def test_pool():
    pool, weights = EnginePool(TransformersEngine(), num_processes=2), Weights()
    run = train(rollouts=3, data={"engine": pool}, callbacks=[weights])
    pool.close()
    check_sets(run, weights, SAMPLING)
    assert all(row["train/engine_mismatch_max"] <= 1e-5 for row in run.logged)


class WithoutSets(TransformersEngine):
    returns_kept = "no"


class TestRejected:
    @pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
    @pytest.mark.parametrize(
        "wrap", [lambda engine: engine, EnginePool, lambda engine: EnvironmentEngine(None, engine)]
    )
    def test_an_engine_that_returns_no_sets(self, truncation, wrap):
        message = r"does not return the tokens that could have been drawn.*data\.evaluation\.sampling"
        with pytest.raises(ValueError, match=message):
            check_truncation(Sampling(**truncation), wrap(WithoutSets()))
        check_truncation(Sampling(), wrap(WithoutSets()))
        check_truncation(Sampling(**truncation), wrap(TransformersEngine()))

    @pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"min_p": 0.1}])
    @pytest.mark.parametrize(
        "engine", [VLLMEngine(), EnginePool(), VLLMServerEngine(), EnvironmentEngine(engine=VLLMEngine())]
    )
    def test_vllm_needs_a_number_of_tokens(self, truncation, engine):
        with pytest.raises(ValueError, match=rf"{type(engine).__name__} .* set data\.sampling\.top_k too \(for"):
            check_truncation(Sampling(**truncation), engine)
        check_truncation(Sampling(top_k=8, **truncation), engine)

    def test_a_run(self):
        with pytest.raises(ValueError, match="WithoutSets does not return"):
            build(data={"sampling": SAMPLING, "engine": WithoutSets()})

    def test_a_token_outside_its_set(self):
        prompt = Prompt(token_ids=[1], text="0>", row={}, position=0)
        completion = Completion(token_ids=[5, 6], logprobs=[-1, -1], text="", finish_reason="stop", behaviour_step=0)
        completion.kept = Kept(token_ids=array("i", [5, 6, 7]), counts=array("i", [2, 1]))
        with pytest.raises(EngineError, match="'0>' has a token that is not among those that could have been drawn"):
            kept_tensors([prompt], [completion], 3)
        completion.kept = Kept(token_ids=array("i", [5, 7, 6]), counts=array("i", [2, 1]))
        assert kept_tensors([prompt], [completion], 3)[1].tolist() == [[0, 2, 1]]
