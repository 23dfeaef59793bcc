"""Isolated rewards that hang, crash and allocate too much memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from lgrpo import Completion, Prompt
from lgrpo.data import Evaluation
from lgrpo.rewards import NOT_YET, FailedScore, Isolated, NumericMatch, Scoring
from lgrpo.rewards.workers import fork_server
from lgrpo.tasks import SortDigits
from tests.helpers import fit
from tests.processes.alive import child_of, is_running, until_all_ended
from tests.rewards.hostile import (
    Escaping,
    Fussy,
    Hoarding,
    Hostile,
    HostileByDigit,
    Siblings,
    Unloadable,
    Unpicklable,
    Waiting,
)


def score(reward, *texts, answer="1"):
    prompts = [Prompt(text="", token_ids=[1], row={"answer": answer}, position=i) for i in range(len(texts))]
    completions = [
        Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0) for text in texts
    ]
    return list(reward(prompts, completions))


def kinds(scores):
    """Count the failed scores by the kind of failure."""
    return Counter(value.kind for value in scores if isinstance(value, FailedScore))


@pytest.fixture(scope="module")
def isolated():
    reward = Isolated(Hostile(), Scoring(num_workers=2, timeout=3.0, memory_gib=0.5, failure_score=-1.0))
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("hang", "timeouts", "longer than 3 s"),
        ("hang in C", "timeouts", "longer than 3 s"),
        ("hang in a child", "timeouts", "longer than 3 s"),
        ("allocate", "memory", "MemoryError"),
        ("segfault", "crashes", "ended"),
        ("exit", "crashes", "ended"),
        ("raise", "errors", "RuntimeError: no score today"),
        ("nan", "errors", "not a finite number"),
        ("count", "errors", "2 rewards for 1 completions"),
        ("long error", "errors", "xxx"),
        ("print", "output", "more than 16 MiB"),
        ("print in C", "output", "more than 16 MiB"),
        ("write a file", "output", "more than 16 MiB"),
    ],
)
def test_failure_affects_only_its_own_completion(isolated, text, kind, why):
    scores = score(isolated, "a", "bb", text, "ccc", "dddd", "eeeee")
    assert scores == [1.0, 2.0, -1.0, 3.0, 4.0, 5.0]
    assert kinds(scores) == {kind: 1}
    assert why in scores[2].why
    assert kinds(score(isolated, "a", "bb")) == {}  # later scores succeed


def test_workers_start_without_heavy_imports():
    """A process that imports torch takes seconds to start."""
    heavy = {"torch", "lightning", "transformers"}
    code = f"import sys, lgrpo.rewards.workers.worker; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_the_start_of_workers_is_announced(monkeypatch):
    reward = Isolated(NumericMatch(), Scoring(num_workers=1))
    messages = []
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_info", messages.append)
    score(reward, "1", "2")
    score(reward, "1")
    reward.close()
    assert messages == ["Starting 1 reward worker for NumericMatch."]


def test_many_jobs_during_a_restart_do_not_block(isolated):
    """More jobs are submitted than wake-up messages fit into the pipe."""
    scores = score(isolated, "exit", *["x"] * 20_000)
    assert kinds(scores) == {"crashes": 1}
    assert len(scores) == 20_001


def test_hanging_fork_server_is_replaced(monkeypatch):
    monkeypatch.setattr(fork_server, "_FORK_TIMEOUT", 1.0)
    reward = Isolated(Hostile(), Scoring(num_workers=1, timeout=3.0))
    try:
        assert score(reward, "a") == [1.0]
        os.kill(reward._pool.fork_server.process.pid, signal.SIGSTOP)
        assert kinds(score(reward, "exit", "bb")) == {"crashes": 1}
        assert score(reward, "ccc") == [3.0]
    finally:
        reward.close()


def test_fork_server_ends_with_a_trainer_killed_while_it_sends_the_reward():
    own, theirs = socket.socketpair()
    command = [sys.executable, "-m", "lgrpo.rewards.workers.worker", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        own.sendall(json.dumps([5_000_000, 10.0, 2**30, 2**20]).encode())
        own.recv(1)
        own.sendall(b"x" * 100_000)
        own.close()
        assert process.wait(30) == 0


def test_output_below_the_limit_is_discarded(isolated):
    assert score(isolated, *["print a little"] * 30) == [7.0] * 30


def test_concurrent_failures_are_counted_by_kind(isolated):
    texts = ["hang", "a", "segfault", "bb", "nan", "raise", "exit", "ccc"] * 3
    expected = [-1.0, 1.0, -1.0, 2.0, -1.0, -1.0, -1.0, 3.0] * 3
    scores = score(isolated, *texts)
    assert scores == expected
    assert kinds(scores) == {"timeouts": 3, "crashes": 6, "errors": 6}


def test_not_yet_is_passed_on(isolated):
    scores = score(isolated, "a", "not yet", "ccc")
    assert scores == [1.0, NOT_YET, 3.0]
    assert kinds(scores) == {}


def test_isolated_is_thread_safe(isolated):
    texts = [["x" * (1 + (i * j) % 50) for j in range(4)] for i in range(40)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda group: score(isolated, *group), texts))
    assert found == [[float(len(text)) for text in group] for group in texts]


def test_batch_reward_receives_whole_groups():
    reward = Isolated(Siblings(), Scoring(failure_score=-1.0))
    assert score(reward, "a", "b", "c") == [3.0, 3.0, 3.0]
    scores = score(reward, "a", "raise", "c")
    assert scores == [-1.0, -1.0, -1.0]
    assert kinds(scores) == {"errors": 3}
    reward.close()


class TestAsync:
    @pytest.fixture(scope="class")
    def reward(self):
        reward = Isolated(Waiting(), Scoring(num_workers=1, timeout=3.0, failure_score=-1.0))
        yield reward
        reward.close()

    def test_scores_run_concurrently(self, reward):
        texts = ["x" * n for n in range(1, 33)]
        assert score(reward, *texts) == [float(n) for n in range(1, 33)]
        assert score(reward, "how many at most?") == [float(Waiting.concurrency)]

    def test_hanging_or_raising_score_affects_only_itself(self, reward):
        scores = score(reward, "a", "hang", "ccc", "raise", "eeeee")
        assert scores == [1.0, -1.0, 3.0, -1.0, 5.0]
        assert kinds(scores) == {"timeouts": 1, "errors": 1}

    def test_score_that_blocks_the_event_loop_affects_only_itself(self, reward):
        scores = score(reward, "a", "block", "ccc", "dddd")
        assert scores == [1.0, -1.0, 3.0, 4.0]
        assert kinds(scores) == {"timeouts": 1}

    def test_blocked_worker_with_a_full_pipe_is_killed(self, reward):
        """A worker that does not read must not block the thread that would kill it."""
        prompts = [Prompt(text="x" * 10**6, token_ids=[1], row={}, position=i) for i in range(12)]
        texts = ["a", "block", *["ccc"] * 10]
        completions = [
            Completion(token_ids=[1], logprobs=[0.0], text=t, finish_reason="stop", behaviour_step=0) for t in texts
        ]
        assert list(reward(prompts, completions)) == [1.0, -1.0, *[3.0] * 10]

    def test_async_reward_works_without_workers(self):
        assert score(Waiting(), "a", "bb") == [1.0, 2.0]

        async def as_in_a_notebook():
            return score(Waiting(), "a", "bb")

        assert asyncio.run(as_in_a_notebook()) == [1.0, 2.0]


def test_death_of_an_idle_worker_affects_no_score(isolated):
    score(isolated, "a", "bb")
    for worker in isolated._pool.workers:
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert kinds(score(isolated, "a", "bb", "ccc")) == {}


def test_killed_fork_server_is_replaced(isolated):
    score(isolated, "a")
    isolated._pool.fork_server.process.kill()
    assert kinds(score(isolated, "a", "exit", "bb", "exit", "ccc")) == {"crashes": 2}
    assert score(isolated, "a", "bb") == [1.0, 2.0]


def test_worker_that_leaks_memory_is_replaced():
    reward = Isolated(Hoarding(), Scoring(num_workers=1, memory_gib=0.25))
    failed = [kinds(score(reward, "a")) for _ in range(12)]
    assert {"memory": 1} in failed
    assert failed.count({}) > 8
    reward.close()


def test_answer_of_a_forked_child_is_ignored(isolated):
    for _ in range(20):  # either of the two may read the next job first
        assert score(isolated, "fork", "a", "bb", "ccc") == [4.0, 1.0, 2.0, 3.0]


def test_killed_workers_leave_no_process(isolated):
    score(isolated, "a", "bb")
    before = {worker.pid: child_of(worker.pid) for worker in isolated._pool.workers}
    score(isolated, "hang in a child")
    after = [worker.pid for worker in isolated._pool.workers]
    (gone,) = set(before) - set(after)
    assert until_all_ended(lambda stat: int(stat[4]) in (gone, before[gone]))  # with the processes the worker started
    pids = [*after, *map(child_of, after), isolated._pool.fork_server.process.pid]
    isolated.close()
    assert until_all_ended(lambda stat: int(stat[0]) in pids)
    assert score(isolated, "a") == [1.0]  # the processes are started again


def test_isolated_scores_equal_direct_scores():
    texts = [f"so the answer is {n}" for n in range(40)]
    plain, isolated = NumericMatch(), Isolated(NumericMatch())
    assert score(isolated, *texts, answer="7") == score(plain, *texts, answer="7")
    assert isolated.required_fields() == {"answer"}
    isolated.close()


@pytest.mark.slow("starts a script that starts workers")
def test_reward_of_a_script_without_a_main_guard_runs(tmp_path):
    """As in a notebook, the class is in ``__main__``; starting workers must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "from lgrpo.rewards import Isolated, Reward, Scoring\n"
        "from lgrpo import Completion, Prompt\n"
        "import re\n"
        "FACTOR = 2.0\n"
        "print('once')\n"
        "def length(text):\n"
        "    return len(re.findall('.', text))\n"
        "class Mine(Reward):\n"
        "    def score(self, prompt, completion):\n"
        "        return length(completion.text) * FACTOR\n"
        "reward = Isolated(Mine(), Scoring(num_workers=1))\n"
        "prompt = Prompt(text='', token_ids=[1], row={}, position=0)\n"
        "answer = Completion(token_ids=[1], logprobs=[0.0], text='abc', finish_reason='stop', behaviour_step=0)\n"
        "print(reward([prompt], [answer]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["once", "[6.0]"], done.stderr


@pytest.mark.parametrize("text", ["nothing", "hang in C"])
@pytest.mark.slow("waits for processes to end")
def test_killed_trainer_leaves_no_worker(text):
    """No process is left that would end them."""
    code = (
        "import threading, time\n"
        "from tests.rewards.workers.test_isolated import Isolated, Hostile, Scoring, score\n"
        "reward = Isolated(Hostile(), Scoring(timeout=1000))\n"
        "score(reward, 'a', 'b')\n"
        f"threading.Thread(target=score, args=(reward, {text!r}, {text!r}), daemon=True).start()\n"
        "time.sleep(1)\n"
        "print(*[w.pid for w in reward._pool.workers], reward._pool.fork_server.process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert until_all_ended(lambda stat: int(stat[0]) in pids)


def test_run_logs_the_number_of_failures():
    reward = Isolated(Fussy(), Scoring(failure_score=-1.0))
    run = fit(rollouts=2, data={"task": SortDigits(num_digits=2, num_held_out=20, reward=reward)})
    reward.close()
    for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
        failed = int((batch.rewards == -1).sum())
        assert 0 < failed < 16
        assert row["reward/failures"] == row["reward/errors"] == failed


def test_validation_logs_the_number_of_failures(tmp_path):
    reward = Isolated(Fussy(), Scoring(failure_score=-1.0))
    evaluation = Evaluation(num_samples=2, results="jsonl")
    data = {"task": SortDigits(num_digits=2, num_held_out=20, reward=reward), "evaluation": evaluation}
    run = fit(rollouts=1, data=data, trainer={"limit_val_batches": 1.0, "default_root_dir": str(tmp_path)})
    reward.close()
    (path,) = (tmp_path / "evaluations").glob("*.jsonl")
    rewards = [reward for line in path.read_text().splitlines() for reward in json.loads(line)["rewards"]]
    assert len(rewards) == 40
    assert 0 < rewards.count(-1.0) < 40
    assert run.trainer.callback_metrics["val/reward_failures"] == rewards.count(-1.0)


def test_run_survives_every_kind_of_failure():
    reward = Isolated(HostileByDigit(), Scoring(timeout=2.0, memory_gib=0.5, failure_score=-1.0))
    with pytest.warns(UserWarning, match="the reward failed"):
        run = fit(
            rollouts=2,
            data={"task": SortDigits(num_digits=2, num_held_out=20, reward=reward), "num_prompts": 8},
        )
    reward.close()
    seen = Counter()
    for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
        sampled = [t[m].tolist() for t, m in zip(batch.tokens, batch.completion_mask, strict=True)]
        first = [text[:1] for text in run.data.tokenizer.batch_decode(sampled, skip_special_tokens=True)]
        expected = Counter(HostileByDigit.FAILURES[digit][1] for digit in first if digit in HostileByDigit.FAILURES)
        assert batch.failed.tolist() == [digit in HostileByDigit.FAILURES for digit in first]
        assert (batch.rewards[batch.failed] == -1).all()
        assert (batch.rewards[~batch.failed] >= 0).all()
        for kind in ("timeouts", "crashes", "memory", "output", "errors"):
            assert row[f"reward/{kind}"] == expected[kind], kind
        seen += expected
    assert set(seen) == {"timeouts", "crashes", "memory", "output", "errors"}
    assert run.trainer.global_step == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"memory_gib": 0}, "memory_gib is 0"),
        ({"output_mib": 0}, "output_mib is 0"),
        ({"failure_score": float("nan")}, "finite number"),
    ],
)
def test_bad_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Scoring(**settings)


def test_reward_that_cannot_be_unpickled_is_named():
    with pytest.raises(RuntimeError, match="Unloadable cannot be loaded in another process: ValueError"):
        score(Isolated(Unloadable()), "a")


def test_reward_that_cannot_be_pickled_is_named():
    """Every caller receives the reason, also after the pool has stopped."""
    reward = Isolated(Unpicklable())
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"Unpicklable cannot be sent to another process .*generator"):
            score(reward, "a", "b", "c")
    reward.close()


def test_a_row_that_cannot_be_pickled_is_an_error(isolated):
    (failed,) = score(isolated, "a", answer=(number for number in "12"))
    assert (failed, failed.kind) == (-1.0, "errors")
    assert "a row cannot be sent to the process of a reward: TypeError: cannot pickle 'generator'" in failed.why
    assert score(isolated, "a") == [1.0]


@pytest.mark.slow("waits for processes to end")
class TestEscapedProcesses:
    """A reward may fork and call ``setsid``: no signal to the worker's process group reaches such processes."""

    def escaped(self, path):
        """Return the ids of the three processes of a score."""
        pids = set()
        for _ in range(400):
            pids = {int(pid) for pid in path.read_text().split()} if path.exists() else set()
            if len(pids) == 3:
                path.unlink()
                return pids
            time.sleep(0.05)
        raise AssertionError(f"{len(pids)} of 3 processes have started")

    def running(self, pids):
        return {pid for pid in pids if is_running(pid)}

    @pytest.mark.parametrize(("text", "timeout"), [("hang", 3.0), ("exit", 60.0)])
    def test_end_with_their_worker(self, tmp_path, text, timeout):
        path = tmp_path / "pids"
        with contextlib.closing(Isolated(Escaping(str(path)), Scoring(num_workers=1, timeout=timeout))) as reward:
            assert score(reward, "daemon") == [1.0]
            of_the_worker = self.escaped(path)
            time.sleep(0.5)
            assert self.running(of_the_worker) == of_the_worker  # the worker may still use them
            assert kinds(score(reward, text)) == {"hang": {"timeouts": 1}, "exit": {"crashes": 1}}[text]
            of_the_worker |= self.escaped(path)
            assert until_all_ended(lambda stat: int(stat[0]) in of_the_worker)
            assert score(reward, "daemon") == [1.0]

    @pytest.mark.parametrize("text", ["daemon", "kill"])
    def test_end_before_close_returns(self, tmp_path, text):
        path = tmp_path / "pids"
        with contextlib.closing(Isolated(Escaping(str(path)), Scoring(num_workers=1, timeout=3.0))) as reward:
            score(reward, text)
            pids = self.escaped(path)
            assert self.running(pids) == pids
        assert not self.running(pids)

    @pytest.mark.parametrize("killed", ["trainer", "fork server"])
    def test_end_with_a_killed_process(self, tmp_path, killed):
        code = (
            "import time\n"
            "from tests.rewards.workers.test_isolated import Escaping, Isolated, Scoring, score\n"
            f"reward = Isolated(Escaping({str(tmp_path / 'pids')!r}), Scoring(num_workers=1))\n"
            "score(reward, 'daemon')\n"
            "print(reward._pool.fork_server.process.pid, flush=True)\n"
            "time.sleep(1000)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            server, pids = int(process.stdout.readline()), self.escaped(tmp_path / "pids")
            assert self.running(pids) == pids
            os.kill(process.pid if killed == "trainer" else server, signal.SIGKILL)
            have_ended = until_all_ended(lambda stat: int(stat[0]) in pids)
            process.kill()
        assert have_ended
