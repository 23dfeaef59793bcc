"""Checkpoints that a thread writes while training goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, ReferenceRefresh
from lgrpo.callbacks import ExactResume, GracefulInterrupt
from lgrpo.cli import main
from lgrpo.run import background, host_copy
from lgrpo.run.background import BackgroundCheckpointIO
from lgrpo.run.checkpoints import PART, AtomicCheckpointIO, is_complete, newest_checkpoint
from lgrpo.run.host_copy import in_host_memory
from tests.helpers import build, fit, largest_difference

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def settings(folder, *callbacks, background=True, save_last=True, **changes):
    """Return a run that writes a checkpoint after each step and keeps the newest, under two names."""
    save = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_last=save_last, enable_version_counter=False
    )
    own = {
        "v": 3,
        "i": 2,
        "rollouts": 4,
        "loss": ClippedLoss(kl_coef=0.1),
        "optimizer": torch.optim.AdamW,
        "callbacks": [ReferenceRefresh(period=2), *callbacks, ExactResume(background=background), save],
        "trainer": {"enable_checkpointing": True, "default_root_dir": str(folder)},
    }
    return own | changes


class SlowDisk:
    """Make every write take some time, and count the files that are open at the same time."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.now, self.most, self.threads = seconds, 0, 0, set()
        self.save = torch.save
        monkeypatch.setattr(torch, "save", self)

    def __call__(self, value, file, **options):
        if options:  # of a storage that is pickled
            return self.save(value, file, **options)
        self.now += 1
        self.most = max(self.most, self.now)
        self.threads.add(threading.current_thread() is threading.main_thread())
        time.sleep(self.seconds / 2)
        self.save(value, file)
        time.sleep(self.seconds / 2)
        self.now -= 1


class Watch(L.Callback):
    """Note the checkpoints in a folder at the end of each step, and which of them are complete."""

    def __init__(self, folder):
        self.folder, self.seen, self.is_writing = folder, [], []

    def on_train_batch_end(self, trainer, *args):
        complete = sorted(path.name for path in self.folder.glob("*.ckpt") if is_complete(path))
        self.seen.append(complete)
        self.is_writing.append(any(self.folder.glob(f"*{PART}")))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    disk, watch = SlowDisk(monkeypatch, 0.3), Watch(tmp_path)
    run = fit(**settings(tmp_path, watch))
    assert disk.threads == {False}, "none by the main thread"
    assert disk.most == 1
    assert any(watch.is_writing), "a step ended meanwhile"
    assert all(names for names in watch.seen[2:]), "there is always a complete checkpoint"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt*")) == ["last.ckpt", "step=8.ckpt"]
    assert (tmp_path / "last.ckpt").samefile(tmp_path / "step=8.ckpt")
    plain = fit(**settings(tmp_path / "plain", background=False))
    assert disk.threads == {False, True}
    assert largest_difference(run.weights, plain.weights) == 0


def load(path):
    return torch.load(path, weights_only=True)


def entries(value, path=""):
    """Yield the leaves of a checkpoint by their path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from entries(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from entries(item, f"{path}/{index}")
    else:
        yield path, value


def test_the_file_is_the_one_that_training_would_have_waited_for(tmp_path, monkeypatch):
    """Every checkpoint has the state of its moment, though training changed it before the file was written."""
    SlowDisk(monkeypatch, 0.15)
    keep = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    for is_background in (True, False):
        folder = tmp_path / str(is_background)
        own = settings(folder, background=is_background)
        own["callbacks"][-1] = ModelCheckpoint(folder, **keep)
        fit(**own)
    for step in range(1, 9):
        one, other = (dict(entries(load(tmp_path / name / f"step={step}.ckpt"))) for name in ("True", "False"))
        assert one.keys() == other.keys()
        for path, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[path]) or value.isnan().any(), (step, path)
            elif not any(word in path for word in ("seconds", "time", "path", "/metrics/", "clock")):
                assert value == other[path], (step, path)
        assert (tmp_path / "True" / f"step={step}.ckpt").stat().st_size == pytest.approx(
            (tmp_path / "False" / f"step={step}.ckpt").stat().st_size, rel=0.02
        )


KILLED = """
import os, sys, time
from pathlib import Path
import lightning as L
import torch
from tests.run.test_background import PART, fit, settings

folder, save = Path(sys.argv[1]), torch.save

def slow_save(value, file, **options):
    save(value, file, **options)
    if "step=4.ckpt" in getattr(file, "name", ""):
        time.sleep(60)

class Kill(L.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 4:
            while not (folder / f"step=4.ckpt{PART}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)

torch.save = slow_save
own = settings(folder)
own["callbacks"].append(Kill())
fit(**own)
"""


RESUMED = """
import sys
from pathlib import Path
from tests.run.test_background import fit, largest_difference, settings

killed, straight = map(Path, sys.argv[1:])
resumed = fit(**settings(killed), ckpt_path=str(killed / "last.ckpt"))
print(largest_difference(resumed.weights, fit(**settings(straight)).weights))
"""
"""Run in a new process, as the killed one was: earlier tests may have changed how this one rounds."""


def test_checkpoints_that_differ_in_the_state_of_callbacks_share_a_copy(tmp_path, monkeypatch):
    """The first ``last.ckpt`` has another ``last_model_path`` than the file of its step; training waits for neither."""
    SlowDisk(monkeypatch, 1.0)
    copied, started = [], []
    monkeypatch.setattr(background, "in_host_memory", lambda value: copied.append(value) or in_host_memory(value))

    class Times(L.Callback):
        def on_train_batch_start(self, trainer, *args):
            started.append(time.perf_counter())

    fit(**settings(tmp_path, Times(), i=2, rollouts=1))
    assert started[1] - started[0] < 1.0, "two files take two seconds"
    assert sum("state_dict" in value for value in copied) == 2, "one for each step"
    states = load(tmp_path / "last.ckpt")["callbacks"]
    (own,) = (state for name, state in states.items() if name.startswith("ModelCheckpoint"))
    assert own["last_model_path"] == str(tmp_path / "last.ckpt")


def test_killed_while_a_checkpoint_is_written(tmp_path):
    """SIGKILL after step 4, in the middle of its checkpoint: that of step 3 is valid and resumes exactly."""
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in folder.glob("*.ckpt*")) == [
        "last.ckpt",
        "step=3.ckpt",
        f"step=4.ckpt{PART}",
    ]
    assert is_complete(folder / "step=3.ckpt")
    assert (folder / "last.ckpt").samefile(folder / "step=3.ckpt")
    assert newest_checkpoint(folder).name == "last.ckpt"
    command = [sys.executable, "-c", RESUMED, str(folder), str(tmp_path / "straight")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0.0", done.stdout + done.stderr
    folders = folder, tmp_path / "straight"
    one, other = (dict(entries(load(path / "last.ckpt")["optimizer_states"][0]["state"])) for path in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[path]) for path, value in one.items())


class Broken(RuntimeError):
    pass


def break_write(monkeypatch, step):
    """Let the write of a step's checkpoint fail, not because of the disk."""
    save = torch.save

    def broken_save(value, file, **options):
        if f"step={step}.ckpt" in getattr(file, "name", ""):
            raise Broken("cannot be pickled")
        save(value, file, **options)

    monkeypatch.setattr(torch, "save", broken_save)


@pytest.mark.parametrize(("step", "steps"), [(2, 3), (8, 8)])
def test_an_error_of_the_thread_is_raised(tmp_path, monkeypatch, step, steps):
    """At the next step or checkpoint, or at the end."""
    break_write(monkeypatch, step)
    run = build(**settings(tmp_path, save_last=False))
    with pytest.raises(Broken, match="cannot be pickled"):
        run.trainer.fit(run.module, datamodule=run.data)
    assert step <= run.trainer.global_step <= steps
    assert newest_checkpoint(tmp_path).name == f"step={step - 1}.ckpt", "it was kept"


class Raises(L.Callback):
    """Raise an error at the start of a step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise self.error


def test_an_error_of_the_thread_does_not_hide_that_of_the_run(tmp_path, monkeypatch):
    break_write(monkeypatch, 4)
    own = settings(tmp_path, Raises(4, ValueError("of the run")), save_last=False)
    with (
        pytest.warns(UserWarning, match="a checkpoint could not be written: Broken: cannot be pickled"),
        pytest.raises(ValueError, match="of the run"),
    ):
        fit(**own)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the run")])
def test_the_end_waits_for_the_file(tmp_path, monkeypatch, error):
    """Also that of a run which is interrupted or fails, for the file of the last step and the one on leaving."""
    disk = SlowDisk(monkeypatch, 0.5)
    own = settings(tmp_path, Raises(4, error), GracefulInterrupt())
    with pytest.raises((SystemExit, ValueError)):
        fit(**own)
    assert disk.now == 0
    assert load(tmp_path / "last.ckpt")["global_step"] == 4
    assert not list(tmp_path.glob(f"*{PART}"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_written_at_once(tmp_path, monkeypatch):
    """If the memory is too small for a copy; for SLURM, which ends the process next; outside of a fit."""
    run = fit(rollouts=1, callbacks=[ExactResume()], trainer={"default_root_dir": str(tmp_path)})
    writer = run.trainer.strategy.checkpoint_io
    assert isinstance(writer, BackgroundCheckpointIO)
    run.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert is_complete(tmp_path / "after.ckpt")
    disk = SlowDisk(monkeypatch, 0.2)
    writer.start()
    run.trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    assert is_complete(tmp_path / "hpc_ckpt_1.ckpt")
    monkeypatch.setattr(host_copy, "_free_bytes", lambda: 1000)
    with torch.no_grad():
        next(run.module.policy.parameters()).add_(1.0)
    run.trainer.save_checkpoint(tmp_path / "large.ckpt")
    assert is_complete(tmp_path / "large.ckpt")
    assert disk.threads == {True}
    monkeypatch.setattr(host_copy, "_free_bytes", lambda: None)
    with torch.no_grad():
        next(run.module.policy.parameters()).add_(1.0)
    run.trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "later.ckpt").exists()
    writer.teardown()
    assert is_complete(tmp_path / "later.ckpt")


def test_turned_off(tmp_path, monkeypatch):
    run = fit(**settings(tmp_path, background=False))
    assert type(run.trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    started = []
    monkeypatch.setattr(BackgroundCheckpointIO, "start", lambda self: started.append(self))
    small = [f"--config={TINY}", "--data.num_rollouts=1", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0"]
    for flag, count in (("false", 0), ("true", 1)):
        main(["fit", *small, f"--run={tmp_path / flag}", f"--background_checkpoints={flag}"])
        assert len(started) == count
        assert is_complete(tmp_path / flag / "checkpoints" / "last.ckpt")


def test_a_copy_shares_nothing(tmp_path):
    weight = torch.arange(6.0)
    value = {"a": [weight, {"b": (weight[2:], "text")}], "empty": torch.zeros(0), "int": torch.tensor(3)}
    copied = in_host_memory(value)
    weight.add_(1)
    value["a"][1]["b"] = None
    assert copied["a"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["a"][1]["b"][0].tolist() == [2, 3, 4, 5]
    assert copied["a"][0].untyped_storage().data_ptr() == copied["a"][1]["b"][0].untyped_storage().data_ptr()
    assert (copied["int"].item(), copied["empty"].numel()) == (3, 0)
    torch.save(copied, tmp_path / "copied.pt")
    loaded = torch.load(tmp_path / "copied.pt", weights_only=True)
    assert torch.equal(loaded["a"][1]["b"][0], copied["a"][1]["b"][0])


def test_limits_of_control_groups(tmp_path):
    """The smallest rest of a container's or job's limit counts, in both versions of control groups."""
    (tmp_path / "own").write_text("0::/job/step\n")
    for folder, limit, used in (("job", "1000", "400"), ("job/step", "max", "300")):
        (tmp_path / "two" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / folder / "memory.max").write_text(limit)
        (tmp_path / "two" / folder / "memory.current").write_text(used)
    assert list(host_copy._free_in_groups(tmp_path / "own", tmp_path / "two")) == [600]
    (tmp_path / "own").write_text("5:cpu:/x\n4:memory:/job\n")
    (tmp_path / "one" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "one" / "memory" / "job" / "memory.limit_in_bytes").write_text("70\n")
    (tmp_path / "one" / "memory" / "job" / "memory.usage_in_bytes").write_text("90\n")
    assert list(host_copy._free_in_groups(tmp_path / "own", tmp_path / "one")) == [0]
    assert list(host_copy._free_in_groups(tmp_path / "none", tmp_path / "one")) == []


def test_a_checkpoint_that_cannot_be_copied_is_written_at_once(tmp_path, monkeypatch):
    def fail(_):
        raise MemoryError

    monkeypatch.setattr(background, "in_host_memory", fail)
    checkpoint_io = BackgroundCheckpointIO()
    checkpoint_io.start()
    checkpoint_io.save_checkpoint({"global_step": 1, "loops": {}, "callbacks": {}}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    checkpoint_io.teardown()


def test_a_checkpoint_after_an_interrupted_end(tmp_path):
    """Ctrl-C while ``fit`` waits for the last file: the next checkpoint is written at once."""
    checkpoint_io = BackgroundCheckpointIO()
    checkpoint_io.start()
    thread = checkpoint_io._thread
    thread.shutdown = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_io.teardown()
    checkpoint_io.save_checkpoint({"global_step": 1, "loops": {}, "callbacks": {}}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    del thread.shutdown
    thread.shutdown()


@pytest.mark.parametrize(
    "callbacks", [[ModelCheckpoint(every_n_train_steps=n) for n in (1, 2)], [ModelCheckpoint(save_last="link")]]
)
def test_runs_that_look_for_the_file_write_at_once(tmp_path, callbacks):
    trainer = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    run = build(rollouts=1, callbacks=[ExactResume(), *callbacks], trainer=trainer)
    run.trainer.fit(run.module, datamodule=run.data)
    assert not isinstance(run.trainer.strategy.checkpoint_io, BackgroundCheckpointIO)
