"""Check the output in a terminal: a real pseudo-terminal, whose screen pyte computes."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pyte
import pytest

from lgrpo import RolloutCallback
from lgrpo.callbacks import RolloutProgress
from tests.helpers import fit

HEIGHT = 24


class Terminal:
    """A pseudo-terminal that records everything written to it."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.leader, self.follower = pty.openpty()
        fcntl.ioctl(self.follower, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, columns, 0, 0))
        self.written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self.leader, 65536)
            except OSError:  # the other side is closed
                return
            if not piece:
                return
            self.written += piece

    def end(self) -> str:
        os.close(self.follower)
        self._reader.join()
        os.close(self.leader)
        return self.written.decode(errors="replace")

    def screen(self) -> list[str]:
        screen = pyte.Screen(self.columns, HEIGHT)
        pyte.ByteStream(screen).feed(self.written)
        return [line.rstrip() for line in screen.display if line.strip()]


def shown(monkeypatch, columns, term="xterm-256color", expect=None, **settings):
    """Return screen and bytes of a run whose standard error is a terminal."""
    terminal = Terminal(columns)
    monkeypatch.setenv("TERM", term)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(terminal.follower), "w", buffering=1))
    callbacks = [RolloutProgress(), *settings.pop("callbacks", [])]
    try:
        if expect:
            with pytest.raises(expect):
                fit(callbacks=callbacks, **settings)
        else:
            fit(callbacks=callbacks, **{"rollouts": 6, "v": 3, "i": 2} | settings)
    finally:
        sys.stderr.close()
        monkeypatch.undo()
        raw = terminal.end()
    return terminal.screen(), raw


def test_a_wide_terminal(monkeypatch):
    screen, raw = shown(monkeypatch, 100, trainer={"enable_progress_bar": True})
    assert re.fullmatch(r"done +━+ +6/6 rollouts  0:\d\d", screen[0])
    assert re.fullmatch(r" {16}reward 0\.\d{3}  lag 5  [\d,]+ tokens/s", screen[1])
    assert len(screen) == 2
    for stage in ("sync", "generate", "score", "update"):
        assert stage in raw, stage
    assert "starting the engine and sending it the weights" in raw
    assert re.search(r"\d:\d\d left", raw)
    assert raw.rstrip().endswith("\x1b[?25h"), "the cursor is visible again"


def test_a_narrow_terminal_has_no_bar(monkeypatch):
    screen, _ = shown(monkeypatch, 30, trainer={"enable_progress_bar": True})
    assert re.fullmatch(r"done  6/6  0:\d\d", screen[0])
    assert re.fullmatch(r"reward 0\.\d{3} lag 5 [\d,]+ tokens/s", re.sub(r"\s+", " ", " ".join(screen[1:])))


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_without_control_codes_gets_plain_lines(monkeypatch, capsys, term):
    screen, raw = shown(monkeypatch, 100, term, trainer={"enable_progress_bar": True})
    assert (screen, raw) == ([], "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert re.fullmatch(r"step 12/12  \d+ s  reward 0\.\d{3}  lag 5  [\d,]+ tokens/s", lines[-1])
    assert "\x1b" not in "".join(lines)


def test_the_number_of_lines_without_a_terminal(capsys):
    fit(rollouts=12, callbacks=[RolloutProgress(lines=3)], trainer={"enable_progress_bar": True})
    captured = capsys.readouterr()
    assert [line.split()[1] for line in captured.out.splitlines()] == ["4/12", "8/12", "12/12"]
    assert "\x1b" not in captured.err
    fit(rollouts=3, callbacks=[RolloutProgress(lines=0)], trainer={"enable_progress_bar": True})
    assert capsys.readouterr().out == ""


def test_slow_stages_before_the_first_step_are_named_without_a_terminal(monkeypatch, capsys):
    named = threading.Event()

    class SlowSync(RolloutCallback):
        def on_stage(self, trainer, pl_module, stage):
            if stage == "sync" and trainer.global_step == 0:
                assert named.wait(60)

    class Progress(RolloutProgress):
        def _print_waiting(self):
            super()._print_waiting()
            named.set()

    monkeypatch.setattr("lgrpo.callbacks.progress.PATIENCE", 0.01)
    progress = Progress()
    fit(rollouts=2, v=1, callbacks=[progress, SlowSync()], trainer={"enable_progress_bar": True})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ s  starting the engine and sending it the weights …", lines[0])
    assert not any("starting" in line for line in lines[1:])
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/2", "2/2"]
    assert progress._notice is None


def test_log_messages_appear_above(monkeypatch):
    class Says(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, batch):
            if batch.rollout == 3:
                logger.warning("a log message")
                print("another message", file=sys.stderr)

    handler = logging.StreamHandler()
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)

    class Stream(RolloutCallback):  # like Lightning's handler, which holds the stream from import on
        def on_fit_start(self, trainer, pl_module):
            handler.setStream(sys.stderr)

    try:
        screen, _ = shown(monkeypatch, 100, callbacks=[Stream(), Says()], trainer={"enable_progress_bar": True})
    finally:
        logger.removeHandler(handler)
    assert screen[:2] == ["a log message", "another message"]
    assert screen[2].startswith("done ")
    assert len(screen) == 4


def test_an_error_restores_the_terminal(monkeypatch):
    class Breaks(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, batch):
            if batch.rollout == 2:
                raise RuntimeError("broken")

    screen, raw = shown(
        monkeypatch, 100, expect=RuntimeError, callbacks=[Breaks()], trainer={"enable_progress_bar": True}
    )
    assert screen[0].startswith("stopped ")
    assert "2/4 rollouts" in screen[0]
    assert raw.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("flag", "is_shown"), [("true", True), pytest.param("false", False, marks=pytest.mark.slow("starts the command"))]
)
def test_the_command_in_a_terminal_and_enable_progress_bar(tmp_path, flag, is_shown):
    config = Path(__file__).parents[2] / "configs" / "tiny.yaml"
    options = [
        f"--config={config}",
        "--data.num_rollouts=4",
        "--trainer.max_epochs=1",
        "--data.evaluation.num_problems=8",
    ]
    terminal = Terminal(100)
    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *options, f"--run={flag}"]
    command.append(f"--trainer.enable_progress_bar={flag}")
    environment = {**os.environ, "TERM": "xterm"}
    ends = {"stdin": terminal.follower, "stdout": terminal.follower, "stderr": terminal.follower}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **ends)
    code = process.wait(300)
    raw = terminal.end()
    assert code == 0, raw
    assert ("4/4 rollouts" in raw, "validate" in raw, "tokens/s" in raw) == (is_shown,) * 3
    assert "reward" not in raw or is_shown
    assert any(line.startswith("pass@1 0.") for line in terminal.screen())
