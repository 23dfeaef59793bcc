"""Sampling in the background: the rollouts are the same, and each is trained on while later ones are being sampled."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch

from lgrpo import ClippedLoss, RolloutCallback, TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.data import schedule
from lgrpo.data.dynamic import DynamicSampling
from lgrpo.data.queue import RolloutQueue
from lgrpo.engines import EngineError, EnginePool, Timeouts, VLLMEngine
from lgrpo.rewards import Reward, WeightedSum
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, build, fit, largest_difference

CYCLE = {"v": 4, "rollouts": 8}
AHEAD = {"generate_ahead": True, "overlap": True}


def assert_same(a, b, tolerance=0.0):
    assert a.recorder.lags == b.recorder.lags
    for one, other in zip(a.recorder.rollouts, b.recorder.rollouts, strict=True):
        assert one.rollout == other.rollout
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.rewards, other.rewards)
        assert float((one.behaviour_logprobs - other.behaviour_logprobs).abs().max()) <= tolerance
    assert largest_difference(a.weights, b.weights) <= tolerance


@pytest.mark.parametrize("v", [1, 3, None])
@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_same_rollouts_and_weights(v, lead, ahead):
    settings = {"v": v, "i": 2, "rollouts": 4, "epochs": 2, "loss": ClippedLoss(kl_coef=0.1)}
    data = {"lead": lead, "generate_ahead": ahead}
    plain = fit(**settings, data=data)
    assert_same(plain, fit(**settings, data=data | {"overlap": True}))


@pytest.mark.parametrize("ahead", [False, True])
def test_dynamic_sampling(ahead):
    """Groups without variance are replaced by the same ones; each rollout has its own calls."""
    data = {"dynamic_sampling": DynamicSampling(max_rounds=2, tolerance=0.2)}
    plain = fit(**CYCLE, data=data)
    overlapped = fit(**CYCLE, data=data | {"generate_ahead": ahead, "overlap": True})
    assert_same(plain, overlapped)
    resampled = [row["rollout/resampled_fraction"] for row in overlapped.logged]
    assert resampled == [row["rollout/resampled_fraction"] for row in plain.logged]
    assert max(resampled) > 0


class WaitsForTraining(TransformersEngine):
    """Finishes the second rollout of a cycle only when training on the first one has begun."""

    def __init__(self):
        super().__init__(max_sequences=16)
        self.trained = threading.Event()
        self.was_trained = []

    def sample(self, generation):
        keep = generation.on_group
        self.trained.clear()

        def keep_later(index, group):
            if index >= 4:
                self.was_trained.append(self.trained.wait(30))
            keep(index, group)

        super().sample(replace(generation, on_group=keep_later))


class Trained(RolloutCallback):
    def __init__(self, engine):
        self.engine = engine

    def on_train_batch_start(self, *_):
        self.engine.trained.set()


def test_training_begins_while_later_rollouts_are_sampled():
    engine = WaitsForTraining()
    run = fit(**CYCLE, data=AHEAD | {"engine": engine}, callbacks=[Trained(engine)])
    assert engine.was_trained == [True] * 2 * 3 * 4, "two cycles, three rollouts of four prompts"
    assert_same(fit(**CYCLE), run)
    rows = run.logged
    for cycle in (rows[:4], rows[4:]):
        assert cycle[0]["time/clock"] < cycle[1]["time/sampled_at"], "trained on before the next one is sampled"
        assert all(row["time/sampled_at"] <= row["time/clock"] for row in cycle)
    assert sum(row["time/generate"] for row in rows) <= rows[-1]["time/clock"]


class Failing(Reward):
    """Fails in the second rollout."""

    is_inline = True

    def __init__(self):
        self.count = 0

    def score(self, prompt, completion):
        self.count += 1
        if self.count > 20:
            raise RuntimeError("no more scores")
        return float(self.count % 2)


def test_error_of_a_reward():
    data = AHEAD | {"task": SortDigits(num_digits=2, num_held_out=20, reward=Failing())}
    run = build(**CYCLE, data=data)
    with pytest.raises(RuntimeError, match="no more scores"):
        run.trainer.fit(run.module, datamodule=run.data)


@pytest.mark.parametrize("ahead", [2, 16])
def test_a_slow_trainer_does_not_make_rollouts_pile_up(ahead, monkeypatch):
    monkeypatch.setattr(schedule, "MAX_AHEAD", ahead)
    run = build(v=24, rollouts=24, data=AHEAD)
    waiting, request = [], RolloutQueue.request

    def count(queue, rollouts):
        waiting.append((len(rollouts), rollouts.stop - run.trainer.global_step - 1))
        request(queue, rollouts)

    monkeypatch.setattr(RolloutQueue, "request", count)
    run.trainer.fit(run.module, datamodule=run.data)
    assert sum(size for size, _ in waiting) == 24
    assert max(size for size, _ in waiting) == ahead
    assert max(number for _, number in waiting) <= 2 * ahead


def test_memory_limits_how_many_rollouts_wait(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_BYTES", 1)
    run = build(v=8, rollouts=8, data=AHEAD)
    sizes, request = [], RolloutQueue.request
    monkeypatch.setattr(RolloutQueue, "request", lambda queue, some: (sizes.append(len(some)), request(queue, some)))
    run.trainer.fit(run.module, datamodule=run.data)
    assert sizes == [1] * 8


def test_an_engine_that_cannot():
    with pytest.raises(ValueError, match=r"data\.overlap is true, but VLLMEngine cannot sample .*EnginePool"):
        build(data={"engine": VLLMEngine(), "overlap": True})
    run = build(v=4, data=AHEAD | {"behaviour_logprobs": "policy"})
    with pytest.raises(ValueError, match=r"data\.behaviour_logprobs is 'policy'.* with data\.overlap"):
        run.trainer.fit(run.module, datamodule=run.data)


def test_the_clock_of_a_restored_rollout():
    """Its time of sampling was on the clock of the fit before."""
    (saved,) = fit(rollouts=1).recorder.rollouts
    assert saved.metrics["time/sampled_at"] > 0
    queue = RolloutQueue(lambda rollouts, deliver: None, lambda rollouts: None, in_background=False)
    queue.load_state_dict([saved.state_dict()])
    (restored,) = queue.ready()
    assert restored.metrics["time/sampled_at"] == 0
    assert restored.metrics["time/generate"] == saved.metrics["time/generate"]


def test_resumed_without_overlap(tmp_path):
    class Save(RolloutCallback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    for first, then in ((True, False), (False, True)):
        straight = fit(**CYCLE, data={"generate_ahead": True, "overlap": first}, callbacks=[Save(), ExactResume()])
        resumed = build(**CYCLE, data={"generate_ahead": True, "overlap": then}, callbacks=[ExactResume()])
        resumed.trainer.fit(resumed.module, datamodule=resumed.data, ckpt_path=str(tmp_path / "saved.ckpt"))
        assert largest_difference(resumed.weights, straight.weights) == 0
        assert resumed.recorder.lags == [1, 2, 3]


class SlowSteps(TransformersEngine):
    """An engine that takes a while for each token."""

    def _between_steps(self):
        time.sleep(0.02)
        super()._between_steps()


@pytest.fixture
def pool():
    engine = EnginePool(SlowSteps(max_sequences=8))
    yield engine
    engine.close()


@pytest.fixture
def loaded():
    """A pool of one process that holds weights, four prompts, and a function that samples completions of them."""
    engine = EnginePool(SlowSteps(max_sequences=8), num_processes=1, timeouts=Timeouts(generate=20))
    run = fit(v=2, rollouts=2, data={"engine": engine})
    engine.load_weights(run.module.policy_weights(), 9)
    prompts = [run.data.train_prompts.at(index) for index in range(4)]

    def generate(on_group=None):
        return engine.generate(prompts, 2, run.data.sampling, 0, run.data.tokenizer, on_group)

    yield engine, generate
    engine.close()


class SaveDuring(RolloutCallback):
    """Writes a checkpoint at the first step of a cycle, while the rest of it is being sampled."""

    def __init__(self, path):
        self.path = path
        self.was_sampling = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)
            self.was_sampling = [not trainer.datamodule.engine.state.exhausted]


class TestPool:
    def test_same_as_without_overlap_and_resumed(self, pool, tmp_path):
        """A checkpoint written during a generation contains the weights, with which a resumed run goes on."""
        plain = fit(**CYCLE, data={"engine": pool, "generate_ahead": True})
        saved = SaveDuring(tmp_path / "during.ckpt")
        overlapped = fit(**CYCLE, data=AHEAD | {"engine": pool}, callbacks=[saved, ExactResume()])
        assert_same(plain, overlapped)
        assert saved.was_sampling == [True]
        state = torch.load(saved.path, weights_only=True)["RolloutDataModule"]
        assert state["engine"]["weights"] is not None
        assert len(state["ranks"][0]["schedule"]["queue"]) < 3
        resumed = build(**CYCLE, data=AHEAD | {"engine": pool}, callbacks=[ExactResume()])
        resumed.trainer.fit(resumed.module, datamodule=resumed.data, ckpt_path=str(saved.path))
        assert largest_difference(resumed.weights, plain.weights) == 0
        assert resumed.recorder.lags == [1, 2, 3]

    @pytest.mark.slow("starts a pool")
    def test_a_worker_killed_while_the_trainer_updates(self, pool):
        class Kill(RolloutCallback):
            def on_train_batch_start(self, trainer, *_):
                if trainer.global_step == 0:
                    os.kill(pool._workers.running[0].process.pid, signal.SIGKILL)

        with pytest.warns(UserWarning, match="recovering"):
            run = fit(**CYCLE, data=AHEAD | {"engine": pool}, callbacks=[Kill()])
        assert pool.faults.num_failures == 1
        assert_same(fit(**CYCLE, data={"generate_ahead": True}), run, tolerance=1e-5)

    @pytest.mark.slow("starts a pool")
    def test_a_failed_run_leaves_no_process(self, pool):
        class Fail(RolloutCallback):
            def on_train_batch_start(self, trainer, *_):
                pids.extend(worker.process.pid for worker in pool._workers.running)
                raise RuntimeError("in the first step")

        pids = []
        run = build(**CYCLE, data=AHEAD | {"engine": pool}, callbacks=[Fail()])
        with pytest.raises(RuntimeError, match="in the first step"):
            run.trainer.fit(run.module, datamodule=run.data)
        ((_, future),) = run.data.schedule._queue._pending
        with pytest.raises(EngineError, match="closed during a generation"):
            future.result(timeout=30)
        assert len(pids) == 2
        assert pool._workers.running == []
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.mark.slow("starts vLLM in two processes")
def test_vllm_in_a_pool(monkeypatch):
    """The first rollout is trained on before the others of its cycle are sampled, which recorded times show."""
    pytest.importorskip("vllm")
    engine, stepped, generate = EnginePool(VLLMEngine(max_model_len=32, max_num_seqs=8)), threading.Event(), None

    class Step(RolloutCallback):
        def on_train_batch_end(self, *_):
            stepped.set()

    def generate_slowly(engine, *arguments):
        """Hold all groups but those of the first rollout back until there was an optimizer step."""
        *rest, on_group = arguments
        held = []
        groups = generate(engine, *rest, lambda i, group: held.append((i, group)) if i >= 4 else on_group(i, group))
        assert stepped.wait(120)
        for index, group in held:
            on_group(index, group)
        return groups

    try:
        plain = fit(**CYCLE, data={"engine": engine, "generate_ahead": True})
        generate = EnginePool.generate
        monkeypatch.setattr(EnginePool, "generate", generate_slowly)
        overlapped = fit(**CYCLE, data=AHEAD | {"engine": engine}, callbacks=[Step()])
    finally:
        engine.close()
    assert_same(plain, overlapped, tolerance=1e-4)
    rows = overlapped.logged
    assert rows[0]["time/clock"] < rows[1]["time/sampled_at"]
    assert all(a["time/clock"] >= b["time/sampled_at"] for a, b in zip(plain.logged, plain.logged[1:4], strict=False))


class SaveEveryStep(RolloutCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize(("v", "lead", "ahead"), [(2, 2, False), (1, 1, False), (3, 2, True)])
def test_resumed_from_every_step_with_a_lead(v, lead, ahead, tmp_path):
    """Rollouts that were being sampled are sampled again before the next sync, not after it."""
    settings, data = {"v": v, "rollouts": 6}, {"lead": lead, "generate_ahead": ahead, "overlap": True}
    saved = SaveEveryStep(tmp_path)
    whole = fit(**settings, data=data | {"engine": SlowSteps()}, callbacks=[saved, ExactResume()])
    for step in range(1, 6):
        resumed = build(**settings, data=data, callbacks=[ExactResume()])
        resumed.trainer.fit(resumed.module, datamodule=resumed.data, ckpt_path=str(tmp_path / f"{step}.ckpt"))
        assert resumed.recorder.lags == whole.recorder.lags[step:], step
        assert largest_difference(resumed.weights, whole.weights) == 0, step


def test_a_checkpoint_has_the_weights_that_another_rank_needs(tmp_path, monkeypatch):
    """This rank has sampled its share of the cycle, and the other has not."""
    run = fit(v=4, rollouts=8, data=AHEAD, trainer={"max_steps": 3})
    run.data.schedule._queue.wait()
    run.data.engine.finish_cycle()
    assert run.data.state_dict()["engine"]["weights"] is None
    monkeypatch.setattr("lgrpo.data.datamodule.gather_ranks", lambda _, own: [own, own | {"exhausted": False}])
    state = run.data.state_dict()
    assert state["engine"]["weights"] is not None
    assert not state["engine"]["exhausted"]
    assert run.data.engine.state.exhausted


def test_metrics_of_a_reward_belong_to_their_rollout():
    def task():
        return SortDigits(num_digits=2, num_held_out=20, reward=WeightedSum({"low": LowDigits()}, {"low": 1.0}))

    rows = [fit(**CYCLE, data={"task": task()} | data).logged for data in ({}, AHEAD)]
    for plain, overlapped in zip(*rows, strict=True):
        assert overlapped["reward/low"] == plain["reward/low"] == pytest.approx(plain["rollout/reward"])


class FailsInBackground(TransformersEngine):
    def __init__(self):
        super().__init__()
        self.count = 0

    def sample(self, generation):
        self.count += 1
        if self.count == 3:
            raise EngineError("failed in the background")
        super().sample(generation)


def test_a_checkpoint_after_a_failure_in_the_background(tmp_path):
    class Save(RolloutCallback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                wait([future for _, future in trainer.datamodule.schedule._queue._pending])
                trainer.save_checkpoint(tmp_path / "failed.ckpt")

    run = build(v=4, rollouts=8, data={"overlap": True, "engine": FailsInBackground()}, callbacks=[Save()])
    with pytest.raises(EngineError, match="failed in the background"):
        run.trainer.fit(run.module, datamodule=run.data)
    resumed = build(v=4, rollouts=8, data={"overlap": True})
    resumed.trainer.fit(resumed.module, datamodule=resumed.data, ckpt_path=str(tmp_path / "failed.ckpt"))
    assert largest_difference(resumed.weights, fit(v=4, rollouts=8).weights) == 0


@pytest.mark.slow("starts a pool")
def test_urgent_request_beside_another_one(loaded):
    """A worker that finds both must not wait for the urgent one after a generation has served it."""
    engine, generate = loaded
    names, worker = engine.held_weights().keys(), engine._workers.running[0]
    os.kill(worker.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(generate), threads.submit(engine.held_weights)]
        time.sleep(0.5)
        os.kill(worker.process.pid, signal.SIGCONT)
        groups, weights = (future.result() for future in both)
    assert weights.keys() == names
    assert [[c.token_ids for c in group] for group in generate()] == [[c.token_ids for c in g] for g in groups]
    assert engine.faults.num_failures == 0
    assert engine.held_weights().keys() == names


@pytest.mark.slow("starts a pool")
def test_urgent_request_after_an_interrupted_generation(loaded):
    """The interrupt was for the generation: a worker that is idle again must not end."""
    engine, generate = loaded
    names, worker = engine.held_weights().keys(), engine._workers.running[0]

    def stop(index, group):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(stop)
    engine._workers.call_all("wake", send_timeout=20, answer_timeout=20)  # reads the answer of the interrupted one
    for _ in range(2):
        assert engine.held_weights().keys() == names
    assert worker.is_alive
    assert engine._workers.running == [worker]
