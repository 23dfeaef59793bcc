"""Check that a run resumed from any optimizer step of two cycles ends with bit-identical weights."""

from __future__ import annotations

import json
import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lgrpo import ClippedLoss, ReferenceRefresh, RolloutCallback, SupervisedWarmStart, WeightSync, ZeroVarianceMask
from lgrpo.advantages import DropNegatives, ExponentiallyWeighted, GroupWhitened
from lgrpo.callbacks import ExactResume, GracefulInterrupt, RolloutLog
from lgrpo.data import DynamicSampling
from lgrpo.report import read_series
from lgrpo.run.resume import ResumeError, load_state
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


def test_with_an_eight_bit_optimizer(tmp_path):
    """bitsandbytes' AdamW on a model large enough to be quantised: two bytes of state per parameter."""
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


def test_random_numbers_of_a_training_step(tmp_path):
    """A resumed run draws the same numbers in a step, such as for dropout; each micro-batch draws others."""

    class Draws(L.Callback):
        def __init__(self):
            self.drawn = []

        def on_before_backward(self, *_):
            self.drawn.append(float(torch.rand(())))

    def drawn(ckpt_path=None):
        own = settings(tmp_path, None, save=ckpt_path is None)
        draws = Draws()
        fit(**own | {"epochs": 1, "callbacks": [*own["callbacks"], draws]}, ckpt_path=ckpt_path)
        return draws.drawn

    straight = drawn()
    assert len(straight) == len(set(straight)) == STEPS
    assert drawn(tmp_path / "step=3.ckpt") == straight[6:]


def without_times(metrics):
    """Return the metrics that do not measure time."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "memory/"))}


@pytest.mark.parametrize("centre", ["one", "proximal"])
def test_from_every_step(tmp_path, centre):
    """With a proximal centre, the log-probabilities of the first pass must be in the checkpoint too."""

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
            kept = {name: expected_row[name] for name in row}  # metrics logged before the stop are not logged again
            assert without_times(row) == without_times(kept), f"from step {step}"
        assert run.recorder.lags == straight.recorder.lags[step:], f"from step {step}"
        sampled = run.recorder.rollouts
        expected = straight.recorder.rollouts[len(straight.recorder.rollouts) - len(sampled) :]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(sampled, expected, strict=True))


def test_not_from_a_checkpoint_without_the_optimizer(tmp_path):
    own = settings(tmp_path, ClippedLoss(kl_coef=0.1)) | {"rollouts": 1, "epochs": 1}
    own["callbacks"].append(ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True))
    own["trainer"] |= {"enable_checkpointing": True}
    fit(**own)
    with pytest.raises(ResumeError, match=r"holds weights only .*lgrpo export"):
        fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1)), ckpt_path=str(tmp_path / "weights.ckpt"))


def test_the_optimizer_of_a_sharded_checkpoint_is_in_other_files(tmp_path):
    """Lightning takes ``optimizer_states`` out of the part of it that the module sees."""
    fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1), save=True) | {"rollouts": 1, "epochs": 1})
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    del checkpoint["optimizer_states"]
    assert load_state(checkpoint, {})["settings"]


def test_across_changes_of_v_and_of_the_clip(tmp_path):
    own = {"v": {0: 1, 2: 3}, "data": {"generate_ahead": True}}

    def loss():
        return ClippedLoss(0.05, {0: 0.01, 3: 0.5}, kl_coef=0.1)

    straight = fit(**settings(tmp_path, loss(), save=True) | own)
    constant = fit(**settings(tmp_path, ClippedLoss(0.05, 0.01, kl_coef=0.1)) | own)
    assert largest_difference(straight.weights, constant.weights) > 0, "the clip has an effect"
    for step in range(1, STEPS):
        run = fit(**settings(tmp_path, loss()) | own, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
        assert run.recorder.lags == straight.recorder.lags[step:], f"from step {step}"


@pytest.mark.parametrize("advantage", [DropNegatives(), ExponentiallyWeighted(temperature="adaptive")])
def test_with_sampled_rollouts_that_have_no_advantages_yet(tmp_path, advantage):
    """Rollouts sampled ahead are stored without advantages, which are computed when they are trained on."""
    data = {"advantage": advantage, "generate_ahead": True, "dynamic_sampling": DynamicSampling(tolerance=0.3)}
    own = settings(tmp_path, ClippedLoss(kl_coef=0.1), save=True) | {"data": data}
    straight = fit(**own)
    assert any(row["rollout/resampled_fraction"] > 0 for row in straight.logged)
    for step in (1, 4, 7):
        again = settings(tmp_path, ClippedLoss(kl_coef=0.1)) | {"data": data}
        run = fit(**again, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
    with pytest.raises(ValueError, match=r"data\.num_prompts was 4 and is now 8: the run would continue"):
        fit(**again | {"data": data | {"num_prompts": 8, "group_size": 2}}, ckpt_path=str(tmp_path / "step=4.ckpt"))


def test_inside_a_rollout_that_has_become_too_old(tmp_path):
    """The second pass over a rollout leaves out what the first one trained on; its pieces stay the same."""
    own = {"data": {"max_lag": 2}, "v": 2}
    straight = fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1), save=True) | own)
    assert [row["train/step_skipped"] for row in straight.logged[:8]] == [0, 0, 0, 1] * 2
    for step in range(1, 8):
        run = fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1)) | own, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"


def test_other_settings_are_reported(tmp_path):
    """Settings that change the run, but not what the checkpoint holds."""
    data = {"overlap": True, "lead": 1}
    own = {"rollouts": 3, "data": data, "trainer": {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}}

    def run(in_flight, advantage, **more):
        callbacks = [ExactResume(), WeightSync(1, in_flight=in_flight)]
        if not more:
            callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        fit(**own | {"data": data | {"advantage": advantage}}, v=0, callbacks=callbacks, **more)

    run(False, GroupWhitened())
    with pytest.warns(UserWarning, match="the checkpoint was written with other settings") as found:
        run(True, DropNegatives(), ckpt_path=str(tmp_path / "step=1.ckpt"))
    (message,) = [str(w.message) for w in found if "other settings" in str(w.message)]
    assert "in_flight" in message
    assert "data.advantage was" in message


def saved_at(folder, moment):
    """Return a ModelCheckpoint that writes ``last.ckpt`` at the end of each epoch, or at each step."""
    every = {"every_n_train_steps": 1} if moment == "step" else {"every_n_epochs": 1}
    return ModelCheckpoint(folder, save_last=True, save_top_k=0, enable_version_counter=False, **every)


@pytest.mark.parametrize("limit", ["epochs", "steps"])
@pytest.mark.parametrize("moment", ["step", "epoch end", "after fit"])
def test_several_resumes_across_epochs(tmp_path, moment, limit):
    """Each attempt adds as many steps as it should, counts its epochs, and the last one ends like one run."""

    def run(epochs, callbacks=(), ckpt_path=None):
        given = {"max_epochs": epochs} if limit == "epochs" else {"max_epochs": -1, "max_steps": 4 * epochs}
        trainer = given | {"accumulate_grad_batches": 2, "default_root_dir": str(tmp_path)}
        return fit(
            **SETTINGS | {"rollouts": 2},
            callbacks=[ExactResume(), *callbacks],
            trainer=trainer | {"enable_checkpointing": bool(callbacks)},
            ckpt_path=ckpt_path,
        )

    straight = run(4)
    last = tmp_path / "last.ckpt"
    for epochs in (1, 2, 3, 4):
        attempt = run(
            epochs,
            [] if moment == "after fit" else [saved_at(tmp_path, moment)],
            str(last) if epochs > 1 else None,
        )
        if moment == "after fit":
            attempt.trainer.save_checkpoint(last)
        assert attempt.trainer.global_step == 4 * epochs
        assert attempt.trainer.fit_loop.epoch_progress.current.started == epochs
    assert largest_difference(straight.weights, attempt.weights) == 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("first", "second"), [(2, 3), (2, 4), (2, 6), (4, 6), (4, 7), (5, 6), (5, 7)])
def test_two_resumes_with_the_same_number_of_epochs(tmp_path, first, second):
    def run(folder, ckpt_path=None):
        callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1), ExactResume()]
        trainer = {"default_root_dir": str(folder), "enable_checkpointing": True}
        return fit(v=3, rollouts=2, epochs=4, callbacks=callbacks, trainer=trainer, ckpt_path=ckpt_path)

    straight = run(tmp_path / "straight")
    run(tmp_path / "again", str(tmp_path / "straight" / f"step={first}.ckpt"))
    twice = run(tmp_path / "twice", str(tmp_path / "again" / f"step={second}.ckpt"))
    assert twice.trainer.global_step == straight.trainer.global_step == 8
    assert largest_difference(straight.weights, twice.weights) == 0


def test_no_line_of_a_log_file_is_written_twice(tmp_path):
    """Lines written after the checkpoint, and a line cut short by a crash, are removed on resume."""

    def lines(name):
        rows = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    def own(save=False):
        given = settings(tmp_path, ClippedLoss(kl_coef=0.1), save)
        return given | {"callbacks": [*given["callbacks"], RolloutLog(every=2, num_groups=2)]}

    fit(**own(save=True))
    straight = {name: lines(name) for name in ("syncs.jsonl", "completions.jsonl")}
    assert [row["version"] for row in straight["syncs.jsonl"]] == [0, 1]
    assert [row["rollout"] for row in straight["completions.jsonl"]] == [0] * 8 + [3] * 8 + [4] * 8 + [7] * 8
    assert [row["version"] for row in straight["completions.jsonl"]] == [0] * 16 + [1] * 16
    for step in (1, 4, 6):
        for name in straight:
            with (tmp_path / name).open("a") as file:
                file.write('{"rollout": 5, "version": 9, "prom')
        fit(**own(), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        for name, expected in straight.items():
            assert lines(name) == expected, f"{name} from step {step}"


class Hit(RolloutCallback):
    """Send SIGINT, or raise an error, at a chosen moment of rollout 3."""

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
    """Weights and every logged row equal those of an uninterrupted run."""

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
        assert got[name] == expected[name] or name.startswith(("time/", "memory/")), name


class StopInValidation(L.Callback):
    """Send SIGINT in the validation after a step."""

    def __init__(self, step):
        self.step = step

    def on_validation_batch_start(self, trainer, *args):
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGINT)


def test_stopped_twice_in_the_validation_at_the_end_of_an_epoch(tmp_path):
    """The resumed run validates first; a checkpoint saved then must not count the next epoch as begun."""

    def run(folder, *stops, ckpt_path=None):
        arguments = settings(folder, None) | {"rollouts": 2, "epochs": 4}
        arguments["callbacks"] = [*stops, *arguments["callbacks"], GracefulInterrupt()]
        arguments["trainer"] |= {"limit_val_batches": 1.0}
        return fit(**arguments, ckpt_path=ckpt_path)

    straight = run(tmp_path / "straight")
    last = str(tmp_path / "broken" / "checkpoints" / "last.ckpt")
    for ckpt_path in (None, last, last):
        with pytest.raises(SystemExit):
            run(tmp_path / "broken", StopInValidation(4), ckpt_path=ckpt_path)
    resumed = run(tmp_path / "broken", ckpt_path=last)
    assert resumed.trainer.global_step == straight.trainer.global_step == 16
    assert largest_difference(straight.weights, resumed.weights) == 0


def test_a_second_fit_starts_from_scratch():
    """Rollouts of a first, short fit are not trained on by a second fit with the same data module."""
    trial = build(v=3, rollouts=6, trainer={"max_steps": 2})
    trial.trainer.fit(trial.module, datamodule=trial.data)
    real, plain = build(v=3, rollouts=6), fit(v=3, rollouts=6)
    real.trainer.fit(real.module, datamodule=trial.data)
    assert real.recorder.started == plain.recorder.started
    assert largest_difference(real.weights, plain.weights) == 0


def test_a_warm_start_discards_earlier_scores():
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
    """A checkpoint holds no accumulated gradients, so the step is repeated from its first micro-batch."""

    class SaveInside(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5 and batch_idx % 2 == 0:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    arguments = settings(tmp_path, ClippedLoss(kl_coef=0.1))
    straight = fit(**arguments | {"callbacks": [*arguments["callbacks"], SaveInside()]})
    resumed = fit(**settings(tmp_path, ClippedLoss(kl_coef=0.1)), ckpt_path=str(tmp_path / "inside.ckpt"))
    assert resumed.recorder.lags == straight.recorder.lags[5:]
    assert largest_difference(straight.weights, resumed.weights) == 0
