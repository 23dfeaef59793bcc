"""Stop and go on: from every optimizer step of two cycles, the end is the same to the bit."""

from __future__ import annotations

import json
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lgrpo import ClippedLoss, ReferenceRefresh, RolloutCallback, SupervisedWarmStart, ZeroVarianceMask
from lgrpo.advantages import DropNegatives, ExponentiallyWeighted
from lgrpo.callbacks import ExactResume, GracefulInterrupt, RolloutLog
from lgrpo.data import DynamicSampling
from lgrpo.report import read_series
from lgrpo.tasks import SortDigits
from tests.helpers import MODEL, build, fit, largest_difference, tiny_policy

SETTINGS = {"v": 4, "i": 2, "rollouts": 4, "epochs": 2, "learning_rate": 0.02, "optimizer": torch.optim.AdamW}
STEPS = 16


def settings(folder, loss, save=False):
    callbacks = [ZeroVarianceMask(0.2), ExactResume()]
    if loss is not None:
        callbacks.append(ReferenceRefresh(period=2, decay=0.5))
    if save:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = {"accumulate_grad_batches": 2, "enable_checkpointing": save, "default_root_dir": str(folder)}
    return SETTINGS | {"loss": loss, "callbacks": callbacks, "trainer": trainer}


def test_with_moments_of_eight_bits(tmp_path):
    """bitsandbytes' AdamW on a model large enough for it to round: two bytes a parameter, and the same end."""
    optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}

    def run(ckpt_path=None):
        own = settings(tmp_path, None, save=ckpt_path is None) | {"optimizer": optimizer, "epochs": 1}
        return fit(**own, policy=tiny_policy(config=MODEL | sizes), ckpt_path=ckpt_path)

    straight = run()
    state = straight.trainer.optimizers[0].state
    weight = straight.module.policy.model.model.layers[0].mlp.up_proj.weight
    assert {state[weight][name].dtype for name in ("state1", "state2")} == {torch.uint8}
    assert largest_difference(run(tmp_path / "step=3.ckpt").weights, straight.weights) == 0


def timeless(figures):
    """All but how long things took."""
    return {name: value for name, value in figures.items() if not name.startswith("time/")}


@pytest.mark.parametrize("centre", ["one", "proximal"])
def test_from_every_step(tmp_path, centre):
    """With a proximal centre the log-probabilities of the first pass must come along too."""

    def loss():
        return ClippedLoss(0.05, 0.05, centre=centre, kl_coef=0.1)

    straight = fit(**settings(tmp_path, loss(), save=True))
    assert straight.trainer.global_step == STEPS
    optimizer = straight.trainer.optimizers[0].state_dict()["state"]
    for step in range(1, STEPS):
        checkpoint = tmp_path / f"step={step}.ckpt"
        torch.load(checkpoint, weights_only=True)
        run = fit(**settings(tmp_path, loss()), ckpt_path=str(checkpoint))
        assert run.trainer.global_step == STEPS
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
        state = run.trainer.optimizers[0].state_dict()["state"]
        assert all(torch.equal(state[i][name], value) for i in optimizer for name, value in optimizer[i].items())
        assert len(run.logged) == STEPS - step
        for row, expected_row in zip(run.logged, straight.logged[step:], strict=True):
            kept = {name: expected_row[name] for name in row}  # what was logged before the stop stays there
            assert timeless(row) == timeless(kept), f"from step {step}"
        assert run.recorder.lags == straight.recorder.lags[step:], f"from step {step}"
        sampled = run.recorder.rollouts
        expected = straight.recorder.rollouts[len(straight.recorder.rollouts) - len(sampled) :]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(sampled, expected, strict=True))


@pytest.mark.parametrize("advantage", [DropNegatives(), ExponentiallyWeighted(temperature="adaptive")])
def test_with_rollouts_waiting_that_have_no_advantages_yet(tmp_path, advantage):
    """A cycle sampled ahead, groups sampled again: what waits in a checkpoint is compared when its turn comes."""
    data = {"advantage": advantage, "generate_ahead": True, "dynamic_sampling": DynamicSampling(tolerance=0.3)}
    own = settings(tmp_path, ClippedLoss(kl_coef=0.1), save=True) | {"data": data}
    straight = fit(**own)
    assert any(row["rollout/resampled_fraction"] > 0 for row in straight.logged)
    for step in (1, 4, 7):
        again = settings(tmp_path, ClippedLoss(kl_coef=0.1)) | {"data": data}
        run = fit(**again, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
    with pytest.raises(ValueError, match=r"data\.num_prompts was 4, here it is 8: the prompts"):
        fit(**again | {"data": data | {"num_prompts": 8, "group_size": 2}}, ckpt_path=str(tmp_path / "step=4.ckpt"))


def test_no_line_of_a_ledger_is_doubled(tmp_path):
    """Neither by what a lost attempt had written beyond the checkpoint, nor by the line its crash cut short."""

    def lines(name):
        rows = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    def own(save=False):
        given = settings(tmp_path, ClippedLoss(kl_coef=0.1), save)
        return given | {"callbacks": [*given["callbacks"], RolloutLog(every=2, num_groups=2)]}

    fit(**own(save=True))
    straight = {name: lines(name) for name in ("syncs.jsonl", "completions.jsonl")}
    assert [row["version"] for row in straight["syncs.jsonl"]] == [0, 1]
    assert [row["rollout"] for row in straight["completions.jsonl"]] == [0] * 8 + [2] * 8 + [4] * 8 + [6] * 8
    assert [row["version"] for row in straight["completions.jsonl"]] == [0] * 16 + [1] * 16
    for step in (1, 4, 6):
        for name in straight:
            with (tmp_path / name).open("a") as file:
                file.write('{"rollout": 5, "version": 9, "prom')
        fit(**own(), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        for name, expected in straight.items():
            assert lines(name) == expected, f"{name} from step {step}"


class Hit(RolloutCallback):
    """Presses Ctrl-C at a chosen moment of rollout 3, or raises there."""

    def __init__(self, moment, error=None):
        self.moment, self.error = moment, error

    def _hit(self, trainer, moment):
        if moment == self.moment and trainer.global_step // 2 == 3 and not trainer.sanity_checking:
            self.moment = None
            if self.error:
                raise self.error
            os.kill(os.getpid(), signal.SIGINT)

    def on_before_optimizer_step(self, trainer, *args):
        self._hit(trainer, "inside a step")

    def on_rollout_start(self, trainer, *args):
        self._hit(trainer, "between hooks")

    def on_rollout_end(self, trainer, *args):
        self._hit(trainer, "after sampling")

    def on_validation_batch_start(self, trainer, *args):
        self._hit(trainer, "in validation")


@pytest.mark.parametrize("v", [1, 3])
@pytest.mark.parametrize("moment", ["inside a step", "between hooks", "after sampling", "in validation", "an error"])
def test_an_interrupt_or_an_error_loses_nothing(tmp_path, moment, v):
    """Weights and every row of the log are those of a run that nothing happened to."""

    def run(folder, *hits, ckpt_path=None):
        arguments = settings(folder, ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1))
        arguments["v"] = v
        arguments["callbacks"] = [*hits, *arguments["callbacks"], GracefulInterrupt()]
        logger = CSVLogger(str(folder), name="metrics")
        arguments["trainer"] |= {"logger": logger, "log_every_n_steps": 1, "limit_val_batches": 1.0}
        arguments["trainer"] |= {"val_check_interval": 2, "check_val_every_n_epoch": None}
        return fit(**arguments, ckpt_path=ckpt_path)

    straight = run(tmp_path / "straight")
    hit = Hit("after sampling", ValueError("a bad row")) if moment == "an error" else Hit(moment)
    with pytest.raises(ValueError if moment == "an error" else SystemExit):
        run(tmp_path / "broken", hit)
    resumed = run(tmp_path / "broken", ckpt_path=str(tmp_path / "broken" / "checkpoints" / "last.ckpt"))
    assert largest_difference(straight.weights, resumed.weights) == 0
    expected, got = read_series(tmp_path / "straight"), read_series(tmp_path / "broken")
    for name in expected:
        assert got[name] == expected[name] or name.startswith("time/"), name


def test_a_second_fit_starts_afresh():
    """A short trial, then the real run with the same data module: no rollout of the trial is trained on."""
    trial = build(v=3, rollouts=6, trainer={"max_steps": 2})
    trial.trainer.fit(trial.module, datamodule=trial.data)
    real, plain = build(v=3, rollouts=6), fit(v=3, rollouts=6)
    real.trainer.fit(real.module, datamodule=trial.data)
    assert real.recorder.started == plain.recorder.started
    assert largest_difference(real.weights, plain.weights) == 0


def test_a_warm_start_makes_the_scores_before_it_void():
    run = build(
        loss=ClippedLoss(kl_coef=0.1),
        learning_rate=0.0,
        callbacks=[SupervisedWarmStart(num_steps=30, batch_size=32, learning_rate=1e-2)],
        data={"task": SortDigits(num_digits=2, num_held_out=20)},
        trainer={"limit_val_batches": 1.0, "num_sanity_val_steps": 0},
    )
    run.trainer.validate(run.module, datamodule=run.data, verbose=False)
    run.trainer.fit(run.module, datamodule=run.data)
    assert float(run.trainer.callback_metrics["val/pass@1"]) > 0.1
    assert float(run.trainer.callback_metrics["val/pass@1_over_reference"]) == 0


def test_from_inside_gradient_accumulation(tmp_path):
    """The gradients of the first micro-batch are not in a checkpoint: the step is made again from its start."""

    class SaveInside(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5 and batch_idx % 2 == 0:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    arguments = settings(tmp_path, ClippedLoss(kl_coef=0.1))
    straight = fit(**arguments | {"callbacks": [*arguments["callbacks"], SaveInside()]})
    resumed = fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1)), ckpt_path=str(tmp_path / "inside.ckpt"))
    assert resumed.recorder.lags == straight.recorder.lags[5:]
    assert largest_difference(straight.weights, resumed.weights) == 0
