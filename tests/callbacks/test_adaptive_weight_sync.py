"""Check AdaptiveWeightSync: when it syncs, what it logs, and bit-exact resume."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lgrpo import AdaptiveWeightSync, ClippedLoss, ReferenceRefresh, RolloutCallback, WeightSync, ZeroVarianceMask
from lgrpo.callbacks import ExactResume
from lgrpo.engines import TransformersEngine
from lgrpo.report import read_series
from tests.helpers import build, fit, largest_difference

SETTINGS = {"v": 0, "i": 2, "rollouts": 8, "learning_rate": 0.2}


def adaptive(sync, folder=None, callbacks=(), **settings):
    trainer = settings.pop("trainer", {})
    if folder is not None:
        trainer |= {"default_root_dir": str(folder), "logger": CSVLogger(str(folder), name="metrics")}
    return fit(**SETTINGS | settings, callbacks=[sync, *callbacks], trainer=trainer)


def synced_before(run):
    """Return the rollouts before which the engine was synced."""
    return [record.step // run.data.reuse for record in run.data.engine.state.ledger]


def test_a_budget_never_reached_and_one_always_reached():
    assert synced_before(adaptive(AdaptiveWeightSync(budget=1e6))) == [0]
    assert synced_before(adaptive(AdaptiveWeightSync(budget=1e6, maximum=3))) == [0, 3, 6]
    assert synced_before(adaptive(AdaptiveWeightSync(budget=1e-9))) == list(range(8))
    assert synced_before(adaptive(AdaptiveWeightSync(budget=1e-9, minimum=3))) == [0, 3, 6]


@pytest.mark.parametrize(("budget", "maximum", "v"), [(1e-9, 50, 1), (1e6, 3, 3)])
def test_it_equals_weight_sync_with_the_same_syncs(budget, maximum, v):
    """The measurements do not change weights or completions by a bit."""
    measured = adaptive(AdaptiveWeightSync(budget=budget, maximum=maximum))
    fixed = fit(**SETTINGS | {"v": v})
    assert largest_difference(measured.weights, fixed.weights) == 0
    assert measured.recorder.lags == fixed.recorder.lags
    for a, b in zip(measured.recorder.rollouts, fixed.recorder.rollouts, strict=True):
        assert torch.equal(a.tokens, b.tokens)


class Divergence(RolloutCallback):
    """Measures √(KL/2), 1 - ESS and the clip fraction on the previous rollout, before each rollout."""

    def __init__(self):
        self.rows = {}

    def on_rollout_start(self, trainer, pl_module, rollout):
        batch = trainer.datamodule.rollout
        if batch is None:
            return
        log_ratio = (pl_module.policy_logprobs(batch) - batch.behaviour_logprobs).double() * batch.completion_mask
        completion = log_ratio.sum(1)
        w = completion.exp()
        advantage = batch.advantages * batch.completion_mask
        clipped = ((advantage > 0) & (log_ratio.exp() > 1.2)) | ((advantage < 0) & (log_ratio.exp() < 0.8))
        self.rows[trainer.global_step] = {
            "tv": float(((w - 1 - completion).mean() / 2).sqrt()),
            "effective_sample_size": 1 - float(w.sum() ** 2 / (w**2).sum() / len(w)),
            "clip_fraction": float(clipped.sum() / (advantage != 0).sum()),
        }


@pytest.mark.parametrize(
    ("criterion", "budget"), [("tv", 0.4), ("effective_sample_size", 0.3), ("clip_fraction", 0.45)]
)
def test_it_syncs_when_the_budget_is_reached(tmp_path, criterion, budget):
    """Compare with an independent measurement, the ledger and the logged metrics."""
    watch = Divergence()
    sync = AdaptiveWeightSync(criterion=criterion, budget=budget, hysteresis=0.0)
    run = adaptive(sync, tmp_path, [watch])
    expected = [0] + [step // 2 for step, row in sorted(watch.rows.items()) if row[criterion] >= budget]
    assert synced_before(run) == expected
    assert 2 < len(expected) < 8
    logged = read_series(tmp_path)["sync/divergence"]
    assert [step for step, _ in logged] == sorted(watch.rows)
    for step, value in logged:
        assert value == pytest.approx(watch.rows[step][criterion], rel=1e-4, abs=1e-6)
    ledger = [json.loads(line) for line in (tmp_path / "syncs.jsonl").read_text().splitlines()]
    assert [line["rollout"] for line in ledger] == expected
    assert [line["version"] for line in ledger] == list(range(len(expected)))
    assert ledger[0]["reason"] == "first"
    assert all(line["reason"] == "budget" and line["divergence"] >= budget for line in ledger[1:])
    # the lag of every completion is counted from the sync of its weights
    last = [max(k for k in expected if k <= rollout) for rollout in range(8)]
    assert run.recorder.lags == [2 * (k - last[k]) + p for k in range(8) for p in range(2)]


def test_hysteresis(monkeypatch):
    """A sync needs two consecutive measurements at the budget, or one well above it."""
    values = [0.9, 1.05, 0.9, 1.05, 1.0, 1.05, 1.3, 0.2]
    measured = iter(values)
    monkeypatch.setattr(AdaptiveWeightSync, "_measure", lambda self, trainer: next(measured))
    run = adaptive(AdaptiveWeightSync(budget=1.0, hysteresis=0.2), rollouts=9)
    assert synced_before(run) == [0, 5, 7]  # 1.05 then 1.0 before rollout 5; after it, 1.3 suffices alone


def test_resume_from_every_step(tmp_path):
    """Also inside a cycle, and after a measurement just above the budget."""

    def arguments(save=False):
        callbacks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2, decay=0.5), ExactResume()]
        if save:
            callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        trainer = {"accumulate_grad_batches": 2, "enable_checkpointing": save, "default_root_dir": str(tmp_path)}
        loss = ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1)
        sync = AdaptiveWeightSync(budget=0.3, hysteresis=0.5, maximum=4)
        return SETTINGS | {"rollouts": 6, "loss": loss, "callbacks": [sync, *callbacks], "trainer": trainer}

    straight = fit(**arguments(save=True))
    syncs = synced_before(straight)
    assert len(syncs) >= 3
    assert syncs != list(range(6))
    was_above = []
    for step in (1, 2, 3, 5, 6, 8, 11):
        checkpoint = tmp_path / f"step={step}.ckpt"
        (state,) = [v for k, v in torch.load(checkpoint, weights_only=True)["callbacks"].items() if "Adaptive" in k]
        was_above.append(state["was_above"])
        run = fit(**arguments(), ckpt_path=str(checkpoint))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
        assert run.recorder.lags == straight.recorder.lags[step:], f"from step {step}"
        assert synced_before(run) == syncs, f"from step {step}"
    assert any(was_above)


def test_with_a_lead():
    """The newest rollout that the engine's weights sampled is measured, not the one being trained on."""
    run = adaptive(AdaptiveWeightSync(budget=1e-9), data={"lead": 2})
    assert [start for start, _ in run.recorder.started] == list(range(8))
    assert [record.step for record in run.data.engine.state.ledger] == [0, 2, 4, 6, 8, 10]
    assert run.recorder.lags[6:] == [4, 5] * 5  # two rollouts of two steps each, and the pass


def test_one_rollout_at_a_time():
    """``generate_ahead`` has no effect, because the length of a cycle is not known."""

    class Counting(RolloutCallback):
        def __init__(self):
            self.waiting = []

        def on_rollout_end(self, trainer, pl_module, batch):
            self.waiting.append([other.rollout for other in trainer.datamodule.schedule.ready()])

    counting = Counting()
    adaptive(AdaptiveWeightSync(budget=0.4), callbacks=[counting], data={"generate_ahead": True})
    assert counting.waiting == [[k] for k in range(8)]


def test_a_second_fit_starts_from_the_beginning():
    sync, engine = AdaptiveWeightSync(budget=0.3), TransformersEngine()
    first = adaptive(sync, data={"engine": engine})
    again = adaptive(sync)
    assert synced_before(first) == synced_before(again)
    assert largest_difference(first.weights, again.weights) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"criterion": "kl"}, "criterion is 'kl'; it must be one of tv, effective_sample_size, clip_fraction"),
        ({"budget": 0.0}, r"budget is 0\.0; it must be above 0"),
        ({"criterion": "clip_fraction", "budget": 1.5}, "it must be above 0 and below 1: clip_fraction is a share"),
        ({"hysteresis": -0.1}, "hysteresis is -0.1"),
        ({"minimum": 5, "maximum": 4}, "maximum is 4; it must be at least 5"),
        ({"minimum": 0}, "minimum is 0"),
        ({"clip_low": 2.0}, "clip_low is 2.0"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveWeightSync(**settings)


def test_settings_that_exclude_each_other():
    with pytest.raises(ValueError, match=r"its length is not known in advance\. Use 'engine'"):
        adaptive(AdaptiveWeightSync(), data={"behaviour_logprobs": "policy"})
    with pytest.raises(ValueError, match=r"reads advantages, which rollouts sampled ahead \(data\.lead\)"):
        adaptive(AdaptiveWeightSync(criterion="clip_fraction"), data={"lead": 1})
    run = build(v=2, callbacks=[AdaptiveWeightSync()])
    with pytest.raises(ValueError, match=r"WeightSync\(period=2\), AdaptiveWeightSync\(criterion=tv, budget=0\.25\)"):
        run.trainer.fit(run.module, datamodule=run.data)
    assert str(WeightSync(None)) == "WeightSync(period=None)"
