"""Dropped observations: the contexts that the model reads, in sampling and in training."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lgrpo import ClippedLoss, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume, RolloutLog
from lgrpo.contexts import contexts_of
from lgrpo.data.collate import completions_of, concatenate
from lgrpo.engines import EnvironmentEngine
from lgrpo.engines.observations import replaced
from lgrpo.losses import ComposedLoss, MinClip, ReferenceKL, TeacherKL, TokenRatio
from lgrpo.losses.base import PolicyLogprobs
from lgrpo.policy.sequences import read_in_context, sequences
from lgrpo.recordings import ReplayEngine, RolloutRecorder
from lgrpo.recordings.recording import Recording, write_recording
from lgrpo.rewards import EnvironmentReward
from lgrpo.tasks import SortDigits, Template
from lgrpo.teachers import FrozenTeacher
from lgrpo.types import Prompt
from tests.data.test_micro_batches import Sizes
from tests.engines.episodes import (
    DROPPING,
    SAMPLING,
    check_continued_episodes,
    check_dropping_episodes,
    context_of,
    generate_in_parts,
    spoken,
)
from tests.environments.diaries import Talkative
from tests.helpers import build, fit, largest_difference, tiny_policy

PROMPTS = [Prompt(token_ids=[3, 5, 11], text="24>", row={"question": "24"}, position=position) for position in range(3)]
LARGE = Sampling(max_tokens=24, stop=SAMPLING.stop)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    return policy


@pytest.fixture
def engine(policy):
    engine = TransformersEngine()
    engine.load_weights(policy.weights(), step=5)
    return engine


def data_of(folder, sampling=LARGE, **settings):
    folder.mkdir(exist_ok=True)
    engine = EnvironmentEngine(Talkative(folder), **{"limits": None} | DROPPING | settings)
    task = SortDigits(num_digits=2, num_held_out=20, reward=EnvironmentReward())
    return {"engine": engine, "task": task, "sampling": sampling}


def episodes(engine, policy, folder, max_tokens=20, **settings):
    wrapped = EnvironmentEngine(Talkative(folder), engine, **{"limits": None} | DROPPING | settings)
    groups = wrapped.generate(PROMPTS, 4, replace(SAMPLING, max_tokens=max_tokens), 0, policy.tokenizer)
    return [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]


# Sampling


def test_engine_and_policy_agree_at_every_sampled_token(policy, engine, tmp_path):
    check_dropping_episodes(policy, engine, PROMPTS, 1e-5, tmp_path)


def test_the_engine_is_given_the_contexts_that_training_reads(policy, engine, tmp_path, monkeypatch):
    given, generate = [], TransformersEngine.generate

    def listen(own, prompts, num_samples, *rest):
        given.extend(prompt.token_ids for prompt in prompts for _ in range(num_samples))
        return generate(own, prompts, num_samples, *rest)

    monkeypatch.setattr(TransformersEngine, "generate", listen)
    found = episodes(engine, policy, tmp_path)
    read = [context_of(prompt, one, turn) for prompt, one in found for turn in range(len(one.turns))]
    assert sorted(read) == sorted(given)
    assert max(map(len, read)) < 3 + 20
    for prompt, one in found:
        assert one.num_sampled <= 20
        for turn, (start, stop) in enumerate(one.turns):
            assert len(context_of(prompt, one, turn)) + stop - start <= 3 + 20
    assert max(len(one.token_ids) for _, one in found) > 20


def test_what_was_dropped_is_replaced_from_a_turn_on(policy, engine, tmp_path):
    """All observations but the newest are dropped together, when a whole turn does not fit."""
    found = [one for _, one in episodes(engine, policy, tmp_path) if one.dropped]
    assert len(found) > 6
    for one in found:
        assert len({part.turn for part in one.dropped}) <= 2
        assert [part.start for part in one.dropped] == [start for start, _ in one.observed[: len(one.dropped)]]
        for part, (start, stop) in zip(one.dropped, one.observed, strict=False):
            assert (part.start, part.stop) == (start, stop)
            assert policy.tokenizer.decode(one.token_ids[part.middle : stop]) == ">"
            assert policy.tokenizer.decode(one.token_ids[start : part.middle]).endswith("2345>")
            assert set(one.logprobs[start:stop]) == {0.0}
        first = one.dropped[0].turn
        assert sum(part.turn == first for part in one.dropped) == first - 1
        written = range(one.turns[first][0])
        shown = [i for i in written if not any(part.middle <= i < part.stop for part in one.dropped)]
        assert len(shown) + 4 > 20, "a turn would have fitted"


def test_the_episode_ends_at_its_last_context(policy, engine, tmp_path):
    found = [one for _, one in episodes(engine, policy, tmp_path)]
    few = [one for _, one in episodes(engine, policy, tmp_path, max_contexts=2)]
    none = [one for _, one in episodes(engine, policy, tmp_path, max_contexts=1)]
    turns = [sum(len(one.turns) for one in group) for group in (found, few, none)]
    assert turns[0] > turns[1] > turns[2]
    assert {one.finish_reason for one in (*few, *none)} == {"length"}
    assert not any(one.dropped for one in none)
    for group, num_changes in ((found, 2), (few, 1)):
        assert max(len({part.turn for part in one.dropped}) for one in group) == num_changes
        for one, other in zip(group, none, strict=True):
            first = one.dropped[0].turn if one.dropped else len(one.turns)
            assert [one.token_ids[slice(*turn)] for turn in one.turns[:first]] == [
                other.token_ids[slice(*turn)] for turn in other.turns[:first]
            ], "turns before the first one that drops"


def test_nothing_is_dropped_in_vain(policy, engine, tmp_path):
    """Neither if no token for another turn would be left, nor if the replacement is as long as the observation."""
    for settings in ({"max_tokens": 9}, {"dropped_text": "1234567"}):
        found = [one for _, one in episodes(engine, policy, tmp_path, **settings)]
        assert {one.finish_reason for one in found} == {"length"}
        assert not any(one.dropped for one in found)
    assert any(one.dropped for _, one in episodes(engine, policy, tmp_path, dropped_text=""))


class Silent(Talkative):
    """Says nothing after its third turn, which is a failure, just when observations have to be dropped."""

    def step(self, text):
        turn = super().step(text)
        return turn._replace(observation="") if self.turn == 3 else turn


def test_an_episode_that_fails_drops_nothing_at_its_end(tmp_path):
    """No turn reads the context without them, and the batch gives the episode back."""
    data = data_of(tmp_path / "diaries", sampling=replace(LARGE, max_tokens=16))
    data["engine"].environment = Silent(tmp_path / "diaries")
    log = RolloutLog(every=1, num_groups=4)
    run = fit(v=1, rollouts=1, data=data, callbacks=[log], trainer={"default_root_dir": str(tmp_path)})
    found = completions_of(run.recorder.rollouts[0], run.data.tokenizer, LARGE)
    failed = [one for one in found if one.failure is not None]
    assert failed
    assert all(part.turn < len(one.turns) for one in found for part in one.dropped)


def test_the_roles_of_messages_are_kept():
    assert replaced("4", "...") == "..."
    results = [{"role": "tool", "name": "add", "tool_call_id": "a1", "content": "4"}, {"role": "user", "content": "Go"}]
    assert replaced(results, "...") == [
        {"role": "tool", "name": "add", "tool_call_id": "a1", "content": "..."},
        {"role": "user", "content": "..."},
    ]


@pytest.mark.parametrize("cuts", [[2], [5, 1], [8, 3], [1, 2, 3], [12, 9, 5]])
def test_episodes_are_cut_and_continued(policy, engine, tmp_path, cuts):
    groups, _ = check_continued_episodes(
        policy, engine, PROMPTS, 1e-5, cuts, tmp_path, environment=Talkative, **DROPPING
    )
    assert any(one.dropped for group in groups for one in group)


def test_cut_episodes_are_the_same_if_the_weights_stay(policy, engine, tmp_path):
    wrapped = EnvironmentEngine(Talkative(tmp_path), engine, limits=None, **DROPPING)
    whole = wrapped.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    for cut in (3, 8, 14):
        groups, _ = generate_in_parts(wrapped, PROMPTS, policy.tokenizer, [cut])
        for group, expected in zip(groups, whole, strict=True):
            assert [(e.token_ids, e.dropped) for e in group] == [(e.token_ids, e.dropped) for e in expected]


# Training


@pytest.mark.parametrize("sampling", [LARGE, replace(LARGE, top_p=0.9)], ids=["whole", "truncated"])
def test_policy_and_engine_agree_in_a_run(tmp_path, sampling):
    run = fit(v=1, rollouts=2, learning_rate=0.0, data=data_of(tmp_path, sampling))
    assert max(row["train/kl_behaviour"] for row in run.logged) < 1e-9
    for batch in run.recorder.rollouts:
        found = run.module.policy_logprobs(batch)
        assert torch.allclose(found, batch.behaviour_logprobs, atol=1e-5)
        assert (batch.kept is None) == (sampling == LARGE)
        wrong = run.module.policy_logprobs(replace(batch, contexts=None))
        assert (wrong - batch.behaviour_logprobs).abs().max() > 1e-3, "the contexts make no difference"
        assert batch.metrics["rollout/dropped_observations"] > 0.5


def test_recomputed_ratios_are_exactly_one(tmp_path):
    run = fit(v=1, rollouts=2, data=data_of(tmp_path) | {"behaviour_logprobs": "policy"})
    assert all(row["train/kl_behaviour"] == 0 for row in run.logged)
    assert run.recorder.rollouts[0].contexts is not None


def turn_by_turn(model, batch, tokenizer):
    """Return log-probabilities and entropies [B, T], one pass for each turn."""
    found = [[], []]
    for row, episode in enumerate(completions_of(batch, tokenizer, Sampling())):
        own = batch.columns(row)
        prompt = Prompt(token_ids=batch.tokens[row, : own.start].tolist(), text="", row={}, position=0)
        for turn, (start, stop) in enumerate(episode.turns):
            context = context_of(prompt, episode, turn)
            tokens = torch.tensor([context + episode.token_ids[start:stop]])
            mask = torch.arange(tokens.shape[1])[None] >= len(context)
            for values, one in zip(found, model(tokens, mask, batch.temperature), strict=True):
                values.append(one[mask])
    zeros = torch.zeros_like(batch.behaviour_logprobs)
    return [zeros.masked_scatter(batch.completion_mask, torch.cat(values)) for values in found]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_a_loop_over_turns(tmp_path, accumulate):
    loss = ClippedLoss(kl_coef=0.3)
    trainer = {"accumulate_grad_batches": accumulate}
    run = fit(v=2, rollouts=2, learning_rate=0.0, loss=loss, data=data_of(tmp_path), trainer=trainer)
    for batch, expected in zip(run.recorder.rollouts, run.recorder.gradients, strict=True):
        assert batch.contexts is not None
        policy = run.module.policy
        policy.zero_grad()
        logprobs, entropy = turn_by_turn(policy, batch, run.data.tokenizer)
        with torch.no_grad():
            reference, _ = turn_by_turn(run.module.reference, batch, run.data.tokenizer)
        loss(batch, PolicyLogprobs(policy=logprobs, entropy=entropy, reference=reference)).loss.backward()
        gradient = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        assert largest_difference(gradient, expected) < 1e-6
        assert max(float(g.abs().max()) for g in gradient.values()) > 1e-3


def test_reference_and_proximal_policy_read_the_same_contexts(tmp_path):
    """Without a change of the weights they are the policy, also in the second pass."""
    loss = ComposedLoss(ratio=TokenRatio(over="proximal"), gate=MinClip(), regularisers=[ReferenceKL(0.3)])
    run = fit(v=2, i=2, rollouts=2, learning_rate=0.0, loss=loss, data=data_of(tmp_path))
    assert len(run.logged) == 4
    assert max(row["train/kl_reference"] for row in run.logged) < 1e-9
    assert max(abs(row["train/ratio_max"] - 1) for row in run.logged) < 1e-5


def test_a_teacher_reads_the_same_contexts(tmp_path):
    """The divergence from a teacher that is the policy is 0, however it is asked."""
    policy = tiny_policy()
    policy.build()
    policy.model.save_pretrained(tmp_path / "teacher")
    policy.tokenizer.save_pretrained(tmp_path / "teacher")
    for template in (None, Template(prompt="{question}>")):
        kl = TeacherKL(FrozenTeacher(str(tmp_path / "teacher"), dtype="float32"), top_k=None, teacher_template=template)
        loss = ComposedLoss(gate=MinClip(), regularisers=[kl])
        data = data_of(tmp_path / "diaries")
        run = fit(v=1, rollouts=1, loss=loss, policy=policy, learning_rate=0.0, data=data)
        assert run.recorder.rollouts[0].contexts is not None
        assert abs(run.logged[0]["train/kl_teacher"]) < 1e-6


def test_without_an_overflow_nothing_changes(tmp_path):
    """The run is the one without the setting, bit for bit."""
    settings = {"v": 2, "rollouts": 3}
    short = Sampling(max_tokens=24, stop=list("0123456789"))
    data = {"max_turns": 2}
    plain = fit(**settings, data=data_of(tmp_path, short, max_contexts=1, **data))
    run = fit(**settings, data=data_of(tmp_path, short, **data))
    assert largest_difference(plain.weights, run.weights) == 0
    for one, other in zip(run.recorder.rollouts, plain.recorder.rollouts, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.behaviour_logprobs, other.behaviour_logprobs)
        assert one.contexts is None
        assert one.metrics["rollout/turns"] > 1


def test_resume_is_exact(tmp_path):
    settings = {"v": 2, "i": 2, "rollouts": 4, "callbacks": [ExactResume()]}
    data = [data_of(tmp_path / "diaries") for _ in range(3)]
    whole = fit(**settings, data=data[0])
    part = build(**settings, data=data[1], trainer={"max_steps": 3})
    part.trainer.fit(part.module, datamodule=part.data)
    part.trainer.save_checkpoint(tmp_path / "part.ckpt")
    assert part.data.rollout.contexts is not None
    rest = fit(**settings, data=data[2], ckpt_path=str(tmp_path / "part.ckpt"))
    assert largest_difference(whole.weights, rest.weights) == 0


# Batches


def test_tokens_that_could_have_been_drawn_keep_their_places(tmp_path):
    """Each set has the token that was drawn, and the environment's tokens have none, dropped or not."""
    run = fit(v=1, rollouts=1, data=data_of(tmp_path, replace(LARGE, top_p=0.9)))
    batch = run.recorder.rollouts[0]
    assert (batch.kept_counts[~batch.completion_mask] == 0).all()
    assert (batch.kept_counts[batch.completion_mask] > 0).all()
    for one in completions_of(batch, run.data.tokenizer, LARGE):
        sets = iter(one.kept.token_ids)
        for token, count in zip(one.token_ids, one.kept.counts, strict=True):
            assert not count or token in [next(sets) for _ in range(count)]


def test_the_batch_gives_the_episodes_back(policy, engine, tmp_path):
    run = fit(v=1, rollouts=1, data=data_of(tmp_path))
    batch = run.recorder.rollouts[0]
    found = completions_of(batch, run.data.tokenizer, LARGE)
    assert sum(len(one.dropped) for one in found) > 10
    for row, one in enumerate(found):
        own = batch.columns(row)
        bits = contexts_of(one.turns, one.dropped)
        assert batch.contexts[row][own].tolist() == ([1] * len(bits) if not one.dropped else bits)
        assert batch.dropped(row) == one.dropped
        lengths = [own.start + sum(b >> k & 1 for b in bits) for k in range(len({d.turn for d in one.dropped}) + 1)]
        assert int(batch.num_read[row]) == sum(lengths)


def test_sequences_are_the_contexts(tmp_path):
    run = fit(v=1, rollouts=1, data=data_of(tmp_path))
    batch = run.recorder.rollouts[0]
    read = sequences(batch)
    assert torch.equal(read.tokens[read.sampled], batch.tokens[batch.completion_mask])
    assert read.tokens.shape[1] <= run.data.train_prompts.longest + 24 < batch.tokens.shape[1]
    assert len(read.rows) == int(batch.context_masks().any(2).sum()) > len(batch)
    (values,) = read_in_context(lambda tokens, mask, *_, kept: (tokens * mask.float(),), batch)
    assert torch.equal(values, torch.where(batch.completion_mask, batch.tokens, 0).float())


def test_rows_with_and_without_contexts_are_joined(tmp_path):
    run = fit(v=1, rollouts=1, learning_rate=0.0, data=data_of(tmp_path))
    plain = fit(v=1, rollouts=1, learning_rate=0.0, data=data_of(tmp_path, max_contexts=1))
    parts = [run.recorder.rollouts[0], plain.recorder.rollouts[0]]
    for batches in (parts, parts[::-1], parts[1:]):
        joined = concatenate(batches)
        found = run.module.policy_logprobs(joined)
        assert torch.allclose(found, joined.behaviour_logprobs, atol=1e-5)
        assert joined.num_read.tolist() == [n for batch in batches for n in batch.num_read.tolist()]
    chosen = torch.tensor([3, 1, 6])
    assert torch.allclose(
        run.module.policy_logprobs(parts[0].select(chosen)),
        parts[0].select(chosen).behaviour_logprobs,
        atol=1e-5,
    )


def test_a_budget_of_tokens_counts_all_contexts(tmp_path):
    whole = fit(rollouts=2, data=data_of(tmp_path))
    seen = Sizes()
    run = fit(rollouts=2, data=data_of(tmp_path) | {"micro_batch_tokens": 170}, callbacks=[seen])
    longest = 3 * (run.data.train_prompts.longest + 24)
    assert run.trainer.accumulate_grad_batches == -(-16 // (170 // longest)) > 1
    assert max(seen.sizes) <= 170
    assert largest_difference(run.weights, whole.weights) < 1e-6
    with pytest.raises(ValueError, match=rf"a single completion may have {longest} tokens with its prompt"):
        fit(rollouts=1, data=data_of(tmp_path) | {"micro_batch_tokens": longest - 1})


# Recordings and the table


def test_the_table_says_what_was_dropped(tmp_path):
    """A completion is shown with all of its observations, but not with what replaced them."""
    data = data_of(tmp_path / "diaries")
    run = fit(v=1, rollouts=1, data=data, callbacks=[RolloutLog()], trainer={"default_root_dir": str(tmp_path)})
    rows = [json.loads(line) for path in tmp_path.rglob("completions.jsonl") for line in path.read_text().splitlines()]
    found = completions_of(run.recorder.rollouts[0], run.data.tokenizer, LARGE)
    assert len(rows) == 4
    for row, episode in zip(rows, found, strict=False):
        assert row["dropped"] == (len(episode.dropped) or None)
        assert row["completion"] == run.data.tokenizer.decode(spoken(episode))
    assert any(row["dropped"] for row in rows)


def test_a_recorded_run_is_repeated_exactly(tmp_path):
    folder = tmp_path / "recording"
    data = data_of(tmp_path / "diaries")
    first = fit(v=1, rollouts=3, data=data, callbacks=[RolloutRecorder(path=str(folder))])
    again = fit(v=1, rollouts=3, data=data | {"engine": ReplayEngine(str(folder))})
    assert largest_difference(first.weights, again.weights) == 0
    for one, other in zip(first.recorder.rollouts, again.recorder.rollouts, strict=True):
        assert torch.equal(one.contexts, other.contexts)
        assert one.metrics["rollout/dropped_observations"] > 0
    budget = {"micro_batch_tokens": 170}
    with pytest.raises(ValueError, match=r"recorded episodes have up to 3 contexts, but data.micro_batch_tokens count"):
        fit(v=1, rollouts=1, data=data | budget | {"engine": ReplayEngine(str(folder))})
    inner = data_of(tmp_path / "diaries")["engine"]
    fit(v=1, rollouts=1, data=data | budget | {"engine": ReplayEngine(str(folder), engine=inner)})
    with pytest.raises(ValueError, match=r"has \d+ tokens, but data.sampling.max_tokens is 19"):
        fit(
            v=1,
            rollouts=1,
            data=data | {"engine": ReplayEngine(str(folder)), "sampling": replace(LARGE, max_tokens=19)},
        )


def test_old_recordings_have_no_such_column(tmp_path):
    folder = tmp_path / "recording"
    data = data_of(tmp_path / "diaries", max_contexts=1)
    first = fit(v=1, rollouts=2, data=data, callbacks=[RolloutRecorder(path=str(folder))])
    recording = Recording.read(str(folder))
    old = tmp_path / "old.parquet"
    write_recording(recording.table.drop_columns(["dropped"]), recording.metadata[0], old)
    assert Recording.read(str(old)).fingerprint == recording.fingerprint
    again = fit(v=1, rollouts=2, data=data | {"engine": ReplayEngine(str(old))})
    assert largest_difference(first.weights, again.weights) == 0


# Messages


def test_settings_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"data.engine.max_contexts is 0; it must be at least 1"):
        EnvironmentEngine(max_contexts=0)
    with pytest.raises(ValueError, match=r"data.engine.max_contexts is 33; it must be at least 1 and at most 32"):
        EnvironmentEngine(max_contexts=33)
    with pytest.raises(
        ValueError, match=r"max_contexts is 2, which needs max_tokens_per_turn: observations are dropped"
    ):
        EnvironmentEngine(max_contexts=2)
    with pytest.raises(
        ValueError, match=r"data.engine.dropped_text '\.\.\.' has characters the tokenizer cannot encode"
    ):
        fit(rollouts=1, data=data_of(tmp_path, dropped_text="..."))
