"""Tests of scoring in a run: during sampling, later, and with failures."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, Prompt, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume, RolloutLog
from lgrpo.data.collate import completions_of, concatenate
from lgrpo.data.late import LateGroups, padded_to, split_groups
from lgrpo.data.scorer import Scorer
from lgrpo.rewards import NOT_YET, Isolated, MathVerify, NotedScore, Reward, Scoring, WeightedSum
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, a_batch, fit, largest_difference, tiny_policy
from tests.rewards.hostile import Fussy, LateThenFails


def sort_digits(reward):
    return SortDigits(num_digits=2, num_held_out=20, reward=reward)


class Late(Reward):
    """Returns the score of every third prompt only after ``patience`` requests."""

    is_inline = True

    def __init__(self, patience=2, every=3):
        self.patience = patience
        self.every = every
        self.asked = {}

    def score(self, prompt, completion):
        key = prompt.position, tuple(completion.token_ids)
        self.asked[key] = self.asked.get(key, 0) + 1
        is_late = prompt.position % self.every == 0 and self.asked[key] <= self.patience
        return NOT_YET if is_late else LowDigits().score(prompt, completion)


class LateByRollout(Reward):
    """Late until a file exists: state outside the process, as with human labels."""

    is_inline = True

    def __init__(self, folder: Path):
        self.folder = folder

    def score(self, prompt, completion):
        path = self.folder / f"{prompt.position}-{hash(tuple(completion.token_ids))}"
        if prompt.position % 3 == 0 and not path.exists():
            path.touch()
            return NOT_YET
        return LowDigits().score(prompt, completion)


class Counted(Reward):
    """Returns the number of times it was asked about a completion, and notes it; the first siblings come late."""

    is_inline = True

    def __init__(self):
        self.asked = {}

    def score(self, prompt, completion):
        key = prompt.position, tuple(completion.token_ids)
        self.asked[key] = self.asked.get(key, 0) + 1
        is_late = completion.token_ids[0] % 2 == 0 and self.asked[key] == 1
        return NOT_YET if is_late else NotedScore(self.asked[key] / 4, {"score": self.asked[key] / 4})


class TestLateScores:
    def test_a_group_waits_and_is_trained_when_it_is_complete(self):
        on_time = fit(rollouts=6, learning_rate=0.0)
        run = fit(rollouts=6, learning_rate=0.0, data={"task": sort_digits(Late())})
        positions = [batch.positions[batch.is_known].unique().tolist() for batch in run.recorder.rollouts]
        assert positions[:4] == [
            [1, 2],  # 0 and 3 are late: placeholders
            [4, 5, 7],  # 6 too
            [0, 3, 8, 10, 11],  # two arrive at the third request: one replaces 9, one is appended
            [6, 13, 14],
        ]
        trained = {int(p): batch for batch in run.recorder.rollouts for p in batch.positions[batch.is_known]}
        for batch in on_time.recorder.rollouts[:3]:
            for p in batch.positions.unique().tolist():
                own, its = trained[p].positions == p, batch.positions == p
                assert torch.equal(trained[p].rewards[own], batch.rewards[its])
                assert torch.equal(trained[p].behaviour_step[own], batch.behaviour_step[its])
                assert trained[p].loss_mask[own].sum() == batch.loss_mask[its].sum() > 0
        assert [row["rollout/late_waiting"] for row in run.logged] == [2, 3, 2, 3, 3, 2]
        assert [row["rollout/late_joined"] for row in run.logged] == [0, 0, 2, 1, 1, 2]
        assert [row["train/lag_max"] for row in run.logged] == [0, 0, 2, 2, 2, 2]

    def test_a_placeholder_affects_nothing(self):
        run = fit(rollouts=1, data={"task": sort_digits(Late())})
        (batch,) = run.recorder.rollouts
        known = batch.is_known
        assert not batch.loss_mask[~known].any()
        assert not batch.advantages[~known].any()
        row = run.logged[0]
        assert row["rollout/reward"] == pytest.approx(float(batch.rewards[known].mean()))
        assert row["rollout/live_fraction"] == 1.0
        assert batch.totals.all_sequences == 8

    def test_all_scores_are_late(self):
        run = fit(rollouts=3, data={"task": sort_digits(Late(patience=1, every=1))})
        assert [row["train/step_skipped"] for row in run.logged] == [1, 0, 0]
        assert [len(batch) for batch in run.recorder.rollouts] == [16, 16, 16]

    def test_groups_that_are_too_old_are_dropped_and_counted(self):
        run = fit(rollouts=6, data={"task": sort_digits(Late(patience=10**6)), "max_lag": 1})
        assert [row["rollout/late_dropped"] for row in run.logged] == [0, 0, 2, 1, 1, 2]
        assert sum(row["rollout/late_joined"] for row in run.logged) == 0
        assert max(row["rollout/late_waiting"] for row in run.logged) == 3

    def test_a_resumed_run_waits_for_the_same_groups(self, tmp_path):
        def settings(name, save=False):
            folder = tmp_path / name
            folder.mkdir()
            callbacks = [ExactResume()]
            if save:
                callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
            trainer = {"enable_checkpointing": save, "default_root_dir": str(folder)}
            data = {"task": sort_digits(LateByRollout(folder))}
            return {"rollouts": 5, "learning_rate": 0.5, "callbacks": callbacks, "trainer": trainer, "data": data}

        straight = fit(**settings("straight", save=True))
        for step in range(1, 5):
            asked = settings(str(step))
            for path in (tmp_path / "straight").glob("*-*"):  # requests up to that step
                if int(path.name.split("-")[0]) < 4 * step:
                    (tmp_path / str(step) / path.name).touch()
            run = fit(**asked, ckpt_path=str(tmp_path / "straight" / f"step={step}.ckpt"))
            assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"

    def test_early_rollouts_are_scored_again_before_training(self):
        """With a cycle sampled in one call, scores of its later rollouts arrive before they are trained."""
        data = {"task": sort_digits(Late(patience=1)), "generate_ahead": True}
        run = fit(v=4, rollouts=4, data=data)
        assert [row.get("rollout/late_waiting", 0) for row in run.logged] == [0, 0, 0, 0]
        assert [int(batch.is_known.sum()) for batch in run.recorder.rollouts] == [16] * 4

    def test_late_scores_may_fail_too(self, tmp_path):
        task, scoring = sort_digits(LateThenFails(tmp_path)), Scoring(mask_failures=True, failure_score=-5)
        with pytest.warns(UserWarning, match="the reward failed"):
            run = fit(rollouts=3, data={"task": task, "scoring": scoring})
        joined = run.recorder.rollouts[1]
        late = joined.is_known & (joined.positions == 0)
        assert late.sum() == 4
        assert joined.rewards[late].tolist() == [-5.0] * 4
        assert not joined.loss_mask[late].any()
        assert run.logged[1]["reward/failures"] >= 4

    def test_notes_belong_to_the_score_that_counts(self):
        """A score that was known stays when its late siblings are scored, and so do its notes."""
        run = fit(rollouts=4, data={"task": sort_digits(Counted())})
        joined = [batch for batch in run.recorder.rollouts if batch.metrics.get("rollout/late_joined")]
        assert joined
        for batch in run.recorder.rollouts:
            for row in batch.is_known.nonzero().flatten().tolist():
                assert batch.notes[row]["score"] == pytest.approx(float(batch.rewards[row]))

    def test_late_groups_cannot_use_logprobs_of_the_policy(self):
        data = {"task": sort_digits(Late()), "behaviour_logprobs": "policy"}
        with pytest.raises(ValueError, match=r"the policy has changed since it was sampled\. Use 'engine'"):
            fit(rollouts=2, data=data)

    def test_a_sum_is_late_if_a_part_is(self):
        reward = WeightedSum({"late": Late(), "low": LowDigits()})
        run = fit(rollouts=1, data={"task": sort_digits(reward)})
        assert int(run.recorder.rollouts[0].is_known.sum()) == 8

    def test_completions_are_rebuilt_from_a_batch(self):
        run = fit(rollouts=1, data={"sampling": Sampling(max_tokens=6, stop=["7"])})
        (batch,) = run.recorder.rollouts
        for group in split_groups(batch):
            prompt = run.data.train_prompts.at(int(group.positions[0]))
            for row, completion in enumerate(completions_of(group, run.data.tokenizer, run.data.sampling)):
                assert "7" not in completion.text
                tokens = group.tokens[row, : len(prompt.token_ids) + len(completion.token_ids)].tolist()
                assert tokens == prompt.token_ids + completion.token_ids
                assert len(completion.logprobs) == len(completion.token_ids)
                assert float(group.rewards[row]) == pytest.approx(LowDigits().score(prompt, completion))


def test_split_groups_and_concatenate():
    batch = a_batch()
    again = concatenate(split_groups(batch))
    assert torch.equal(
        again.tokens * again.attention_mask, batch.tokens[:, : again.tokens.shape[1]] * again.attention_mask
    )
    assert torch.equal(again.rows, batch.rows)
    larger = padded_to(batch, 12)
    assert len(larger) == 12
    assert larger.is_known.tolist() == [True] * 8 + [False] * 4
    assert not larger.loss_mask[8:].any()
    same, late = LateGroups().join(batch, rescore=None, oldest_step=0, rescore_own=False)
    assert same is batch
    assert not late.is_active


def test_episodes_keep_their_turns_beside_other_completions():
    """As in a replay of both, where a group of one kind may wait for its scores and join a rollout of the other."""
    plain, episodes = a_batch(), a_batch(seed=1)
    episodes.turn_rewards = torch.where(episodes.completion_mask, 0.5, 0.0)
    episodes.episode_failed = torch.arange(8) == 2
    joined = concatenate([plain, episodes])
    assert not joined.turn_rewards[:8].any()
    assert not joined.episode_failed[:8].any()
    assert torch.equal(joined.turn_rewards[8:], episodes.turn_rewards)
    assert torch.equal(joined.episode_failed[8:], episodes.episode_failed)
    assert concatenate([plain, plain]).turn_rewards is None


class Timed(Reward):
    """Records when it is called."""

    is_inline = True

    def __init__(self):
        self.times = []

    def score(self, prompt, completion):
        self.times.append(time.monotonic())
        return LowDigits().score(prompt, completion)


def test_groups_are_scored_while_others_are_sampled():
    """The engine decodes two groups at a time: the first are scored before the last are sampled."""
    reward, ended = Timed(), []
    engine = TransformersEngine(max_sequences=4)
    generate = engine.generate

    def timed(*arguments, **settings):
        result = generate(*arguments, **settings)
        ended.append(time.monotonic())
        return result

    engine.generate = timed
    run = fit(rollouts=1, data={"task": sort_digits(reward), "engine": engine, "num_prompts": 8})
    assert len(reward.times) == 32
    assert min(reward.times) < ended[0]
    assert sum(when < ended[0] for when in reward.times) >= 16
    plain = fit(rollouts=1, data={"num_prompts": 8})
    assert torch.equal(run.recorder.rollouts[0].rewards, plain.recorder.rollouts[0].rewards)


def test_every_group_is_announced_once_with_what_is_returned():
    policy, engine = tiny_policy(), TransformersEngine(max_sequences=12)
    policy.build()
    engine.load_weights(policy.weights(), 0)
    prompts = [
        Prompt(text=t, token_ids=policy.tokenizer(t).input_ids, row={}, position=i)
        for i, t in enumerate(["12>", "3>", "456>", "77>", "8>"])
    ]
    received = {}

    def on_group(index, completions):
        assert index not in received
        received[index] = completions

    groups = engine.generate(prompts, 4, Sampling(max_tokens=20), 0, policy.tokenizer, on_group)
    assert [received[index] for index in range(5)] == groups


class TestFailures:
    def test_a_custom_reward_runs_in_workers(self):
        with pytest.warns(
            UserWarning, match=r"the reward failed on \d+ of 16 completions; the first failure: ValueError: a"
        ):
            run = fit(rollouts=2, data={"task": sort_digits(Fussy()), "scoring": Scoring(mask_failures=True)})
        for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
            assert 0 < int(batch.failed.sum()) == row["reward/failures"] == row["reward/errors"]
            assert not batch.loss_mask[batch.failed].any()
            assert batch.loss_mask[~batch.failed].any(1).all()
            assert not batch.rewards[batch.failed].any()

    def test_only_rewards_that_may_do_harm_run_in_workers(self):
        scorer = Scorer(WeightedSum({"math": MathVerify(), "low": LowDigits()}, {"low": 0.5}), Scoring())
        assert isinstance(scorer.reward.rewards["math"], Isolated)
        assert isinstance(scorer.reward.rewards["low"], LowDigits)
        assert scorer.reward.weights == {"math": 1.0, "low": 0.5}
        scorer.close()
        assert isinstance(Scorer(MathVerify(), None).reward, MathVerify)

    def test_workers_end_with_the_run(self):
        with pytest.warns(UserWarning, match="the reward failed"):
            run = fit(rollouts=1, data={"task": sort_digits(Fussy())})
        assert run.data._scorers == {}
        assert not [thread for thread in threading.enumerate() if thread.name == "reward-workers"]


def test_the_rollout_log_with_late_scores(tmp_path):
    fit(
        rollouts=1,
        callbacks=[RolloutLog(num_groups=4)],
        loss=ClippedLoss(),
        data={"task": sort_digits(Late())},
        trainer={"default_root_dir": str(tmp_path)},
    )
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [row["reward"] is None for row in rows] == [True] * 4 + [False] * 8 + [True] * 4
