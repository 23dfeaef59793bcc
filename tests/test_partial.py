"""Partial rollouts: a rollout ends when enough groups are whole, and the others continue from their tokens."""

from __future__ import annotations

import copy
import os
import signal
import threading
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch

from lgrpo import RolloutCallback, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.data.dynamic import DynamicSampling
from lgrpo.data.partial import PartialRollouts, versions_of
from lgrpo.engines import EngineError, EnginePool
from lgrpo.policy.sequences import read_in_context
from lgrpo.recordings import Recording, RolloutRecorder
from tests.helpers import build, fit, largest_difference
from tests.test_overlap import SaveEveryStep, SlowSteps, assert_same

LONG = Sampling(max_tokens=24)
PARTIAL = {"partial": PartialRollouts(extra_prompts=2, max_spans=8), "sampling": LONG}
SETTINGS = {"rollouts": 10, "v": 1}


def by_position(run):
    """Return the completions of every prompt, as tokens and log-probabilities."""
    found = {}
    for batch in run.recorder.rollouts:
        for first in range(0, len(batch), batch.group_size):
            rows = range(first, first + batch.group_size)
            position = int(batch.positions[first])
            assert position not in found, "a prompt is in two rollouts"
            masks = [batch.completion_mask[row] for row in rows]
            found[position] = [
                (batch.tokens[row][mask].tolist(), batch.behaviour_logprobs[row][mask])
                for row, mask in zip(rows, masks, strict=True)
            ]
    return found


def spans_of(run):
    return [batch.spans(row) for batch in run.recorder.rollouts for row in range(len(batch))]


class Progress(RolloutCallback):
    """Records what is in progress when training on a rollout begins."""

    def __init__(self):
        self.groups = []
        self.num_begun = []

    def on_train_batch_start(self, trainer, *_):
        sampler = trainer.datamodule.schedule._sampler
        progress = sampler._partial._after[trainer.datamodule.rollout.rollout]
        self.groups.append(copy.copy(progress.groups))
        self.num_begun.append(progress.num_begun)


def test_same_completions_as_whole_rollouts_if_the_weights_stay():
    whole = by_position(fit(**SETTINGS, learning_rate=0.0, data={"sampling": LONG}))
    run = fit(**SETTINGS, learning_rate=0.0, data=PARTIAL)
    partial, continued = by_position(run), [spans for spans in spans_of(run) if len(spans) > 1]
    assert len(continued) > 5, "nothing was continued"
    common = partial.keys() & whole.keys()
    assert len(common) > 0.8 * len(whole)
    for position in common:
        for (tokens, logprobs), (others, their) in zip(partial[position], whole[position], strict=True):
            assert tokens == others
            assert torch.allclose(logprobs, their, atol=1e-5)


class Weights(RolloutCallback):
    """Keeps the policy of every optimizer step."""

    def __init__(self):
        self.at = {}

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.at[trainer.global_step] = copy.deepcopy(pl_module.policy.state_dict())


def check_probabilities(run, kept):
    """Compare each token's log π_α with the policy of its step."""
    policy = run.module.policy
    for batch in run.recorder.rollouts:
        for step in set(batch.token_steps[batch.completion_mask].tolist()):
            policy.load_state_dict(kept.at[step])
            with torch.no_grad():
                logprobs, _ = read_in_context(policy, batch)
            own = batch.completion_mask & (batch.token_steps == step)
            assert torch.allclose(logprobs[own], batch.behaviour_logprobs[own], atol=1e-4)


@pytest.mark.parametrize("v", [1, 2])
def test_each_token_has_the_probability_under_the_weights_of_its_step(v):
    kept = Weights()
    run = fit(rollouts=8, v=v, learning_rate=0.5, data=PARTIAL, callbacks=[kept])
    check_probabilities(run, kept)
    lags = [batch.token_lag(batch.rollout)[batch.completion_mask].max() for batch in run.recorder.rollouts]
    assert max(lags) > v - 1, "no token was older than its rollout's sync"
    weights = [kept.at[step] for step in sorted(kept.at)]
    assert all(largest_difference(a, b) > 1e-3 for a, b in pairwise(weights)), "the weights hardly differ"


def test_no_prompt_is_lost_or_starved():
    progress = Progress()
    run = fit(rollouts=12, v=1, data=PARTIAL, callbacks=[progress])
    assert all(len(batch) == 16 for batch in run.recorder.rollouts)
    trained = set()
    for batch, groups, num_begun in zip(run.recorder.rollouts, progress.groups, progress.num_begun, strict=True):
        trained |= set(batch.positions.tolist())
        assert trained.isdisjoint(groups)
        assert trained | groups.keys() == set(range(num_begun))
        assert len(groups) == 2
    for earlier, later in pairwise(progress.groups):
        for number in earlier.keys() & later.keys():
            for before, after in zip(earlier[number], later[number], strict=True):
                assert after.token_ids[: len(before.token_ids)] == before.token_ids, "tokens are kept"
                assert len(after.token_ids) > len(before.token_ids) or before.finish_reason, "every one goes on"
    rows = run.logged
    assert max(row["rollout/continued_fraction"] for row in rows) > 0
    assert max(row["rollout/unfinished_groups"] for row in rows) <= 2
    assert max(row["train/lag_max"] for row in rows) >= 1, "tokens of a continued completion have a lag at v = 1"
    assert all(0 <= row["train/lag"] < row["train/lag_max"] for row in rows if row["train/lag_max"])


@pytest.mark.parametrize("at_limit", ["finish", "drop"])
@pytest.mark.parametrize("max_spans", [1, 2])
def test_limit_of_versions(at_limit, max_spans):
    progress, sampling = Progress(), Sampling(max_tokens=27)
    partial = PartialRollouts(extra_prompts=4, max_spans=max_spans, at_limit=at_limit)
    data = {"partial": partial, "sampling": sampling}
    run = fit(rollouts=12, v=1, data=data, callbacks=[progress])
    assert max(len(spans) for spans in spans_of(run)) == max_spans
    assert all(len(versions_of(group)) <= max_spans for groups in progress.groups for group in groups.values())
    dropped = sum(row["rollout/dropped_groups"] for row in run.logged)
    assert (dropped > 0) == (at_limit == "drop")


def test_surplus_groups_fill_a_rollout():
    """More groups are in progress than a rollout needs, so some rollouts need no sampling; nothing is lost."""
    progress = Progress()
    run = fit(rollouts=30, v=1, data={"partial": True, "num_prompts": 1}, callbacks=[progress])
    trained = [int(batch.positions[0]) for batch in run.recorder.rollouts]
    assert sorted([*trained, *progress.groups[-1]]) == list(range(progress.num_begun[-1]))


class StopsLate(TransformersEngine):
    """Ends a generation before enough groups are whole."""

    def sample(self, generation):
        generation.is_stopped = True
        super().sample(generation)


def test_a_rollout_without_enough_groups_is_refused():
    with pytest.raises(EngineError, match="StopsLate ended a rollout with 0 whole groups"):
        fit(rollouts=2, data=PARTIAL | {"engine": StopsLate()})


@pytest.mark.parametrize("v", [1, 3])
def test_overlap_changes_nothing(v):
    settings = {"rollouts": 9, "v": v, "data": PARTIAL | {"generate_ahead": True}}
    plain = fit(**settings)
    assert max(len(spans) for spans in spans_of(plain)) > 1
    settings["data"] |= {"overlap": True}
    assert_same(plain, fit(**settings))


@pytest.mark.parametrize("data", [{}, {"overlap": True, "generate_ahead": True}, {"lead": 2, "overlap": True}])
def test_resumed_from_every_step(tmp_path, data):
    """Also in the middle of a cycle, with groups in progress, and while later rollouts are being sampled."""
    settings, data = {"v": 2, "rollouts": 6}, PARTIAL | {"partial": PartialRollouts(extra_prompts=6)} | data
    callbacks = [SaveEveryStep(tmp_path), ExactResume()]
    whole = fit(**settings, data=data | {"engine": SlowSteps()}, callbacks=callbacks)
    assert max(len(spans) for spans in spans_of(whole)) > 1
    for step in range(1, 6):
        again = fit(
            **settings, data=PARTIAL | data, callbacks=[ExactResume()], ckpt_path=str(tmp_path / f"{step}.ckpt")
        )
        assert largest_difference(again.weights, whole.weights) == 0, step
        kept = whole.recorder.rollouts[step:]
        for one, other in zip(kept, again.recorder.rollouts, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.token_steps, other.token_steps)


def test_resumed_again_within_a_rollout(tmp_path):
    """A resumed run writes checkpoints with the groups in progress before it has released a rollout."""
    settings = {"v": 1, "i": 2, "rollouts": 5, "data": PARTIAL | {"partial": PartialRollouts(extra_prompts=4)}}
    whole = fit(**settings, callbacks=[SaveEveryStep(tmp_path), ExactResume()])
    (again := tmp_path / "again").mkdir()
    path = str(tmp_path / "3.ckpt")
    fit(**settings, callbacks=[SaveEveryStep(again), ExactResume()], ckpt_path=path, trainer={"max_steps": 4})
    last = fit(**settings, callbacks=[ExactResume()], ckpt_path=str(again / "4.ckpt"))
    assert largest_difference(last.weights, whole.weights) == 0


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=24, temperature=0.5), Sampling(max_tokens=8)])
def test_resumed_with_other_sampling(tmp_path, sampling):
    """Groups in progress are sampled from the beginning: their tokens were drawn from another distribution."""
    settings = {"v": 1, "rollouts": 5, "learning_rate": 0.0}
    fit(**settings, data=PARTIAL, callbacks=[SaveEveryStep(tmp_path), ExactResume()])
    with pytest.warns(UserWarning, match="sampled differently"):
        again = fit(
            **settings,
            data=PARTIAL | {"sampling": sampling},
            callbacks=[ExactResume()],
            ckpt_path=str(tmp_path / "2.ckpt"),
        )
    policy = again.module.policy
    for batch in again.recorder.rollouts:
        with torch.no_grad():
            logprobs, _ = policy(batch.tokens, batch.completion_mask, sampling.temperature)
        own = batch.completion_mask
        assert torch.allclose(logprobs[own], batch.behaviour_logprobs[own], atol=1e-4)
        assert int(own.sum(1).max()) <= sampling.max_tokens


def test_late_rewards_and_old_tokens():
    """A late group is dropped when all of its tokens are too old; old tokens of others are masked."""
    run = fit(rollouts=8, v=1, learning_rate=0.5, data=PARTIAL | {"max_lag": 0})
    for batch in run.recorder.rollouts:
        old = batch.completion_mask & (batch.token_lag(batch.rollout) > 0)
        assert not bool((batch.loss_mask & old).any())
    assert any(bool((batch.token_lag(batch.rollout) > 0).any()) for batch in run.recorder.rollouts)


@pytest.mark.slow("starts a pool")
def test_pool_with_a_worker_killed_in_a_partial_rollout():
    pool = EnginePool(SlowSteps(), num_processes=2)

    class Kill(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 3:
                process = pool._workers.running[0].process
                threading.Timer(0.1, lambda: os.kill(process.pid, signal.SIGKILL)).start()

    progress, kept = Progress(), Weights()
    with pytest.warns(UserWarning, match="recovering"):
        run = fit(rollouts=6, v=1, data=PARTIAL | {"engine": pool}, callbacks=[Kill(), progress, kept])
    pool.close()
    trained = {int(position) for batch in run.recorder.rollouts for position in batch.positions}
    assert trained | progress.groups[-1].keys() == set(range(progress.num_begun[-1]))
    for batch in run.recorder.rollouts:
        for step in set(batch.token_steps[batch.completion_mask].tolist()):
            run.module.policy.load_state_dict(kept.at[step])
            with torch.no_grad():
                logprobs, _ = run.module.policy(batch.tokens, batch.completion_mask, batch.temperature)
            own = batch.completion_mask & (batch.token_steps == step)
            assert torch.allclose(logprobs[own], batch.behaviour_logprobs[own], atol=1e-4)


class CannotContinue(TransformersEngine):
    can_continue = False


class TestRejected:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"engine": CannotContinue()}, "CannotContinue cannot continue completions from their tokens"),
            ({"behaviour_logprobs": "policy"}, "log π_α of tokens that were sampled from earlier weights"),
            ({"dynamic_sampling": DynamicSampling()}, "a partial rollout is not resampled"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            build(data={"partial": True, **settings})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [({"max_spans": 0}, "max_spans is 0"), ({"extra_prompts": 0}, "extra_prompts is 0")],
    )
    def test_numbers(self, settings, message):
        with pytest.raises(ValueError, match=rf"data\.partial\.{message}"):
            build(data={"partial": PartialRollouts(**settings)})


def test_recorded_spans(tmp_path):
    """A recording has the parts of a completion and the syncs of all of them; older ones without parts can be read."""
    recorder = RolloutRecorder(path=str(tmp_path))
    run = fit(rollouts=6, v=1, data=PARTIAL, callbacks=[recorder])
    paths = sorted(tmp_path.glob("*.parquet"))
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    found = [[(span["tokens"], span["step"]) for span in row["spans"] or []] for row in rows]
    expected = [spans if len(spans) > 1 else [] for spans in spans_of(run)]
    assert found == expected
    assert any(expected)
    for path in paths:
        metadata = Recording.read(str(path)).metadata[0]
        versions = {span["version"] for row in pq.read_table(path).to_pylist() for span in row["spans"] or []}
        assert versions <= {sync["version"] for sync in metadata["syncs"]}
    table = pq.read_table(paths[-1])
    pq.write_table(table.drop_columns(["spans"]), paths[-1])
    assert Recording.read(str(paths[-1])).table["spans"].null_count == len(table)
