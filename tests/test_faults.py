"""Check that a run survives non-finite numbers, full disks, failing loggers, signals and changed settings."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy

from lgrpo import (
    ClippedLoss,
    LoRA,
    ReferenceRefresh,
    RolloutCallback,
    TransformersEngine,
    WeightSync,
    ZeroVarianceMask,
)
from lgrpo.callbacks import AdaptiveWeightSync, ExactResume, FiniteSteps, GracefulInterrupt
from lgrpo.callbacks.finite_steps import NonFiniteError
from lgrpo.cli import main
from lgrpo.commands import RESUMABLE
from lgrpo.commands.hf_folder import read_checkpoint
from lgrpo.data import DynamicSampling
from lgrpo.engines import EngineError, WeightSyncError
from lgrpo.report import read_series
from lgrpo.report.series import read_metrics
from lgrpo.rewards import Reward
from lgrpo.run.checkpoints import PART, is_complete, newest_checkpoint, remove_partial
from lgrpo.run.resume import ResumeError
from lgrpo.tasks import SortDigits
from lgrpo.types import RolloutBatch
from tests.helpers import MODEL, build, fit, largest_difference, tiny_policy
from tests.processes.alive import until_all_ended
from tests.processes.two_shards import adapted, clipped, make

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = [
    f"--config={TINY}",
    "--data.num_rollouts=30",
    "--trainer.max_epochs=1",
    "--data.evaluation.num_problems=8",
    "--data.evaluation.num_samples=2",
    "--trainer.num_sanity_val_steps=0",
]
SHORT = [*SMALL, "--trainer.enable_progress_bar=false", "--data.num_rollouts=2"]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Return the folder of a run of two steps. Tests change a copy of it."""
    folder = tmp_path_factory.mktemp("short") / "run"
    main(["fit", *SHORT, f"--run={folder}"])
    return folder


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.slow("starts eight attempts at a run"))])
def test_killed_at_every_kind_of_moment(kills):
    """A shorter ``make chaos``. It runs in a separate process because it forks, and threads do not survive a fork."""
    options = ["--engine", "embedded", "--kills", str(kills), "--per-trial", "6", "--seed", "21"]
    command = [sys.executable, "-m", "tests.stress.chaos", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical results" in done.stdout
    assert int(done.stdout.split("killed ")[1].split()[0]) >= kills - 1


class Poison(L.Callback):
    """Set a gradient to NaN or infinity at chosen steps."""

    def __init__(self, steps, value=float("nan")):
        self.steps, self.value = steps, value

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            next(pl_module.policy.parameters()).grad[0, 0] = self.value


class TestNonFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_step_is_skipped_counted_and_its_batch_kept(self, tmp_path, value):
        callbacks = [Poison({2}, value), FiniteSteps()]
        options = {"optimizer": torch.optim.AdamW, "rollouts": 2, "epochs": 1, "i": 2}
        run = build(
            **options, callbacks=callbacks, trainer={"accumulate_grad_batches": 2, "default_root_dir": tmp_path}
        )
        weights = []

        class Look(L.Callback):
            def on_train_batch_end(self, trainer, *args):
                weights.append({name: p.detach().clone() for name, p in run.module.policy.named_parameters()})

        run.trainer.callbacks.append(Look())
        with pytest.warns(UserWarning, match=r"step 2 is skipped: its gradient is not finite, its batch is in"):
            run.trainer.fit(run.module, datamodule=run.data)
        by_step = weights[1::2]
        assert [row.get("fault/nonfinite_steps", 0.0) for row in run.logged][2] == 1.0
        norms = [row["train/grad_norm"] for row in run.logged]
        assert repr(norms[2]) == repr(value)
        assert all(0 < norm < float("inf") for norm in norms[:2] + norms[3:])
        assert largest_difference(by_step[1], by_step[2]) == 0
        assert largest_difference(by_step[2], by_step[3]) > 0
        momentum = run.trainer.optimizers[0].state_dict()["state"][0]
        assert momentum["step"] == 3  # of four
        kept = torch.load(tmp_path / "nonfinite" / "step-2-rank-0.pt", weights_only=True)
        batches = [RolloutBatch.from_state_dict(state) for state in kept["batches"]]
        assert kept["step"] == 2
        assert sum(len(batch) for batch in batches) == 16

    def test_too_many_in_a_row_end_the_run(self, tmp_path):
        callbacks = [Poison({1, 2, 4, 5, 6}), FiniteSteps(patience=3, keep=1)]
        run = build(rollouts=10, callbacks=callbacks, trainer={"default_root_dir": tmp_path})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(NonFiniteError, match="3 steps in a row"):
                run.trainer.fit(run.module, datamodule=run.data)
        assert run.trainer.global_step == 6
        assert len(list((tmp_path / "nonfinite").iterdir())) == 1
        assert all(bool(p.isfinite().all()) for p in run.module.policy.parameters())

    def test_a_run_without_any_is_untouched(self):
        plain, guarded = fit(rollouts=3), fit(rollouts=3, callbacks=[FiniteSteps()])
        assert largest_difference(plain.weights, guarded.weights) == 0


def settings(folder, *, save=False, **changes):
    own = {"v": 4, "i": 2, "rollouts": 8, "loss": ClippedLoss(kl_coef=0.1)} | changes
    callbacks = [ReferenceRefresh(period=2), ExactResume()]
    if save:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = {"default_root_dir": str(folder), "enable_checkpointing": save} | own.pop("trainer", {})
    return own | {"callbacks": callbacks, "trainer": trainer}


class TestChangedSettings:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("run")
        fit(**settings(folder, save=True))
        return folder

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"i": 3}, r"data\.reuse was 2 and is now 3: .* rollouts would be skipped or repeated"),
            ({"data": {"num_prompts": 8}}, r"data\.num_prompts was 4 and is now 8"),
            ({"data": {"group_size": 2}}, r"data\.group_size was 4 and is now 2"),
            ({"data": {"lead": 1}}, r"data\.lead was 0 and is now 1"),
            ({"data": {"task": SortDigits(num_digits=3, num_held_out=20)}}, r"data\.prompts was 80 prompts, "),
        ],
    )
    def test_refused_if_the_run_would_be_wrong(self, folder, changes, message):
        with pytest.raises(ResumeError, match=message):
            fit(**settings(folder, **changes), ckpt_path=str(folder / "step=5.ckpt"))

    def test_another_number_of_processes(self, folder, tmp_path):
        state = torch.load(folder / "step=5.ckpt", weights_only=True)
        state["grpo"]["settings"]["world size"] = 2
        torch.save(state, tmp_path / "of-two.ckpt")
        with pytest.raises(ResumeError, match="world size was 2 and is now 1: a partly trained rollout"):
            fit(**settings(folder), ckpt_path=str(tmp_path / "of-two.ckpt"))

    def test_another_model(self, folder):
        policy = tiny_policy(config=MODEL | {"hidden_size": 16})
        with pytest.raises(ResumeError, match=r"model was \{'hidden_size': 32\} and is now \{'hidden_size': 16\}"):
            fit(**settings(folder, policy=policy), ckpt_path=str(folder / "step=5.ckpt"))
        policy = tiny_policy(characters="9876543210>")
        with pytest.raises(ResumeError, match="tokenizer was"):
            fit(**settings(folder, policy=policy), ckpt_path=str(folder / "step=5.ckpt"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"v": 3}, r"weight_sync was \{'period': 4\} and is now \{'period': 3\}: from the next sync on"),
            ({"seed": 7}, r"data\.seed was 0 and is now 7: prompts and completions from here on"),
            ({"loss": ClippedLoss(kl_coef=0.2)}, "loss was .*0.1.*: steps from here on"),
            ({"learning_rate": 0.5}, r"the optimizer keeps its settings from the checkpoint: lr 0\.01 \(not 0\.5\)"),
        ],
    )
    def test_warned_about_if_the_run_only_changes(self, folder, changes, message):
        with pytest.warns(UserWarning, match=message):
            run = fit(**settings(folder, **changes), ckpt_path=str(folder / "step=5.ckpt"))
        assert run.trainer.global_step == 16

    @pytest.mark.parametrize(("v", "syncs"), [(3, [0, 0, 6, 12]), (6, [0, 8, 12])])
    def test_a_changed_v_takes_effect_when_the_current_weights_are_exhausted(self, folder, v, syncs):
        """v = 4 syncs before rollout 4. v = 6 would not, but the engine no longer holds weights then."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = fit(**settings(folder, v=v), ckpt_path=str(folder / "step=5.ckpt"))
        assert sorted({0, *(record.step for record in run.data.engine.state.ledger)}) == sorted(set(syncs))

    def test_other_micro_batches_give_the_same_run(self, folder):
        straight = fit(**settings(folder))
        with pytest.warns(UserWarning, match="the gradient is the same except for rounding"):
            run = fit(**settings(folder, trainer={"accumulate_grad_batches": 4}), ckpt_path=str(folder / "step=5.ckpt"))
        assert run.trainer.global_step == 16
        assert run.recorder.lags == straight.recorder.lags[5:]
        assert largest_difference(straight.weights, run.weights) < 1e-5

    def test_a_checkpoint_of_an_older_version(self, folder, tmp_path):
        state = torch.load(folder / "step=5.ckpt", weights_only=True)
        del state["grpo"]["format"]
        torch.save(state, tmp_path / "old.ckpt")
        with pytest.raises(ResumeError, match="written by an older version of lgrpo"):
            fit(**settings(folder), ckpt_path=str(tmp_path / "old.ckpt"))

    def test_a_checkpoint_of_another_program(self, folder, tmp_path):
        state = torch.load(folder / "step=5.ckpt", weights_only=True)
        torch.save({name: value for name, value in state.items() if name != "grpo"}, tmp_path / "other.ckpt")
        with pytest.raises(ResumeError, match="not written by a GRPOModule"):
            fit(**settings(folder), ckpt_path=str(tmp_path / "other.ckpt"))
        torch.save({name: v for name, v in state.items() if name != "RolloutDataModule"}, tmp_path / "half.ckpt")
        with pytest.raises(ResumeError, match="holds no state of a RolloutDataModule"):
            fit(**settings(folder), ckpt_path=str(tmp_path / "half.ckpt"))


def zip_file_without_a_checkpoint():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.txt", "nothing")
    return file.getvalue()


def flip_a_bit_of_a_weight(path):
    state = torch.load(path, weights_only=True)
    weight = next(tensor for name, tensor in state["state_dict"].items() if tensor.numel() > 1000)
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 1001] ^= 1
    path.write_bytes(bytes(data))


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path):
        fit(**settings(tmp_path, save=True, rollouts=2))
        for step in (1, 2, 3, 4):  # modification times in the order of the steps
            os.utime(tmp_path / f"step={step}.ckpt", (step, step))
        return tmp_path

    def test_a_truncated_or_changed_file_is_recognised(self, folder):
        whole = (folder / "step=4.ckpt").read_bytes()
        assert is_complete(folder / "step=4.ckpt")
        for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
            (folder / "cut.ckpt").write_bytes(whole[:length])
            assert not is_complete(folder / "cut.ckpt"), length
        middle = len(whole) // 2
        (folder / "cut.ckpt").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert not is_complete(folder / "cut.ckpt")

    def test_the_previous_checkpoint_is_used(self, folder):
        assert newest_checkpoint(folder).name == "step=4.ckpt"
        for step in (3, 4):
            path = folder / f"step={step}.ckpt"
            path.write_bytes(path.read_bytes()[:-100])
            os.utime(path, (step, step))
        with pytest.warns(UserWarning, match=r"damaged, so not used: step=3\.ckpt, step=4\.ckpt .* step=2\.ckpt"):
            assert newest_checkpoint(folder).name == "step=2.ckpt"
        for step in (1, 2):
            (folder / f"step={step}.ckpt").write_bytes(b"")
        with pytest.raises(FileNotFoundError, match=r"all 4 checkpoints in .* are damaged"):
            newest_checkpoint(folder)

    def test_the_command_resumes_from_the_previous_checkpoint(self, tmp_path):
        run = tmp_path / "run"
        options = ["fit", *SMALL, f"--run={run}", "--trainer.enable_progress_bar=false", "--data.num_rollouts=2"]
        main(options)
        last, own = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "step=2.ckpt"
        os.utime(own, (1, 1))
        content = last.read_bytes()
        last.unlink()  # it is a link to the other
        last.write_bytes(content[:-1])
        (run / "checkpoints" / f"last.ckpt{PART}").write_bytes(b"half")
        with pytest.warns(UserWarning, match=r"damaged, so not used: last\.ckpt .* Using step=2\.ckpt"):
            main([*options, "--trainer.max_epochs=2", "--ckpt_path=last"])
        assert torch.load(last, weights_only=True)["global_step"] == 4
        assert not list(run.rglob(f"*{PART}"))
        for path in (run / "checkpoints").glob("*.ckpt"):
            path.write_bytes(b"nothing")
        with pytest.raises(SystemExit, match="lgrpo: all 3 checkpoints in"):
            main([*options, "--ckpt_path=last"])

    def test_the_highest_step_is_newest_whatever_the_modification_times(self, folder):
        for step in (1, 2, 3, 4):
            os.utime(folder / f"step={step}.ckpt", (9 - step, 9 - step))
        assert newest_checkpoint(folder).name == "step=4.ckpt"
        shutil.copy(folder / "step=4.ckpt", folder / "last.ckpt")
        assert newest_checkpoint(folder).name == "last.ckpt"
        (folder / "other.ckpt").write_bytes(zip_file_without_a_checkpoint())
        assert newest_checkpoint(folder).name == "last.ckpt"

    def test_a_run_that_was_resumed_from_an_earlier_step(self, folder):
        """Its later checkpoints have lower steps than those of the attempt that was given up."""
        shutil.copy(folder / "step=2.ckpt", folder / "last.ckpt")
        with pytest.warns(UserWarning, match=r"last\.ckpt is of step 2 and was written after step=4\.ckpt of step 4"):
            assert newest_checkpoint(folder).name == "last.ckpt"
        os.utime(folder / "last.ckpt", (2, 2))  # an old file, and later steps
        assert newest_checkpoint(folder).name == "step=4.ckpt"

    @pytest.mark.parametrize("command", ["fit", "validate", "test", "test --checkpoints"])
    @pytest.mark.slow("starts several commands")
    def test_a_changed_weight_is_refused_by_every_command(self, tmp_path, short_run, command):
        run, copy = shutil.copytree(short_run, tmp_path / "run", symlinks=True), tmp_path / "copy"
        path = run / "checkpoints" / "step=2.ckpt"
        flip_a_bit_of_a_weight(path)
        (run / "checkpoints" / "last.ckpt").unlink()
        arguments = {
            "fit": ["fit", *SHORT, f"--run={copy}", f"--ckpt_path={path}"],
            "validate": ["validate", *SHORT, f"--ckpt_path={path}"],
            "test": ["test", *SHORT, f"--ckpt_path={path}"],
            "test --checkpoints": ["test", f"--checkpoints={run}"],
        }
        with pytest.raises(ValueError, match=r"the checkpoint .*step=2\.ckpt is damaged"):
            main(arguments[command])

    def test_unfinished_files_are_removed(self, folder):
        (folder / f"last.ckpt{PART}").write_bytes(b"half")
        assert newest_checkpoint(folder).name == "step=4.ckpt"
        remove_partial(folder)
        assert not list(folder.glob(f"*{PART}"))


def grad_norms(logged):
    return [row["train/grad_norm"] for row in logged]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
@pytest.mark.slow("starts two ranks, several times")
def test_a_policy_sharded_over_two_processes(tmp_path, kind):
    """Resuming inside a cycle and inside a rollout is bit-exact. Sharded checkpoints are folders."""
    command = [sys.executable, "-m", "tests.processes.two_shards", kind, str(tmp_path), "3", "6"]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[1], capture_output=True)
    straight, *resumed = (torch.load(tmp_path / f"from-{step}.pt") for step in (0, 3, 6))
    for step, end in zip((3, 6), resumed, strict=True):
        assert end["steps"] == straight["steps"] == 10
        assert end["lags"] == straight["lags"][step:]
        assert largest_difference(straight["weights"], end["weights"]) == 0, f"from step {step}"
    one = make(tmp_path / "one", None, saving=False)
    one.trainer.fit(one.module, datamodule=one.data)
    assert 0 in straight["num_rows"]
    assert one.recorder.lags == straight["lags"]
    assert largest_difference(dict(one.module.policy_weights()), straight["weights"]) < 1e-3  # AdamW amplifies rounding
    assert largest_difference(dict(one.module.reference_weights()), straight["reference"]) < 1e-3
    assert grad_norms(straight["logged"]) == pytest.approx(grad_norms(one.logged), rel=1e-2)
    for precision, tolerance in (("32-true", 1e-5), ("bf16-mixed", 2e-3)):
        state, alone = torch.load(tmp_path / f"{precision}.pt"), clipped(None, precision)
        sharded = state["weights"]
        before = {name: tensor.clone() for name, tensor in alone.module.policy_weights()}
        alone.trainer.fit(alone.module, datamodule=alone.data)
        assert {tensor.dtype for tensor in sharded.values()} == {torch.float32}
        assert largest_difference(sharded, before) > 0.003
        assert largest_difference(sharded, dict(alone.module.policy_weights())) < tolerance, precision
        assert min(grad_norms(alone.logged)) > 0.01, "the norm before clipping"
        assert grad_norms(state["logged"]) == pytest.approx(grad_norms(alone.logged), rel=0.02), precision
    first, skipped, last = grad_norms(torch.load(tmp_path / "skipping.pt")["logged"])
    assert (skipped, 0 < first < 10, 0 < last < 10) == (float("inf"), True, True)
    if kind == "fsdp2":
        with_adapters = adapted(None)
        with_adapters.trainer.fit(with_adapters.module, datamodule=with_adapters.data)
        sharded = torch.load(tmp_path / "adapted.pt")["weights"]
        assert largest_difference(sharded, dict(with_adapters.module.policy_weights())) < 1e-4
    checkpoint = tmp_path / "step=10.ckpt"
    assert not list(tmp_path.glob(f"*{PART}"))
    assert is_complete(checkpoint)
    main(["consolidate", str(checkpoint), str(tmp_path / "one.ckpt")])
    with pytest.raises(SystemExit, match="exists already"):
        main(["consolidate", str(checkpoint), str(tmp_path / "one.ckpt")])
    one = make(tmp_path / "one", None, saving=False)
    optimizer = torch.load(tmp_path / "one.ckpt", weights_only=True)["optimizer_states"][0]
    assert [tensor["step"] for tensor in optimizer["state"].values()] == [10] * len(
        dict(one.module.policy.named_parameters())
    )
    one.trainer.validate(one.module, datamodule=one.data, ckpt_path=str(tmp_path / "one.ckpt"), verbose=False)
    assert largest_difference(dict(one.module.policy_weights()), straight["weights"]) == 0
    read = read_checkpoint(checkpoint)
    exported, step = read["state_dict"], read["global_step"]
    held = dict(straight["weights"])
    assert step == 10
    assert largest_difference(held, {name: exported[f"policy.model.{name}"] for name in held}) == 0
    again = make(tmp_path / "one", None, saving=False)
    with pytest.raises(ResumeError, match="world size was 2 and is now 1"):
        again.trainer.fit(again.module, datamodule=again.data, ckpt_path=str(tmp_path / "one.ckpt"))
    (shard, _) = sorted(checkpoint.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not is_complete(checkpoint)
    (tmp_path / "one.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"damaged, so not used: step=10\.ckpt"):
        assert newest_checkpoint(tmp_path).name == "step=9.ckpt"
    shard.unlink()
    with pytest.raises(SystemExit, match=rf"is damaged: {shard.name} of its \d+ files are missing"):
        main(["export", str(checkpoint), str(tmp_path / "out")])
    for folder, message in ((checkpoint, "is damaged"), (tmp_path, "is not a sharded checkpoint")):
        with pytest.raises(SystemExit, match=message):
            main(["consolidate", str(folder), str(tmp_path / "two.ckpt")])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow("starts two ranks"))])
def test_a_killed_rank_ends_the_other(rank):
    """The surviving rank is not in a collective, where it would notice; RankWatch must end it."""
    command = [sys.executable, "-m", "tests.processes.two_deaths", str(rank)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    pids = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("process ")}
    assert len(pids) == 2
    assert until_all_ended(lambda stat: stat[0] in pids)
    assert done.returncode == (-signal.SIGKILL if rank == 0 else 1)
    fate = "has ended" if rank == 0 else "was killed by SIGKILL"
    assert re.search(rf"lgrpo: rank {rank} \(process \d+ on .*\) {fate}", done.stderr)


@pytest.mark.parametrize(
    ("settings", "state_dict_type", "message"),
    [
        ({"lora": LoRA(rank=4)}, "full", r"policy\.lora with FSDPStrategy: .* Use configs/fsdp2\.yaml"),
        ({"compile": True}, "full", r"policy\.compile with FSDPStrategy is untested\. .* or leave compile out"),
        ({}, "sharded", r"one process, .* set state_dict_type to full"),
    ],
)
def test_settings_that_fsdp1_refuses(settings, state_dict_type, message):
    run = build(policy=tiny_policy(**settings))
    run.trainer._accelerator_connector.strategy = FSDPStrategy(state_dict_type=state_dict_type)  # none for a CPU
    run.module.trainer = run.trainer
    with pytest.raises(ValueError, match=message):
        run.module.setup("fit")


def test_externally_launched_ranks_need_a_named_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"name one with --trainer\.default_root_dir FOLDER"):
        main(["fit", *SMALL])


def fill_disk(monkeypatch, steps):
    """Let no checkpoint of some optimizer steps be flushed to disk."""

    def fsync(descriptor, flush=os.fsync):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any(name.startswith(f"step={step}.ckpt") for step in steps):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("save_top_k", "full", "kept"),
    [
        (1, {3}, [8]),
        (1, {3, 4, 5}, [8]),
        (1, {7, 8}, [6]),  # the last one that could be written
        (2, {3, 5, 6}, [7, 8]),
        (2, {8}, [6, 7]),
        (2, {1, 2}, [7, 8]),
    ],
)
def test_the_number_of_checkpoints_after_failed_writes(tmp_path, monkeypatch, save_top_k, full, kept, background):
    """The disk is full for some steps. The checkpoint that could not be replaced is removed later."""
    fill_disk(monkeypatch, full)

    class Newest(L.Callback):
        """Log the number of the step, to keep the newest checkpoints. Look at the folder after every step."""

        def on_train_batch_end(self, trainer, *args):
            trainer.callback_metrics["newest"] = torch.tensor(float(trainer.global_step))
            on_disk.append(len(list(tmp_path.glob("step=*.ckpt"))))

    on_disk = []
    monitor = {} if save_top_k == 1 else {"monitor": "newest", "mode": "max"}
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=save_top_k, **monitor)
    callbacks = [Newest(), ExactResume(background=background), save]
    trainer = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="no checkpoint could be written"):
        run = fit(rollouts=8, callbacks=callbacks, trainer=trainer)
    is_counted = any("fault/checkpoint_writes" in row for row in run.logged)
    assert is_counted or full <= {7, 8}, "they have no later step"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt*")) == [f"step={step}.ckpt" for step in kept]
    assert max(on_disk) <= save_top_k + background, "a thread removes the old one after the new one is written"


IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
can_mount = subprocess.run([*IN_A_NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount, reason="needs user namespaces, to mount a small disk")
@pytest.mark.parametrize("fault", ["full", "read-only"])
@pytest.mark.slow("starts several runs")
def test_a_disk_that_fills_up_or_becomes_read_only(tmp_path, fault):
    """Training continues to its end on a real disk of 12 MiB, and reports each failed write."""
    (tmp_path / "disk").mkdir()
    lgrpo = str(Path(sys.executable).parent / "lgrpo")
    options = " ".join(SMALL) + " --run=disk/run --checkpoint.every_n_train_steps=5 --trainer.enable_progress_bar=false"
    fault_command = "dd if=/dev/zero of=disk/filler bs=1k" if fault == "full" else "mount -o remount,ro disk"
    script = f"""
        mount -t tmpfs -o size=12m none disk
        (for i in $(seq 3000); do [ -e disk/run/checkpoints/last.ckpt ] && break; sleep 0.05; done; {fault_command}) \
            > /dev/null 2>&1 &
        {lgrpo} fit {options} --trainer.log_every_n_steps=1
        code=$?
        cp -r disk/run kept
        exit $code
    """
    done = subprocess.run([*IN_A_NAMESPACE, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reason = "No space left on device" if fault == "full" else "Read-only file system"
    assert f"no checkpoint could be written to disk/run/checkpoints/step=10.ckpt ({reason})" in done.stderr
    assert "MetricsLogger failed" in done.stderr
    assert "The run is in disk/run/" in done.stdout  # the run finished
    newest = newest_checkpoint(tmp_path / "kept" / "checkpoints")
    assert torch.load(newest, weights_only=True)["global_step"] >= 5
    series, notes, _ = read_metrics(tmp_path / "kept")
    assert not notes
    assert [step for step, _ in series["train/loss"]][:5] == [0, 1, 2, 3, 4]


class BrokenLogger(CSVLogger):
    """A logger whose service is down."""

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the service is down")


def test_a_logger_that_fails(tmp_path):
    loggers = [BrokenLogger(tmp_path, name="broken"), CSVLogger(tmp_path, name="metrics")]
    with pytest.warns(UserWarning, match="BrokenLogger failed .ConnectionError: the service is down"):
        run = fit(rollouts=3, trainer={"logger": loggers, "log_every_n_steps": 1})
    assert run.trainer.global_step == 3
    rows = read_series(tmp_path)
    assert [step for step, _ in rows["train/loss"]] == [0, 1, 2]
    assert rows["fault/logger_writes"] == [(1, 1.0), (2, 1.0)]  # counted in the next row


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    main(["fit", *SMALL, f"--run={folder}"])
    return folder


def run_lgrpo(*options, **arguments):
    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **arguments)


def wait_for_rows(run, number):
    metrics = run / "metrics" / "version_0" / "metrics.csv"
    for _ in range(2000):
        if metrics.exists() and metrics.read_text().count("\n") > number:
            return
        time.sleep(0.05)
    raise AssertionError("the run logged nothing")


def assert_same_end(one, other):
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (one, other)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 30
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
    a, b = read_series(one), read_series(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name] or name.startswith(("time/", "memory/")), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.slow("starts several runs")
def test_a_signal_writes_a_checkpoint_and_sets_the_exit_code(tmp_path, straight, number):
    run = tmp_path / "run"
    # the tests may run under nohup, which ignores SIGHUP
    process = run_lgrpo(*SMALL, f"--run={run}", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    wait_for_rows(run, 8)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == RESUMABLE, output
    assert "nothing is lost" in output
    assert "Traceback" not in output
    assert until_all_ended(lambda stat: int(stat[0]) == process.pid)
    process = run_lgrpo(*SMALL, f"--run={run}", "--ckpt_path=last")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert_same_end(straight, run)


@pytest.mark.slow("starts several runs")
def test_slurm_requeues_through_lightnings_plugin(tmp_path, straight):
    """Simulate SLURM by its environment variables and a ``scontrol`` script that records its arguments."""
    run, tools = tmp_path / "run", tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    (tools / "srun").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "grpo", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "1"}
    environment = {**os.environ, **slurm, "PATH": f"{tools}:{os.environ['PATH']}"}
    options = [*SMALL, f"--run={run}", "--trainer.num_nodes=1"]
    process = run_lgrpo(*options, env=environment)
    wait_for_rows(run, 8)
    process.send_signal(signal.SIGUSR1)  # sent by SLURM shortly before the time limit
    for _ in range(600):
        if (tmp_path / "requeued").exists():
            break
        time.sleep(0.1)
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"
    process.kill()  # as SLURM does
    process.communicate()
    (saved,) = run.glob("hpc_ckpt_*.ckpt")
    assert is_complete(saved)
    process = run_lgrpo(*options, env=environment)  # the same command
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert_same_end(straight, run)


class Constant(Reward):
    """A reward of 1 for every completion."""

    is_inline = True

    def score(self, prompt, completion):
        return 1.0


@pytest.mark.parametrize("dynamic", [None, DynamicSampling(max_rounds=2)])
def test_rewards_that_never_vary(dynamic):
    """No optimizer step is made, nothing hangs and no metric is NaN."""
    task = SortDigits(num_digits=2, num_held_out=20, reward=Constant())
    data = {"task": task} | ({"dynamic_sampling": dynamic} if dynamic else {})
    before = build(data=data)
    run = fit(rollouts=3, data=data, callbacks=[ZeroVarianceMask()], loss=ClippedLoss(kl_coef=0.1))
    assert largest_difference(before.weights, run.weights) == 0
    assert [row["train/step_skipped"] for row in run.logged] == [1.0] * 3
    assert all(row["train/loss"] == 0 for row in run.logged)
    if dynamic:
        assert all(row["rollout/resampled_fraction"] == 2 for row in run.logged)


class KillWorkers(RolloutCallback):
    """Kill all reward workers and their fork server before every other rollout."""

    def on_rollout_start(self, trainer, pl_module, rollout):
        pool = trainer.datamodule._scorers[""].reward._pool
        if pool is not None and rollout % 2:
            for worker in list(pool.workers):
                os.kill(worker.pid, signal.SIGKILL)
            pool.fork_server.process.kill()


def test_killed_reward_workers_are_replaced():
    from tests.rewards.hostile import Fussy

    task = SortDigits(num_digits=2, num_held_out=20, reward=Fussy())
    run = fit(rollouts=5, data={"task": task}, callbacks=[KillWorkers()])
    assert run.trainer.global_step == 5
    assert all(row.get("reward/crashes", 0.0) == 0 for row in run.logged)


def test_checkpoints_are_small_and_hold_the_reference_once(tmp_path):
    fit(**settings(tmp_path, save=True, rollouts=1))
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    own = {owner: sum(name.startswith(owner) for name in state["state_dict"]) for owner in ("policy.", "reference.")}
    assert own["policy."] == own["reference."] > 0
    assert len(state["state_dict"]) == sum(own.values())
    assert "reference" not in str(state["RolloutDataModule"].keys())


class Bomb:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_checkpoint_executes_no_code(tmp_path):
    """Checkpoints load with ``weights_only``; a file that would execute code is refused."""
    fit(**settings(tmp_path, save=True, rollouts=1))
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    torch.save(state | {"extra": Bomb(tmp_path / "executed")}, tmp_path / "bomb.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        fit(**settings(tmp_path, rollouts=2), ckpt_path=str(tmp_path / "bomb.ckpt"))
    for command in ("fit", "validate"):
        run = ["--run=" + str(tmp_path / "run")] if command == "fit" else []
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            main([command, f"--config={TINY}", *run, f"--ckpt_path={tmp_path / 'bomb.ckpt'}"])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
@pytest.mark.parametrize(
    "setting",
    [
        {"policy": {"name": "FOLDER", "config": None, "characters": None, "trust_remote_code": True}},
        {"policy": {"name": "FOLDER", "config": None, "characters": None}},
        {"loss": {"class_path": "lgrpo_planted_module.Loss"}},
    ],
    ids=["code of a model", "another model", "class"],
)
@pytest.mark.slow("starts the command for each case")
def test_a_checkpoint_changes_no_setting(tmp_path, short_run, monkeypatch, command, setting):
    """LightningCLI would merge the ``hyper_parameters`` of a checkpoint into the configuration."""
    run, executed = shutil.copytree(short_run, tmp_path / "run", symlinks=True), tmp_path / "executed"
    (tmp_path / "lgrpo_planted_module.py").write_text(f"open({str(executed)!r}, 'w')\nclass Loss: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "planted", "auto_map": {"AutoConfig": "configuration_planted.PlantedConfig"}})
    )
    (model / "configuration_planted.py").write_text(f"open({str(executed)!r}, 'w')\n")
    planted = json.loads(json.dumps(setting).replace("FOLDER", str(model)))
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) | {"hyper_parameters": planted}
    torch.save(state, tmp_path / "planted.ckpt")
    resume = [f"--run={run}", "--trainer.max_epochs=2"] if command == "fit" else []
    main([command, *SHORT, *resume, f"--ckpt_path={tmp_path / 'planted.ckpt'}"])
    assert not executed.exists()
    if command == "fit":
        assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_signal_handlers_are_restored_after_a_fit():
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    fit(rollouts=1, callbacks=[GracefulInterrupt()])
    assert {number: signal.getsignal(number) for number in before} == before


class Failing(TransformersEngine):
    """Fail once: at the n-th sync or the n-th generation, in the background if ``overlaps``."""

    def __init__(self, *, sync=0, generation=0, overlaps=False, interrupted=False):
        super().__init__()
        self.interrupted = interrupted
        self.left = {"sync": sync, "generation": generation}
        self.has_own_device = overlaps

    def _count(self, what):
        self.left[what] -= 1
        return self.left[what] == 0

    def receive_weights(self, weights, step, version):
        if self._count("sync"):
            if self.interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            raise WeightSyncError("the sync failed: four servers in a row")
        return super().receive_weights(weights, step, version)

    def generate(self, *arguments, **options):
        if self._count("generation"):
            raise EngineError("vLLM failed 4 times")
        return super().generate(*arguments, **options)


class First(RolloutCallback):
    """A stateful callback that runs before the sync and counts rollouts."""

    def __init__(self):
        self.count = 0

    def on_rollout_start(self, trainer, pl_module, rollout):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("sync", [lambda: WeightSync(2), lambda: AdaptiveWeightSync(minimum=2, maximum=2)])
@pytest.mark.parametrize(
    "fault",
    [
        {"sync": 2},
        {"sync": 2, "interrupted": True},
        {"sync": 2, "overlaps": True},
        {"generation": 4},
        {"generation": 4, "overlaps": True},
    ],
)
def test_a_checkpoint_is_written_when_the_engine_fails_for_good(tmp_path, fault, sync):
    """The run ends with the error of its engine and resumes exactly."""

    def run(engine, **more):
        first = First()
        callbacks = [first, sync(), ReferenceRefresh(period=2, decay=0.5), ExactResume(), GracefulInterrupt()]
        own = {"v": 0, "i": 2, "rollouts": 6, "loss": ClippedLoss(kl_coef=0.1), "callbacks": callbacks}
        trainer = {"default_root_dir": str(tmp_path)}
        return first, fit(**own, data={"engine": engine}, trainer=trainer, **more)

    expected, straight = run(TransformersEngine())
    with pytest.raises(SystemExit if "interrupted" in fault else (EngineError, WeightSyncError)):
        run(Failing(**fault))
    first, resumed = run(TransformersEngine(), ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert largest_difference(straight.weights, resumed.weights) == 0
    assert largest_difference(dict(straight.module.reference_weights()), dict(resumed.module.reference_weights())) == 0
    assert (
        [r.step for r in resumed.data.engine.state.ledger]
        == [r.step for r in straight.data.engine.state.ledger]
        == [0, 4, 8]
    )
    assert first.count == expected.count == 6
