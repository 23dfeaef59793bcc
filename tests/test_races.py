"""Inject an interrupt, a fault or a kill at the one moment where it can do harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from lgrpo.callbacks import (
    AdaptiveWeightSync,
    ExactResume,
    GracefulInterrupt,
    RolloutLog,
    rank_watch,
)
from lgrpo.engines import TransformersEngine, WeightSyncError, processes
from lgrpo.engines.base import RolloutEngine
from lgrpo.recordings import RolloutRecorder, recorder
from lgrpo.run.checkpoints import newest_checkpoint, remove_partial
from tests.helpers import build, fit, largest_difference
from tests.processes.alive import until_all_ended

EVALUATED = {
    "limit_val_batches": 1.0,
    "num_sanity_val_steps": 0,
    "val_check_interval": 2,
    "check_val_every_n_epoch": None,
}


def settings(folder, *callbacks, **more):
    trainer = {"default_root_dir": str(folder), **more.pop("trainer", {})}
    callbacks = [*callbacks, ExactResume(), GracefulInterrupt()]
    return {"rollouts": 8, "learning_rate": 0.05, "callbacks": callbacks, "trainer": trainer, **more}


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def at_call(number, act):
    """Return a function that calls ``act`` on its n-th call."""
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) == number:
            act()

    return count


def check_resumes_exactly(folder, straight, own, why=(KeyboardInterrupt, SystemExit)):
    """Train until the injected stop, resume, and compare with the uninterrupted run."""
    run = build(**own())
    with pytest.raises(why):
        run.trainer.fit(run.module, datamodule=run.data)
    again = fit(**own(), ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    assert again.recorder.lags == straight.recorder.lags[run.trainer.global_step :]
    assert [(r.version, r.step) for r in again.data.engine.state.ledger] == [
        (r.version, r.step) for r in straight.data.engine.state.ledger
    ]
    assert largest_difference(straight.weights, again.weights) == 0.0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("fault", ["interrupt", "difference"])
def test_an_unverified_sync_is_not_in_the_checkpoint(tmp_path, monkeypatch, adaptive, fault):
    """A resumed run must not sample from weights whose checksums were not compared."""

    def own(folder=tmp_path):
        sync = [AdaptiveWeightSync(maximum=2, budget=100.0)] if adaptive else []
        return settings(folder, *sync, v=0 if adaptive else 2)

    straight = fit(**own(tmp_path / "straight"))
    real = TransformersEngine.held_checksums

    def held_checksums(engine, sent):
        third(engine)
        return real(engine, sent)

    def corrupt(*_):
        with torch.no_grad():
            corrupted[0].mul_(3.0)

    corrupted = []
    count = at_call(3, interrupt if fault == "interrupt" else corrupt)

    def third(engine):
        corrupted[:] = [dict(engine._model.named_parameters())["model.norm.weight"]]
        count()

    monkeypatch.setattr(TransformersEngine, "held_checksums", held_checksums)
    why = WeightSyncError if fault == "difference" else (KeyboardInterrupt, SystemExit)
    check_resumes_exactly(tmp_path, straight, own, why)


def test_an_interrupt_while_an_evaluation_restores_the_weights(tmp_path, monkeypatch):
    straight = fit(**settings(tmp_path / "straight", v=4, trainer=EVALUATED))
    real = RolloutEngine.load_state_dict
    first = at_call(1, lambda: monkeypatch.setattr(TransformersEngine, "receive_weights", stopped))
    receive = TransformersEngine.receive_weights

    def stopped(engine, weights, step, version):
        monkeypatch.setattr(TransformersEngine, "receive_weights", receive)
        interrupt()
        return receive(engine, weights, step, version)

    def load_state_dict(engine, state, policy=None):
        first()
        real(engine, state, policy)

    monkeypatch.setattr(RolloutEngine, "load_state_dict", load_state_dict)
    check_resumes_exactly(tmp_path, straight, lambda: settings(tmp_path, v=4, trainer=EVALUATED))


def test_an_interrupt_while_a_rollout_is_written(tmp_path, monkeypatch):
    real, third = recorder.write_recording, at_call(3, interrupt)

    def write(*arguments):
        third()
        real(*arguments)

    def own():
        return settings(tmp_path, RolloutRecorder(), RolloutLog(every=1), rollouts=4)

    monkeypatch.setattr(recorder, "write_recording", write)
    run = build(**own())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.trainer.fit(run.module, datamodule=run.data)
    fit(**own(), ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert [int(path.name[:8]) for path in sorted((tmp_path / "rollouts").iterdir())] == [0, 1, 2, 3]
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["rollout"] for line in lines}) == [0, 1, 2, 3]


class Endless(TransformersEngine):
    """An engine whose third generation lasts until the engine is closed."""

    def __init__(self):
        super().__init__()
        self.is_closed = threading.Event()
        self.count = at_call(3, self.hang)

    def hang(self):
        threading.Timer(1.0, interrupt).start()
        self.ended = self.is_closed.wait(60)

    def generate(self, *arguments):
        self.count()
        return super().generate(*arguments)

    def close(self):
        self.is_closed.set()
        super().close()


def test_an_interrupt_while_a_generation_is_waited_for(tmp_path):
    """The engine must be closed, or the process would wait for the generation before it exits."""
    run = build(**settings(tmp_path, v=4, rollouts=4, data={"engine": Endless(), "overlap": True}))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.trainer.fit(run.module, datamodule=run.data)
    assert run.data.engine.is_closed.is_set()


KILLED = """
import os, shutil, sys, types
from pathlib import Path
from lgrpo.run import checkpoints

class Strategy:
    is_global_zero = True

    def barrier(self):
        pass

    def save_checkpoint(self, checkpoint, path, options=None):
        Path(path).mkdir()
        for name in ("meta.pt", "shard0"):
            (Path(path) / name).write_text(checkpoint)

strategy = Strategy()
checkpoints.write_shards_atomically(strategy)
target = Path(sys.argv[1])
strategy.save_checkpoint("old", target)


def rmtree(path, *_, **__):
    if os.path.exists(path):
        os.kill(os.getpid(), 9)

checkpoints.shutil = types.SimpleNamespace(rmtree=rmtree)
strategy.save_checkpoint("new", target)
"""


def test_a_kill_while_an_old_sharded_checkpoint_is_removed(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "last.ckpt")])
    assert done.returncode == -signal.SIGKILL
    remove_partial(tmp_path)
    assert (newest_checkpoint(tmp_path) / "shard0").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_one_fit_right_after_another_on_several_ranks(monkeypatch):
    """The first watch thread runs for another second and must close only its own files."""

    def gather(gathered, own):
        gathered[:] = [own, (own[0], child.pid)]

    def watches():
        return sum(thread.name == "rank-watch" for thread in threading.enumerate())

    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda what: errors.append(what.exc_value))
    monkeypatch.setattr(rank_watch, "dist", SimpleNamespace(all_gather_object=gather))
    trainer = SimpleNamespace(world_size=2, global_rank=0, strategy=SimpleNamespace(barrier=lambda: None))
    watch, before = rank_watch.RankWatch(), watches()
    with subprocess.Popen(["sleep", "100"]) as child:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            watch.setup(trainer, None, "fit")
            watch.on_fit_end(trainer, None)
        until = time.monotonic() + 30
        while watches() > before and time.monotonic() < until:
            time.sleep(0.1)
        assert watches() == before
        assert len(os.listdir("/proc/self/fd")) == files
        child.kill()
    assert errors == []


def test_a_process_is_killed_if_its_start_is_interrupted(tmp_path):
    """The caller never receives its handle, so nothing else could end it."""
    pid, blocked, started = tmp_path / "pid", threading.Event(), processes._parent_thread
    started.submit(blocked.wait)  # so that the interrupt comes before the process
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        processes.start_process(["bash", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"])
    timer.join()
    blocked.set()
    started.submit(lambda: None).result(timeout=20)  # runs after the start
    time.sleep(0.2)
    assert not pid.exists() or until_all_ended(lambda stat: stat[0] == pid.read_text().strip())


def test_a_process_is_started_without_handlers_of_a_fork():
    """Those of some libraries crash in the child of a process with many threads."""
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    assert processes.start_process([sys.executable, "-c", "print()"]).wait(20) == 0
    assert not forks


class Watched(TransformersEngine):
    """An engine with slow generations that notes whether a sync came during one."""

    def __init__(self):
        super().__init__()
        self.is_generating = False
        self.was_disturbed = False

    def generate(self, *arguments):
        self.is_generating = True
        time.sleep(0.2)
        groups = super().generate(*arguments)
        self.is_generating = False
        return groups

    def load_weights(self, *arguments):
        self.was_disturbed |= self.is_generating
        return super().load_weights(*arguments)


def test_a_sync_waits_for_generations_in_the_background():
    run = fit(v=1, rollouts=6, data={"engine": Watched(), "overlap": True, "lead": 2})
    assert run.recorder.lags == [0, 1, 2, 2, 2, 2]
    assert not run.data.engine.was_disturbed


@pytest.mark.parametrize("before", [8, None])
def test_a_sync_of_a_shorter_period_waits_for_the_generation(tmp_path, before):
    """The cycle of the checkpoint is longer, so that rollout 4 is being sampled when its sync becomes due."""
    checkpoint = str(tmp_path / "two.ckpt")
    fit(**settings(tmp_path, v=before, rollouts=2)).trainer.save_checkpoint(checkpoint)
    run = build(**settings(tmp_path, v=4, rollouts=2, epochs=4, data={"engine": Watched(), "overlap": True}))
    with pytest.warns(UserWarning, match="period"):
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
    assert [record.step for record in run.data.engine.state.ledger] == [0, 4]
    assert not run.data.engine.was_disturbed
