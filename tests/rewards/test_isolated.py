"""Rewards in processes of their own, against rewards that really hang, crash and hoard."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lgrpo import Completion, Prompt
from lgrpo.rewards import ExactMatch, Isolated, NumericMatch
from lgrpo.tasks import SortDigits
from tests.helpers import fit
from tests.rewards.hostile import Fussy, Hostile, Unloadable


def score(reward, *texts, answer="1"):
    prompts = [Prompt(text="", token_ids=[1], row={"answer": answer}, position=i) for i in range(len(texts))]
    completions = [
        Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0) for text in texts
    ]
    return list(reward(prompts, completions))


def until_nobody_lives(wanted, seconds=20):
    """Waits until no process is left that ``wanted`` (of its /proc/…/stat) and that is no zombie."""
    for _ in range(seconds * 10):
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        fields = [[s.split()[0], *s[s.rindex(")") :].split()] for s in stats]  # pid, ")", state, parent, group
        if not any(wanted(stat) and stat[2] not in "ZX" for stat in fields):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def isolated():
    reward = Isolated(Hostile(), num_workers=2, timeout=3.0, memory_gib=0.5, failure_score=-1.0)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("hang", "timeouts", "longer than 3 s"),
        ("hang in C", "timeouts", "longer than 3 s"),
        ("hang in a child", "timeouts", "longer than 3 s"),
        ("allocate", "errors", "MemoryError"),
        ("segfault", "crashes", "ended"),
        ("exit", "crashes", "ended"),
        ("raise", "errors", "RuntimeError: no score today"),
        ("nan", "errors", "not a finite number"),
        ("count", "errors", "2 rewards for 1 completions"),
        ("long error", "errors", "xxx"),
    ],
)
def test_what_goes_wrong_costs_its_own_completion_only(isolated, text, kind, why):
    scores = score(isolated, "a", "bb", text, "ccc", "dddd", "eeeee")
    assert scores == [1.0, 2.0, -1.0, 3.0, 4.0, 5.0]
    figures = isolated.report()
    assert figures["reward/failures"] == figures[f"reward/{kind}"] == 1.0
    assert why in isolated.last_error
    assert score(isolated, "a", "bb") == [1.0, 2.0]  # and it goes on
    assert isolated.report()["reward/failures"] == 0.0


def test_a_gigabyte_of_print_is_dropped(isolated):
    assert score(isolated, "print", "a") == [7.0, 1.0]


def test_everything_at_once(isolated):
    texts = ["hang", "a", "segfault", "bb", "nan", "raise", "exit", "ccc"] * 3
    expected = [-1.0, 1.0, -1.0, 2.0, -1.0, -1.0, -1.0, 3.0] * 3
    assert score(isolated, *texts) == expected
    figures = isolated.report()
    assert (figures["reward/timeouts"], figures["reward/crashes"], figures["reward/errors"]) == (3.0, 6.0, 6.0)


def test_what_is_killed_is_dead(isolated):
    score(isolated, "a", "bb")
    before = [worker.pid for worker in isolated._workers]
    score(isolated, "hang in a child")
    after = [worker.pid for worker in isolated._workers]
    (gone,) = set(before) - set(after)
    assert until_nobody_lives(lambda stat: int(stat[4]) == gone)  # the worker, and what it had started
    pids = [*after, isolated._nursery.pid]
    isolated.close()
    assert until_nobody_lives(lambda stat: int(stat[0]) in pids)
    assert score(isolated, "a") == [1.0]  # started again


def test_the_same_scores_as_without():
    texts = [f"so the answer is {n}" for n in range(40)]
    plain, isolated = NumericMatch(), Isolated(NumericMatch())
    assert score(isolated, *texts, answer="7") == score(plain, *texts, answer="7")
    assert isolated.required_fields() == {"answer"}
    isolated.close()


def test_a_reward_from_a_script_without_a_main_guard(tmp_path):
    """As in a notebook: the class lives in ``__main__``, and starting workers must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "from lgrpo.rewards import Isolated, Reward\n"
        "from lgrpo import Completion, Prompt\n"
        "print('once')\n"
        "class Mine(Reward):\n"
        "    def score(self, prompt, completion):\n"
        "        return len(completion.text) * 2.0\n"
        "reward = Isolated(Mine(), num_workers=1)\n"
        "prompt = Prompt(text='', token_ids=[1], row={}, position=0)\n"
        "answer = Completion(token_ids=[1], logprobs=[0.0], text='abc', finish_reason='stop', behaviour_step=0)\n"
        "print(reward([prompt], [answer]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["once", "[6.0]"], done.stderr


def test_a_trainer_that_is_killed_leaves_no_worker(tmp_path):
    code = (
        "import time\n"
        "from tests.rewards.test_isolated import Isolated, Hostile, score\n"
        "reward = Isolated(Hostile())\n"
        "score(reward, 'a', 'b')\n"
        "print(*[w.pid for w in reward._workers], reward._nursery.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert until_nobody_lives(lambda stat: int(stat[0]) in pids)


def test_in_a_run_the_metrics_say_how_many():
    reward = Isolated(Fussy(), failure_score=-1.0)
    run = fit(rollouts=2, data={"task": SortDigits(num_digits=2, num_held_out=20, reward=reward)})
    reward.close()
    for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
        failed = int((batch.rewards == -1).sum())
        assert 0 < failed < 16
        assert row["reward/failures"] == row["reward/errors"] == failed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"memory_gib": 0}, "memory_gib is 0"),
        ({"failure_score": float("nan")}, "finite number"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Isolated(ExactMatch(), **settings)


def test_a_reward_that_cannot_be_loaded_elsewhere():
    with pytest.raises(RuntimeError, match="Unloadable cannot be loaded in another process: ValueError"):
        score(Isolated(Unloadable()), "a")
