"""``lgrpo play``: a checkpoint or a person plays an episode in the terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lgrpo.cli import main
from lgrpo.commands import INTERRUPTED
from lgrpo.commands.play_view import EpisodeView, shown_call
from lgrpo.environments import ToolEnvironment, TurnError
from lgrpo.policy import CausalPolicy
from lgrpo.report import read_series
from lgrpo.types import Completion, Prompt

ROOT = Path(__file__).parents[2]
SHORT = [
    "--data.num_rollouts=1",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--data.evaluation.num_samples=1",
    "--trainer.limit_val_batches=0",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step with the guessing game."""
    folder = tmp_path_factory.mktemp("play") / "run"
    main(["fit", f"--config={ROOT / 'configs' / 'guess_number.yaml'}", f"--run={folder}", *SHORT])
    return folder


def play(*args, capsys):
    main(["play", *map(str, args)])
    return capsys.readouterr().out


def test_the_shipped_calculator_trains_and_is_played(tmp_path, capsys):
    """The tool's results are observed: they are shown as such, and the call that the parser reads is named."""
    folder = tmp_path / "run"
    config = [f"--config={ROOT / 'configs' / 'calculator.yaml'}", f"--run={folder}"]
    main(["fit", *config, *SHORT, "--data.num_prompts=4"])
    assert {value for _, value in read_series(folder)["environment/failures"]} == {0.0}
    shown = play(folder, "--tokens", capsys=capsys)
    prompt = re.search(r"^prompt +(\d+\*\d+)=$", shown, re.MULTILINE)
    assert prompt, shown
    if call := re.search(r"^call +calculate\('([\d*]+)'\)$", shown, re.MULTILINE):
        assert re.search(rf"^observed +{eval(call[1])}=$", shown, re.MULTILINE), shown
    tokens = re.findall(r"^ +(\d+) +\d+  (sampled|observed) ", shown, re.MULTILINE)
    length = len(prompt[1]) + 1
    assert [int(index) for index, _ in tokens] == list(range(length, length + len(tokens)))
    counted = re.search(r"^tokens +(\d+) sampled, (\d+) observed$", shown, re.MULTILINE)
    assert counted
    kinds = [kind for _, kind in tokens]
    assert (kinds.count("sampled"), kinds.count("observed")) == (int(counted[1]), int(counted[2]))


def test_a_checkpoint_plays(run, capsys):
    shown = play(run, "--index=2", capsys=capsys)
    assert shown.startswith(
        "problem 2 of 5, checkpoint of step 1\nprompt    5.\n          (2 tokens)\nturn 1\nsampled "
    )
    assert "\x1b" not in shown
    assert play(run, "--index=2", capsys=capsys) == shown, "the tokens depend on the seed alone"
    others = {play(run, "--index=2", f"--seed={seed}", capsys=capsys) for seed in range(5, 9)}
    assert len(others) > 1
    assert "turn 2" not in play(run, "--turns=1", capsys=capsys)


def test_a_person_plays(run, capsys, monkeypatch):
    """Halving 1 to 5 always wins within three guesses; each guess is shown with its reward."""
    won = 0
    for guesses in ("3\n1\n2\n", "3\n4\n5\n", "3\n2\n1\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(guesses))
        shown = play(run, "--human", capsys=capsys)
        assert "sampled   3<eos>\n          (2 tokens)\n" in shown
        won += "the episode is over\nepisode\n" in shown and not shown.endswith("reward 0\n")
    assert won >= 1
    monkeypatch.setattr("sys.stdin", io.StringIO("nonsense\n"))
    shown = play(run, "--human", capsys=capsys)
    assert "error     no_move: no number in 'nonsense'\nreward    0\nobserved  Answer with one number.\n" in shown
    assert shown.endswith("turn 2\nThe input has ended, and so has the episode.\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["RUN", "--index=5"], "--index is 5, but the run has 5 problems: 0 to 4"),
        (["RUN", "--turns=0"], "--turns is 0; it must be at least 1"),
        (["nowhere.ckpt"], "there is no checkpoint at nowhere.ckpt"),
    ],
)
def test_mistakes(run, args, message):
    with pytest.raises(SystemExit) as stopped:
        main(["play", *(arg.replace("RUN", str(run)) for arg in args)])
    assert str(stopped.value).startswith("lgrpo: ")
    assert message in str(stopped.value)


def test_a_run_without_an_environment(tmp_path):
    folder = tmp_path / "run"
    main(["fit", f"--config={ROOT / 'configs' / 'tiny.yaml'}", f"--run={folder}", *SHORT])
    with pytest.raises(SystemExit, match=r"has no environment \(its engine is TransformersEngine\), so there is noth"):
        main(["play", str(folder)])


def test_the_view_escapes_control_characters_and_shows_calls():
    out = io.StringIO()
    policy = CausalPolicy(config={"model_type": "qwen2"}, characters="ab[]()\x1b\n1")
    view = EpisodeView(out)
    view.tokenizer, view.tools = policy.tokenizer, ToolEnvironment(tools=[abs_value], parser="python")
    view.begin(Prompt(token_ids=[2], text="a\x1b[31m", row={}, position=0), "problem")
    view.observe([2])
    text = "[ab(1)]"
    ids = policy.tokenizer(text).input_ids
    view.sample(
        Completion(token_ids=ids, logprobs=[-0.5] * len(ids), text=text, finish_reason="length", behaviour_step=0)
    )
    view.called(text)
    assert "a\\x1b[31m" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert "sampled   [ab(1)]\n          (7 tokens, log-probability -3.50, cut at the limit)\ncall      ab(1)\n" in (
        out.getvalue()
    )
    assert shown_call(TurnError("malformed_call", "a call is empty")) == "unreadable (a call is empty)"


def abs_value(number: int) -> int:
    """Return the absolute value.

    Args:
        number: Number.
    """
    return abs(number)


class Terminal:
    """``lgrpo play`` on a terminal of its own."""

    def __init__(self, *args):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "lgrpo.cli", "play", *map(str, args)]
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text, limit=300):
        deadline = time.monotonic() + limit
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.shown}"
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the process has closed the terminal
                data = b""
            assert data or text in self.shown, f"{text!r} did not come: {self.shown}"
            self.shown += data.decode().replace("\r\n", "\n")

    def write(self, text):
        self.shown = ""
        os.write(self.master, text.encode())

    def end(self):
        code = self.process.wait(300)
        os.close(self.master)
        return code


@pytest.mark.slow("starts the command for each case")
class TestTerminal:
    def test_a_person_plays_and_leaves(self, run):
        terminal = Terminal(run, "--human")
        terminal.read_until("your turn> ")
        assert "\x1b[1mturn 1\x1b[0m" in terminal.shown
        terminal.write("x\n")
        terminal.read_until("your turn> ")
        assert "\x1b[32mx<eos>\x1b[0m" in terminal.shown.replace("<pad>", "x")
        assert "\x1b[36mAnswer with one number.\x1b[0m" in terminal.shown
        terminal.write("\x04")
        terminal.read_until("The input has ended")
        assert terminal.end() == 0

    def test_ctrl_c(self, run):
        terminal = Terminal(run, "--pause")
        terminal.read_until("Enter for the next turn ")
        terminal.write("\n")
        terminal.read_until("sampled")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.read_until("Interrupted.")
        assert terminal.end() == INTERRUPTED
        assert "Traceback" not in terminal.shown

    def test_without_a_terminal(self, run):
        command = [sys.executable, "-m", "lgrpo.cli", "play", str(run), "--pause"]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "Enter" not in done.stdout
        assert "\x1b" not in done.stdout
        assert re.search(r"^task +reward ", done.stdout, re.MULTILINE)


def test_dropped_observations_are_shown(tmp_path, capsys, monkeypatch):
    """The third turn of the game does not fit beside both observations: the first is replaced by a full stop."""
    folder = tmp_path / "run"
    settings = ["--data.sampling.max_tokens=18", "--data.num_prompts=4"]
    settings += [f"--data.engine.init_args.{setting}" for setting in ("max_contexts=2", "dropped_text=.")]
    main(["fit", f"--config={ROOT / 'configs' / 'guess_number.yaml'}", f"--run={folder}", *SHORT, *settings])
    for index in range(5):  # one of them is 5
        monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\n3\n"))
        shown = play(folder, "--human", "--tokens", f"--index={index}", capsys=capsys)
        if shown.count("observed  Higher.\n") == 2 and "turn 3" in shown:
            break
    second = shown[shown.index("turn 2") :]
    assert "observed  Higher.\n          (7 tokens, not trained on)\n" in second
    assert "\ndropped   earlier observations; the context is 6 tokens shorter\nturn 3\n" in second
    tokens = [int(line.split()[0]) for line in second.splitlines() if " observed " in line]
    assert tokens == list(range(2 + 2 + 1 + 2, 2 + 2 + 1 + 2 + 7)), "indices in the new context"
    assert "\ntokens    6 sampled, 14 observed\ndropped   1 observation, which later turns did not see\n" in second
    assert read_series(folder)["rollout/dropped_observations"]
