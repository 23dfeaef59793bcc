"""Partial rollouts and syncs in flight with episodes of several turns: training, resume, kills, and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from lgrpo import RolloutCallback, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.data.collate import completions_of
from lgrpo.data.partial import PartialRollouts
from lgrpo.engines import EnginePool, EnvironmentEngine
from lgrpo.environments import EpisodeLimits
from lgrpo.recordings import ReplayEngine, RolloutRecorder
from lgrpo.rewards import EnvironmentReward
from lgrpo.tasks import SortDigits
from tests.engines.episodes import DROPPING, texts_of
from tests.environments.diaries import Thoughtful, Uneven, UnevenlyTalkative, diaries, told
from tests.helpers import build, fit, largest_difference
from tests.processes.alive import until_all_ended
from tests.test_in_flight import ROLLOUTS, in_flight
from tests.test_overlap import SaveEveryStep, SlowSteps
from tests.test_partial import CannotContinue, Progress, Weights, by_position, check_probabilities, spans_of

STOP = list("56789")
PROCESSES = EpisodeLimits(num_workers=2)


def data_of(folder, limits=None, engine=None, partial=None, environment=Uneven, **data):
    """Return the settings of partial rollouts of episodes that write diaries, and may drop observations."""
    folder.mkdir(exist_ok=True)
    settings = DROPPING if environment is UnevenlyTalkative else {"max_tokens_per_turn": 4}
    engine = EnvironmentEngine(environment(folder), engine, limits=limits, **settings)
    task = SortDigits(num_digits=2, num_held_out=20, reward=EnvironmentReward())
    partial = PartialRollouts(extra_prompts=4, max_spans=8) if partial is None else partial
    return {"engine": engine, "task": task, "sampling": Sampling(max_tokens=24, stop=STOP), "partial": partial} | data


def trained_texts(run):
    """Return what was said in each episode that was trained on."""
    tokenizer = run.data.tokenizer
    return [
        texts_of(episode, tokenizer, STOP)
        for batch in run.recorder.rollouts
        for episode in completions_of(batch, tokenizer, run.data.sampling)
    ]


def check_diaries(run, folder):
    """Check that every turn that was trained on was told to one environment, once and in order."""
    heard = [told(calls) for calls in diaries(folder)]
    for texts in trained_texts(run):
        heard.remove(texts)


def assert_same_completions(one, other):
    """Check that prompts which both runs trained on have the same completions; return their number."""
    ours, theirs = by_position(one), by_position(other)
    for position in ours.keys() & theirs.keys():
        for (tokens, logprobs), (others, their) in zip(ours[position], theirs[position], strict=True):
            assert tokens == others
            assert torch.allclose(logprobs, their, atol=1e-5)
    return len(ours.keys() & theirs.keys())


def test_same_episodes_as_whole_rollouts_if_the_weights_stay(tmp_path):
    whole = fit(v=1, rollouts=8, learning_rate=0.0, data=data_of(tmp_path / "whole", partial=False))
    run = fit(v=1, rollouts=8, learning_rate=0.0, data=data_of(tmp_path / "partial"))
    assert sum(len(spans) > 1 for spans in spans_of(run)) > 3, "nothing was continued"
    assert assert_same_completions(run, whole) > 20
    check_diaries(run, tmp_path / "partial")


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"v": 1}, {}),
        ({"v": 2, "i": 2}, {}),
        ({"v": 2}, {"lead": 1, "overlap": True}),
        ({"v": 3}, {"generate_ahead": True, "overlap": True, "max_lag": 3}),
        ({"v": 2, "i": 2}, {"environment": UnevenlyTalkative}),
        ({"v": 1}, {"environment": UnevenlyTalkative, "limits": PROCESSES}),
    ],
)
def test_each_token_has_the_probability_under_the_weights_of_its_step(tmp_path, settings, more):
    kept = Weights()
    data = data_of(tmp_path / "diaries", **more)
    run = fit(rollouts=12, learning_rate=0.5, data=data, callbacks=[kept], **settings)
    check_probabilities(run, kept)
    assert max(len(spans) for spans in spans_of(run)) > 1
    check_diaries(run, tmp_path / "diaries")
    assert any(batch.contexts is not None for batch in run.recorder.rollouts) == ("environment" in more)
    for batch in run.recorder.rollouts:
        old = batch.completion_mask & (batch.token_lag(batch.rollout * settings.get("i", 1)) > 3)
        assert not ("max_lag" in more and bool((batch.loss_mask & old).any()))


class LiveProcesses(Progress):
    """Also compares the episodes in the processes with those that are in progress, before each sampling."""

    def __init__(self):
        super().__init__()
        self.num_live = []

    def on_train_batch_start(self, trainer, *arguments):
        super().on_train_batch_start(trainer, *arguments)
        engine = trainer.datamodule.engine
        live, begun = engine._live._episodes, self.groups[-1]
        unfinished = {
            (position, sibling): completion
            for position, group in begun.items()
            for sibling, completion in enumerate(group)
            if completion.finish_reason is None
        }
        assert {key for key, completion in unfinished.items() if completion.token_ids} <= live.keys()
        assert live.keys() <= unfinished.keys()
        self.num_live.append(len(live))
        processes = set(engine._episodes._pool.episodes)
        assert set(live.values()) <= processes, "the environment of an unfinished episode has ended"


@pytest.mark.parametrize("at_limit", ["finish", "drop"])
def test_no_prompt_is_lost_and_no_process_is_left(tmp_path, at_limit):
    """Groups that are dropped lose their processes, and all processes end with the fit."""
    progress, folder = LiveProcesses(), tmp_path / "diaries"
    partial = PartialRollouts(extra_prompts=6, max_spans=2, at_limit=at_limit)
    run = fit(v=1, rollouts=10, data=data_of(folder, PROCESSES, partial=partial), callbacks=[progress])
    trained = [int(position) for batch in run.recorder.rollouts for position in batch.positions[:: batch.group_size]]
    assert len(set(trained)) == len(trained) == 40
    dropped = sum(row["rollout/dropped_groups"] for row in run.logged)
    assert (dropped > 0) == (at_limit == "drop")
    assert len(trained) + len(progress.groups[-1]) + dropped == progress.num_begun[-1]
    assert max(progress.num_live) > 0
    assert max(len(spans) for spans in spans_of(run)) == 2
    check_diaries(run, folder)
    if at_limit == "finish":  # episodes that are in progress at the end are the only others
        whole = sum(c.finish_reason is not None for group in progress.groups[-1].values() for c in group)
        num_others = len(diaries(folder)) - 160 - whole
        assert 0 <= num_others <= progress.num_live[-1], "a process may end before it has written anything"
    assert run.data.engine._episodes is None
    pids = {pid for calls in diaries(folder) for _, pid, _ in calls}
    assert until_all_ended(lambda stat: int(stat[0]) in pids)


def test_a_process_killed_between_rollouts_costs_its_episode(tmp_path):
    killed = []

    class Kill(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            engine = trainer.datamodule.engine
            idle = [(key, episode) for key, episode in engine._live._episodes.items() if not episode.is_waiting]
            if rollout >= 2 and not killed and idle:  # one that waits may have its last answer already
                key, episode = idle[0]
                killed.append(key)
                os.kill(engine._episodes._pool.episodes[episode].worker.pid, signal.SIGKILL)

    with pytest.warns(UserWarning, match=r"Uneven ended between two steps|Uneven ended during a"):
        run = fit(v=1, rollouts=8, data=data_of(tmp_path / "diaries", PROCESSES), callbacks=[Kill()])
    assert len(by_position(run)) == 32
    failed = [
        (int(batch.positions[row])) for batch in run.recorder.rollouts for row in batch.failed.nonzero().flatten()
    ]
    assert failed == [killed[0][0]]


def test_resumed_from_every_step(tmp_path):
    """Unfinished episodes start again from their prompts with their streams; no prompt is lost or trained on twice."""
    settings = {"v": 2, "rollouts": 6, "learning_rate": 0.0}
    callbacks = [SaveEveryStep(tmp_path), ExactResume()]
    whole = fit(**settings, data=data_of(tmp_path / "whole"), callbacks=callbacks)
    for step in (1, 2, 3, 5):
        kept, folder, path = Progress(), tmp_path / f"again{step}", tmp_path / f"{step}.ckpt"
        run = fit(**settings, data=data_of(folder), callbacks=[ExactResume(), kept], ckpt_path=str(path))
        assert assert_same_completions(run, whole) > 0
        before = {int(p) for batch in whole.recorder.rollouts[:step] for p in batch.positions}
        after = {int(p) for batch in run.recorder.rollouts for p in batch.positions}
        assert before.isdisjoint(after)
        assert before | after | kept.groups[-1].keys() == set(range(kept.num_begun[-1]))
        state = torch.load(path, weights_only=True)["RolloutDataModule"]["ranks"][0]["schedule"]["sampler"]
        stored = [completion for group in state["groups"].values() for completion in group]
        assert all(len(c["token_ids"]) == 0 for c in stored if c["finish_reason"] is None)


@pytest.mark.parametrize("environment", [Uneven, UnevenlyTalkative])
def test_a_resumed_run_has_the_right_probabilities(tmp_path, environment):
    """Episodes that were finished before the checkpoint keep their weights; those that start again have new ones."""
    more = {"environment": environment}
    kept, settings = Weights(), {"v": 1, "rollouts": 6, "learning_rate": 0.5}
    callbacks = [SaveEveryStep(tmp_path), ExactResume(), kept]
    fit(**settings, data=data_of(tmp_path / "whole", **more), callbacks=callbacks)
    earlier = {step: weights for step, weights in kept.at.items() if step < 3}
    data, path = data_of(tmp_path / "again", **more), str(tmp_path / "3.ckpt")
    state = torch.load(path, weights_only=True)["RolloutDataModule"]["ranks"][0]["schedule"]["sampler"]
    stored = [completion for group in state["groups"].values() for completion in group if completion["dropped"]]
    assert bool(stored) == (environment is UnevenlyTalkative), "a finished episode has dropped observations"
    run = fit(**settings, data=data, callbacks=callbacks, ckpt_path=path)
    kept.at |= earlier
    check_probabilities(run, kept)


def test_finished_episodes_of_another_environment_are_not_kept(tmp_path):
    settings = {"v": 1, "rollouts": 4, "learning_rate": 0.0}
    fit(**settings, data=data_of(tmp_path / "whole"), callbacks=[SaveEveryStep(tmp_path), ExactResume()])
    other = data_of(tmp_path / "other")
    other["engine"].max_turns = 2
    with pytest.warns(UserWarning, match=r"max_turns"):
        run = fit(**settings, data=other, callbacks=[ExactResume()], ckpt_path=str(tmp_path / "2.ckpt"))
    sampled = run.recorder.rollouts  # the checkpoint has no rollout that is sampled already
    episodes = [e for batch in sampled for e in completions_of(batch, run.data.tokenizer, run.data.sampling)]
    assert max(len(episode.turns) for episode in episodes) == 2


MODES = {"plain": {}, "overlap": {"overlap": True, "lead": 1}, "async": {"environment": Thoughtful}}
"""Settings of runs that are killed."""
KILLED = """
import os, sys
from pathlib import Path
from lgrpo.callbacks import ExactResume
from lgrpo.engines.partial_episodes import PartialEpisodeSampler
from tests.helpers import fit
from tests.test_overlap import SaveEveryStep, SlowSteps
from tests.test_partial_turns import MODES, PROCESSES, data_of

folder, mode = Path(sys.argv[1]), sys.argv[2]
take, count = PartialEpisodeSampler._take_answer, iter(range(1, 10**6))

def killed(sampler, *answer):
    is_late = (folder / "3.ckpt").exists()
    if is_late and mode == "async":
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "pid").replace(folder / "diaries.victim")  # read by a step of the environment
    elif is_late and sampler._begun and any(e.num_turns > 1 for e in sampler._open_episodes()):
        os.kill(os.getpid(), 9)
    take(sampler, *answer)

PartialEpisodeSampler._take_answer = killed
data = data_of(folder / "diaries", PROCESSES, **MODES[mode])
fit(v=2, rollouts=8, learning_rate=0.0, data=data, callbacks=[SaveEveryStep(folder), ExactResume()])
"""


@pytest.mark.slow("starts a run in another process")
@pytest.mark.parametrize("mode", MODES)
def test_killed_between_turns_and_resumed(tmp_path, mode):
    """Also while later rollouts are being sampled, and while asynchronous steps wait."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), mode]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = {pid for calls in diaries(tmp_path / "diaries") for _, pid, _ in calls}
    assert until_all_ended(lambda stat: int(stat[0]) in pids), "processes outlive the trainer"
    if mode == "async":
        unanswered = [calls for calls in diaries(tmp_path / "diaries") if calls[-1][0] == "step"]
        assert unanswered, "no step was waiting"
    newest = max(int(path.stem) for path in tmp_path.glob("*.ckpt"))
    more = MODES[mode]
    kept, settings = Progress(), {"v": 2, "rollouts": 8, "learning_rate": 0.0, "ckpt_path": f"{tmp_path}/{newest}.ckpt"}
    run = fit(**settings, data=data_of(tmp_path / "again", PROCESSES, **more), callbacks=[ExactResume(), kept])
    assert [batch.rollout for batch in run.recorder.rollouts] == list(range(newest, 8))
    whole = fit(v=2, rollouts=8, learning_rate=0.0, data=data_of(tmp_path / "whole", partial=False))
    assert assert_same_completions(run, whole) > 8
    assert len(by_position(run)) == 4 * (8 - newest)


def test_recorded(tmp_path):
    """A recording has the spans and the observed tokens of continued episodes."""
    recorder = RolloutRecorder(path=str(tmp_path / "recording"))
    run = fit(v=1, rollouts=5, data=data_of(tmp_path / "diaries"), callbacks=[recorder])
    paths = sorted((tmp_path / "recording").glob("*.parquet"))
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    found = [[(span["tokens"], span["step"]) for span in row["spans"] or []] for row in rows]
    assert found == [spans if len(spans) > 1 else [] for spans in spans_of(run)]
    assert any(found)
    assert any(row["observed"] and row["spans"] for row in rows)


@pytest.mark.slow("starts a pool")
def test_pool_with_a_worker_killed(tmp_path):
    """The process of an engine, not of an environment: turns are sampled again from the tokens they had."""
    pool, kept, progress, folder = EnginePool(SlowSteps(), num_processes=2), Weights(), Progress(), tmp_path / "diaries"

    class Kill(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 3:
                os.kill(pool._workers.running[0].process.pid, signal.SIGKILL)

    data = data_of(folder, engine=pool)
    try:
        with pytest.warns(UserWarning, match="recovering"):
            run = fit(v=1, rollouts=6, learning_rate=0.5, data=data, callbacks=[Kill(), kept, progress])
    finally:
        pool.close()
    trained = {int(position) for batch in run.recorder.rollouts for position in batch.positions}
    assert trained | progress.groups[-1].keys() == set(range(progress.num_begun[-1]))
    assert max(len(spans) for spans in spans_of(run)) > 1
    check_probabilities(run, kept)
    check_diaries(run, folder)


class WholeOnly(TransformersEngine):
    """Refuses to sample parts."""

    def generate_part(self, generation):
        raise AssertionError("a part was sampled")


def test_partial_off_is_unchanged(tmp_path):
    """A rollout that waits for all episodes is not sampled in parts, and they have one version."""
    engines = {"one": WholeOnly(), "other": TransformersEngine(max_sequences=8)}
    one, other = (
        fit(v=2, rollouts=4, data=data_of(tmp_path / name, engine=engine, partial=False))
        for name, engine in engines.items()
    )
    assert largest_difference(one.weights, other.weights) < 1e-6, "only rounding depends on the batches"
    assert not any(batch.behaviour_step.ndim == 2 for batch in one.recorder.rollouts)
    check_diaries(one, tmp_path / "one")


def test_an_engine_that_cannot_continue_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.partial is set, but EnvironmentEngine cannot continue"):
        build(data=data_of(tmp_path / "diaries", engine=CannotContinue()))


def test_a_replay_around_an_environment_is_refused(tmp_path):
    """It cannot continue completions, for partial rollouts or syncs in flight; without these it trains."""
    whole = data_of(tmp_path / "diaries", partial=False)
    fit(v=1, rollouts=1, data=whole, callbacks=[RolloutRecorder(path=str(tmp_path / "recording"))])
    replay = ReplayEngine(str(tmp_path / "recording"), engine=whole["engine"], missing="sample")
    with pytest.raises(
        ValueError, match=r"data.partial is set, but ReplayEngine cannot continue .* Leave data.partial"
    ):
        build(data=whole | {"engine": replay, "partial": True})
    with pytest.raises(ValueError, match=r"weight_sync.in_flight is true, but ReplayEngine cannot continue"):
        in_flight(1, 1, data=whole | {"engine": replay})
    assert fit(v=1, rollouts=1, data=whole | {"engine": replay}).recorder.rollouts[0].is_recorded.all()


# Syncs in flight


class WaitsInATurn(TransformersEngine):
    """Waits for a sync in each rollout that one can interrupt: within the first turns, or before second ones."""

    def __init__(self, v, lead, in_first_turn):
        super().__init__()
        self._v, self._lead, self._in_first_turn = v, lead, in_first_turn
        self._rollout = -1
        self._left = None
        self.is_waiting = threading.Event()

    def waits_in(self, rollout):
        return rollout >= 0 and rollout % self._v == 0 and rollout + self._lead < ROLLOUTS

    def sample(self, generation):
        rollout, self._left, self._current = generation.prompts[0].position // 4, None, generation
        if self._rollout < rollout < ROLLOUTS:  # first turns; a later one has the seed of its stream as position
            self._rollout = rollout
            self._left = 3 if self._in_first_turn else None
            self._is_next = not self._in_first_turn
        elif self._is_next:
            self._left, self._is_next = 1, False
        super().sample(generation)

    def _between_steps(self):
        super()._between_steps()
        if self._left is None or not self.waits_in(self._rollout):
            return
        self._left -= 1
        if self._left == 0:
            self.is_waiting.set()
            for _ in range(3000):
                if self._current.is_stopped:
                    break
                time.sleep(0.01)


class SyncsInATurn(RolloutCallback):
    """Lets a sync begin when the engine waits for it."""

    order = -1

    def on_rollout_start(self, trainer, pl_module, rollout):
        data = trainer.datamodule
        inner = data.engine.engine
        if inner.waits_in(rollout - data.lead):
            assert inner.is_waiting.wait(30)
            inner.is_waiting.clear()


@pytest.mark.parametrize("environment", [Uneven, UnevenlyTalkative])
@pytest.mark.parametrize("in_first_turn", [False, True])
@pytest.mark.parametrize(("v", "lead"), [(1, 1), (2, 2)])
def test_syncs_in_flight(tmp_path, v, lead, in_first_turn, environment):
    kept, folder = Weights(), tmp_path / "diaries"
    limits = PROCESSES if v == 1 and in_first_turn else None
    data = data_of(folder, limits, WaitsInATurn(v, lead, in_first_turn), partial=False, environment=environment)
    run = in_flight(v, lead, data=data, callbacks=[SyncsInATurn(), kept], learning_rate=0.5)
    assert [batch.rollout for batch in run.recorder.rollouts] == list(range(ROLLOUTS))
    assert any(len(spans) > 1 for spans in spans_of(run)), "no episode was continued"
    assert any(batch.contexts is not None for batch in run.recorder.rollouts) == (environment is UnevenlyTalkative)
    check_probabilities(run, kept)
    check_diaries(run, folder)
    assert len(diaries(folder)) == ROLLOUTS * 16, "no episode began twice"
