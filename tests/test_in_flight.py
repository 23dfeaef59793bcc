"""Syncs in flight: a generation stops for a sync, continues with the new weights, and loses nothing."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from lgrpo import RolloutCallback, Sampling, TransformersEngine, WeightSync
from lgrpo.callbacks import ExactResume
from lgrpo.data.dynamic import DynamicSampling
from lgrpo.data.partial import PartialRollouts
from lgrpo.engines import EngineError, EnginePool, VLLMEngine
from tests.helpers import build, fit, largest_difference
from tests.test_overlap import SaveEveryStep, SlowSteps
from tests.test_partial import CannotContinue, Weights, by_position, check_probabilities, spans_of

LONG = Sampling(max_tokens=16)
ROLLOUTS = 7


class WaitsForSyncs(TransformersEngine):
    """Decodes three tokens of a rollout, and then waits for a sync, if one is due before the rollout is needed."""

    def __init__(self, v, lead):
        super().__init__(max_sequences=64)
        self._v, self._lead = v, lead
        self._steps = 0
        self._waits = False
        self.is_waiting = threading.Event()

    def waits_in(self, rollout):
        return rollout >= 0 and rollout % self._v == 0 and rollout + self._lead < ROLLOUTS

    def sample(self, generation):
        rollout = generation.prompts[0].position // 4
        self._waits = self.waits_in(rollout) and not generation.begun
        self._steps, self._current = 0, generation
        super().sample(generation)

    def _between_steps(self):
        super()._between_steps()
        self._steps += 1
        if self._steps == 3 and self._waits:
            self.is_waiting.set()
            for _ in range(12000):
                if self._current.is_stopped:
                    break
                time.sleep(0.01)


class SyncsInTheMiddle(RolloutCallback):
    """Lets a sync begin when the engine waits for it."""

    order = -1

    def on_rollout_start(self, trainer, pl_module, rollout):
        data = trainer.datamodule
        engine = data.engine
        if isinstance(engine, WaitsForSyncs) and engine.waits_in(rollout - data.lead):
            assert engine.is_waiting.wait(120)
            engine.is_waiting.clear()


def in_flight(v=1, lead=1, data=None, callbacks=(), **settings):
    """Train with syncs in flight; with the default engine every sync but the first finds a generation."""
    data = {"overlap": True, "lead": lead, "sampling": LONG, "engine": WaitsForSyncs(v, lead)} | (data or {})
    callbacks = [SyncsInTheMiddle(), WeightSync(v, in_flight=True), *callbacks]
    return fit(v=0, rollouts=ROLLOUTS, data=data, callbacks=callbacks, **settings)


@pytest.mark.parametrize(("v", "lead"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_each_token_has_the_probability_under_the_weights_of_its_step(v, lead):
    kept = Weights()
    run = in_flight(v, lead, callbacks=[kept], learning_rate=0.5)
    assert [batch.rollout for batch in run.recorder.rollouts] == list(range(ROLLOUTS))
    assert any(len(spans) > 1 for spans in spans_of(run)), "no completion was continued"
    check_probabilities(run, kept)
    for batch in run.recorder.rollouts:
        lag = batch.token_lag(batch.rollout)[batch.completion_mask]
        assert 0 <= int(lag.min()) <= int(lag.max()) <= lead + v - 1
    logged = [row["rollout/continued_fraction"] for row in run.logged]
    assert max(logged) > 0.5


@pytest.mark.parametrize("more", [{}, {"dynamic_sampling": DynamicSampling(max_rounds=2, tolerance=0.2)}])
def test_same_completions_if_the_weights_stay(more):
    plain = fit(v=1, rollouts=ROLLOUTS, learning_rate=0.0, data={"lead": 1, "sampling": LONG} | more)
    run = in_flight(learning_rate=0.0, data=more)
    assert any(len(spans) > 1 for spans in spans_of(run))
    ours, theirs = by_position(run), by_position(plain)
    assert ours.keys() == theirs.keys()
    for position, group in ours.items():
        for (tokens, logprobs), (others, their) in zip(group, theirs[position], strict=True):
            assert tokens == others
            assert torch.allclose(logprobs, their, atol=1e-5)


def test_a_sync_that_finds_no_generation_changes_nothing():
    """With v = 1 and a lead of 1, the rollout that a sync may interrupt is already sampled if the trainer is slow."""

    class Late(RolloutCallback):
        order = -1

        def on_rollout_start(self, trainer, *_):
            trainer.datamodule.schedule.wait()

    plain = fit(v=1, rollouts=ROLLOUTS, data={"lead": 1})
    run = in_flight(data={"engine": TransformersEngine(), "sampling": Sampling(max_tokens=6)}, callbacks=[Late()])
    assert largest_difference(plain.weights, run.weights) == 0


def test_resumed_from_every_step(tmp_path):
    """Rollouts that were not complete are sampled again: no prompt is lost or trained on twice."""
    whole = in_flight(callbacks=[SaveEveryStep(tmp_path), ExactResume()], learning_rate=0.5)
    positions = [batch.positions.tolist() for batch in whole.recorder.rollouts]
    kept = Weights()
    for step in range(1, ROLLOUTS):
        again = in_flight(
            callbacks=[ExactResume(), kept],
            learning_rate=0.5,
            ckpt_path=str(tmp_path / f"{step}.ckpt"),
        )
        assert [batch.positions.tolist() for batch in again.recorder.rollouts] == positions[step:]
        for batch in again.recorder.rollouts:
            assert int(batch.token_lag(batch.rollout)[batch.completion_mask].max()) <= 1


def test_an_error_in_a_sync_ends_the_run():
    class Broken(WaitsForSyncs):
        def replace_weights(self, weights, step, version):
            if version == 3:
                raise EngineError("the third sync failed")
            return super().replace_weights(weights, step, version)

    data = {"overlap": True, "lead": 1, "sampling": LONG, "engine": Broken(1, 1)}
    run = build(v=0, rollouts=ROLLOUTS, data=data, callbacks=[SyncsInTheMiddle(), WeightSync(1, in_flight=True)])
    with pytest.raises(EngineError, match="the third sync failed"):
        run.trainer.fit(run.module, datamodule=run.data)
    _, interrupted = run.data.schedule._queue._pending[-1]  # earlier ones may be complete
    assert isinstance(interrupted.exception(timeout=30), RuntimeError)


@pytest.mark.slow("starts a pool")
def test_pool_with_a_worker_killed():
    pool = EnginePool(SlowSteps(), num_processes=2)

    class Kill(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 3:
                os.kill(pool._workers.running[0].process.pid, signal.SIGKILL)

    kept = Weights()
    try:
        with pytest.warns(UserWarning, match="recovering"):
            run = in_flight(data={"engine": pool}, lead=2, callbacks=[Kill(), kept])
    finally:
        pool.close()
    assert {int(position) for batch in run.recorder.rollouts for position in batch.positions} == set(
        range(ROLLOUTS * 4)
    )
    assert any(len(spans) > 1 for spans in spans_of(run))
    check_probabilities(run, kept)


class SlowVLLM(VLLMEngine):
    """vLLM that takes a while for each token."""

    def _answer(self, requests, seed):
        serve = self.on_step

        def slow_step():
            time.sleep(0.1)
            serve()

        self.on_step = slow_step
        try:
            super()._answer(requests, seed)
        finally:
            self.on_step = serve


class LateSyncs(RolloutCallback):
    """Lets the next rollout begin, which takes a second or more, before a step and its sync."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.4)


@pytest.mark.slow("starts vLLM in two processes")
def test_vllm_in_a_pool():
    pytest.importorskip("vllm")
    kept, engine = Weights(), EnginePool(SlowVLLM(max_model_len=32, max_num_seqs=8))
    try:
        run = in_flight(lead=2, data={"engine": engine}, callbacks=[kept, LateSyncs()], learning_rate=0.5)
    finally:
        engine.close()
    assert any(len(spans) > 1 for spans in spans_of(run))
    check_probabilities(run, kept)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"engine": EnginePool(VLLMEngine()), "overlap": False}, "nothing is being sampled when a sync is due"),
        ({"lead": 0}, "data.lead 0 nothing is being sampled"),
        ({"partial": PartialRollouts()}, "weight_sync.in_flight and data.partial are both set"),
    ],
)
def test_rejected(data, message):
    with pytest.raises(ValueError, match=message):
        in_flight(data={"engine": TransformersEngine()} | data)


def test_an_engine_that_cannot_continue():
    with pytest.raises(ValueError, match="CannotContinue cannot continue completions from their tokens"):
        in_flight(data={"engine": CannotContinue()})
