"""Episodes in worker processes: environments that hang, crash, flood and fork fail in their own episode only."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from lgrpo.environments import EpisodeFailure, EpisodeLimits, LocalEpisodes, Turn, WorkerEpisodes
from lgrpo.environments.episode_loop import EpisodeLoop
from lgrpo.environments.pool import EnvironmentForkServer
from lgrpo.rewards.workers import fork_server, worker
from tests.environments.hostile import (
    Escaping,
    HalfAsync,
    Hostile,
    Overlapping,
    Reused,
    Unloadable,
    Unpicklable,
    Varied,
    Waiting,
)
from tests.processes.alive import child_of, is_running, running, until_all_ended

LIMITS = EpisodeLimits(num_workers=4, timeout=3.0, memory_gib=0.5, output_mib=1.0)


@contextlib.contextmanager
def workers(environment, **limits):
    with contextlib.closing(WorkerEpisodes(environment, EpisodeLimits(**limits))) as episodes:
        yield episodes


@pytest.fixture(scope="module")
def hostile():
    with contextlib.closing(WorkerEpisodes(Hostile(), LIMITS)) as episodes:
        yield episodes


def failure(future):
    """Return the failure of a future."""
    with pytest.raises(EpisodeFailure) as info:
        future.result(60)
    return info.value


def descendants(pid):
    """Return the ids of all processes below a process."""
    found, new = set(), {pid}
    while new:
        new = {int(stat[0]) for stat in running() if int(stat[3]) in new} - found
        found |= new
    return found


FAILURES = [
    ("hang", "timeouts", "longer than 3 s"),
    ("hang in C", "timeouts", "longer than 3 s"),
    ("hang in a child", "timeouts", "longer than 3 s"),
    ("stop", "timeouts", "longer than 3 s"),
    ("exit", "crashes", "the process of Hostile ended during a"),
    ("sys.exit", "crashes", "the process of Hostile ended during a"),
    ("segfault", "crashes", "the process of Hostile ended during a"),
    ("write to the pipe", "crashes", "not an answer"),
    ("allocate", "memory", "MemoryError"),
    ("print", "output", "more than 1 MiB"),
    ("write a file", "output", "more than 1 MiB"),
    ("return too much", "output", "more than 1 MiB"),
    ("divide", "errors", "ZeroDivisionError: division by zero"),
    ("unprintable", "errors", "Unprintable"),
]
WRONG = [
    ("nan", "Hostile.step returned the reward nan; it must be a finite number"),
    ("a word as reward", "Hostile.step returned the reward '1'; it must be a finite number"),
    ("a word as done", "Hostile.step returned 'yes' as done; it must be True or False"),
    ("no turn", "Hostile.step returned 'text'; it must return a Turn"),
    ("a number as observation", "Hostile.step returned the observation 5; it must be a string or a list of messages"),
    ("a message without a role", "it must be a string or a list of messages with role and content"),
    ("a message that is not JSON", "which JSON cannot express"),
    ("words as errors", "Hostile.step returned the errors ['text']; they must be a list of TurnError"),
]


class TestFailures:
    @pytest.mark.parametrize(("text", "kind", "why"), FAILURES)
    def test_a_step_affects_only_its_own_episode(self, hostile, text, kind, why):
        resets = [hostile.reset(i, {"name": f"n{i}"}) for i in range(5)]
        assert [reset.result(60) for reset in resets] == [None] * 5
        first = [hostile.step(i, text if i == 2 else "a") for i in range(5)]
        seen = failure(first[2])
        assert (seen.kind, seen.method) == (kind, "step")
        assert why in str(seen)
        wait(first)
        second = [hostile.step(i, "b") for i in range(5)]
        assert failure(second[2]) is seen  # it has failed for good
        for i in (0, 1, 3, 4):
            assert first[i].result(60) == Turn(f"n{i}: a", 1.0, False, [])
            assert second[i].result(60) == Turn(f"n{i}: a b", 2.0, False, [])
        for i in range(5):
            hostile.end(i)

    @pytest.mark.parametrize("text", ["hang", "exit", "allocate", "print", "divide"])
    def test_a_reset_affects_only_its_own_episode(self, hostile, text):
        kind = {name: kind for name, kind, _ in FAILURES}[text]
        good, bad = hostile.reset("good", {"name": "g"}), hostile.reset("bad", {"reset": text})
        seen = failure(bad)
        assert (seen.kind, seen.method) == (kind, "reset")
        assert good.result(60) is None
        assert failure(hostile.step("bad", "a")) is seen
        assert hostile.reset("bad", {"name": "b", "observation": "now"}).result(60) == "now"  # it may begin again
        assert hostile.step("bad", "a").result(60).observation == "b: a"
        assert hostile.step("good", "a").result(60).observation == "g: a"
        hostile.end("good")
        hostile.end("bad")

    @pytest.mark.parametrize(("text", "why"), WRONG)
    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_wrong_results_are_named(self, hostile, text, why, place):
        with contextlib.closing(LocalEpisodes(Hostile())) as local:
            episodes = {"workers": hostile, "local": local}[place]
            episodes.reset(0, {}).result(60)
            seen = failure(episodes.step(0, text))
            episodes.end(0)
        assert seen.kind == "errors"
        assert why in str(seen)

    def test_truncate(self, hostile):
        for i, text in enumerate(["a", "a"]):
            hostile.reset(i, {}).result(60)
            hostile.step(i, text).result(60)
        assert hostile.truncate(0).result(60) == -1.0
        hostile.end(0)
        hostile.end(1)

    def test_a_worker_that_dies_between_steps_fails_its_episode(self, hostile):
        hostile.reset(0, {}).result(60)
        os.kill(child_of(hostile._pool.episodes[0].worker.pid), signal.SIGKILL)
        time.sleep(0.5)
        seen = failure(hostile.step(0, "a"))
        assert seen.kind == "crashes"
        assert str(seen) == "the process of Hostile ended between two steps"
        hostile.end(0)

    def test_a_large_text_to_a_stopped_worker_blocks_no_other(self, hostile):
        for i in (0, 1):
            hostile.reset(i, {}).result(60)
        os.kill(child_of(hostile._pool.episodes[0].worker.pid), signal.SIGSTOP)
        stopped, other = hostile.step(0, "x" * 10**7), hostile.step(1, "a")
        assert other.result(60).observation == ": a"
        assert not stopped.done()
        assert failure(stopped).kind == "timeouts"
        hostile.end(0)
        hostile.end(1)

    def test_a_large_row_arrives(self, hostile):
        text = "x" * 900_000
        assert hostile.reset(0, {"observation": text, "unused": "y" * 10**7}).result(60) == text
        hostile.end(0)

    def test_a_row_that_cannot_be_pickled_fails_its_episode(self, hostile):
        seen = failure(hostile.reset(0, {"lock": threading.Lock()}))
        assert seen.kind == "errors"
        assert "cannot be sent to another process" in str(seen)
        hostile.end(0)

    def test_failures_can_be_pickled(self):
        copy = pickle.loads(pickle.dumps(EpisodeFailure("memory", "why", "reset")))
        assert (copy.kind, str(copy), copy.method) == ("memory", "why", "reset")


class TestForks:
    @pytest.mark.parametrize("text", ["fork", "fork bomb"])
    def test_answers_of_forked_processes_are_ignored(self, hostile, text):
        for i in range(3):
            hostile.reset(i, {}).result(60)
        forked = [hostile.step(i, text) for i in range(3)]
        assert [future.result(60).reward for future in forked] == [1.0] * 3
        later = [hostile.step(i, "a") for i in range(3)]
        assert [future.result(60).observation for future in later] == [f": {text} a"] * 3
        for i in range(3):
            hostile.end(i)

    def test_a_process_that_is_left_behind_ends_with_its_episode(self, tmp_path):
        path = tmp_path / "pids"
        with workers(Escaping(str(path))) as episodes:
            episodes.reset(0, {}).result(60)
            first = episodes.step(0, "leave").result(60).observation
            while not path.exists() or not path.read_text().endswith("\n"):
                time.sleep(0.05)
            left = int(path.read_text())
            assert episodes.step(0, "stay").result(60).observation == first
            assert is_running(left)  # the episode may still use it
            episodes.end(0)
            assert until_all_ended(lambda stat: int(stat[0]) in (left, int(first)))
            episodes.reset(0, {}).result(60)
            assert episodes.step(0, "stay").result(60).observation != first

    def test_close_ends_processes_that_were_left_behind(self, tmp_path):
        path = tmp_path / "pids"
        with workers(Escaping(str(path))) as episodes:
            episodes.reset(0, {}).result(60)
            episodes.step(0, "leave").result(60)
            while not path.exists() or not path.read_text().endswith("\n"):
                time.sleep(0.05)
        assert not is_running(int(path.read_text()))


class TestState:
    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_is_kept_over_steps_and_separate_between_episodes(self, hostile, place):
        with contextlib.closing(LocalEpisodes(Hostile())) as local:
            episodes = {"workers": hostile, "local": local}[place]
            resets = [episodes.reset(i, {"name": f"n{i}", "observation": f"o{i}"}) for i in range(20)]
            assert [reset.result(60) for reset in resets] == [f"o{i}" for i in range(20)]
            for n in range(3):
                steps = [episodes.step(i, f"t{i}{n}") for i in range(20)]
                expected = [f"n{i}: " + " ".join(f"t{i}{m}" for m in range(n + 1)) for i in range(20)]
                assert [step.result(60).observation for step in steps] == expected
            for i in range(20):
                episodes.end(i)

    def test_calls_of_many_threads(self, hostile):
        def play(i):
            hostile.reset(i, {"name": str(i)}).result(60)
            turns = [hostile.step(i, "x").result(60) for _ in range(5)]
            hostile.end(i)
            return turns[-1]

        with ThreadPoolExecutor(16) as threads:
            turns = list(threads.map(play, range(48)))
        assert turns == [Turn(f"{i}: x x x x x", 5.0, False, []) for i in range(48)]

    def test_processes_are_reused(self):
        with workers(Reused()) as episodes:
            seen = []
            for i in range(3):
                seen.append(episodes.reset(i, {}).result(60).split())
                episodes.end(i)
        assert len({pid for pid, _ in seen}) == 1
        assert [count for _, count in seen] == ["1", "2", "3"]

    @pytest.mark.parametrize("text", ["exit", "divide", "hang", "allocate"])
    def test_a_reset_that_fails_in_a_reused_process_is_repeated_in_a_new_one(self, text):
        with workers(Reused(), timeout=3.0, memory_gib=0.5) as episodes:
            first = episodes.reset(0, {"again": text}).result(60).split()
            episodes.end(0)
            second = episodes.reset(1, {"again": text}).result(60).split()
        assert first[0] != second[0]
        assert second[1] == "1"

    def test_a_process_with_little_memory_left_is_not_reused(self):
        with workers(Reused(), memory_gib=0.25) as episodes:
            seen = []
            for i in range(12):
                seen.append(episodes.reset(i, {"keep": 2**25}).result(60).split())
                episodes.end(i)
        assert len({pid for pid, _ in seen}) > 1
        assert 1 < max(int(count) for _, count in seen) < 6  # it could hold 7 times 32 MiB

    def test_a_reset_begins_a_live_episode_again(self, hostile):
        for _ in range(2):
            hostile.reset(0, {"name": "n"}).result(60)
            assert hostile.step(0, "a").result(60).observation == "n: a"
        hostile.end(0)


class TestSlots:
    def test_at_most_num_workers_steps_run_at_the_same_time(self, tmp_path):
        with workers(Overlapping(tmp_path, 0.2), num_workers=3) as episodes:
            wait([episodes.reset(i, {}) for i in range(12)])
            counts = [future.result(60).reward for future in [episodes.step(i, "") for i in range(12)]]
        assert max(counts) == 3

    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_async_steps_that_wait_do_not_count(self, place):
        """There is one slot, and a step that waits for long."""
        limits = EpisodeLimits(num_workers=1, timeout=60.0)
        environment = Waiting(seconds=1.0)
        episodes = WorkerEpisodes(environment, limits) if place == "workers" else LocalEpisodes(environment, 1)
        with contextlib.closing(episodes):
            resets = [episodes.reset(i, {"name": str(i)}) for i in range(16)]
            assert [reset.result(60) for reset in resets] == [str(i) for i in range(16)]
            hanging = episodes.step(0, "hang")
            assert [episodes.step(i, "a").result(60) for i in range(1, 3)] == [Turn("a", 0.0, False, [])] * 2
            assert not hanging.done()


class TestAsync:
    @pytest.fixture(scope="class")
    def waiting(self):
        with contextlib.closing(WorkerEpisodes(Waiting(), LIMITS)) as episodes:
            yield episodes

    @pytest.mark.parametrize(("text", "kind"), [("hang", "timeouts"), ("block", "timeouts"), ("divide", "errors")])
    def test_a_step_affects_only_its_own_episode(self, waiting, text, kind):
        for i in range(3):
            assert waiting.reset(i, {"name": str(i)}).result(60) == str(i)
        steps = [waiting.step(i, text if i == 1 else "a") for i in range(3)]
        assert failure(steps[1]).kind == kind
        assert [steps[i].result(60).observation for i in (0, 2)] == ["a", "a"]
        for i in range(3):
            waiting.end(i)

    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_tasks_continue_between_steps(self, waiting, place):
        """For example, a connection is kept alive while the model generates."""
        with contextlib.closing(LocalEpisodes(Waiting())) as local:
            episodes = {"workers": waiting, "local": local}[place]
            episodes.reset(0, {"name": ""}).result(60)
            before = episodes.step(0, "ticks").result(60).reward
            time.sleep(1.0)
            assert episodes.step(0, "ticks").result(60).reward >= before + 10
            episodes.end(0)

    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_sync_methods_may_use_an_event_loop(self, place):
        episodes = WorkerEpisodes(HalfAsync(), LIMITS) if place == "workers" else LocalEpisodes(HalfAsync())
        with contextlib.closing(episodes):
            for n in range(2):
                assert episodes.reset(0, {"name": "n"}).result(60) == "n"
                assert episodes.step(0, f"t{n}").result(60).observation == f"t{n}"
                episodes.end(0)


def test_both_kinds_of_episodes_give_equal_results():
    texts = ["a", "messages", "b", "errors", "divide", "c"]

    def play(episodes):
        results = []
        with contextlib.closing(episodes):
            for name in range(6):  # more than one episode per instance
                row = {"name": str(name), "observation": [{"role": "system", "content": "be"}] if name % 2 else None}
                calls = [episodes.reset(name, row)]
                for text in texts[name % 2 :]:
                    wait(calls)
                    calls.append(episodes.step(name, text))
                wait(calls)
                results += [repr(call.exception() or call.result()) for call in calls]
                episodes.end(name)
        return results

    in_workers, local = play(WorkerEpisodes(Varied(), LIMITS)), play(LocalEpisodes(Varied()))
    assert in_workers == local
    assert any("unknown_tool" in result for result in local)
    assert sum("ZeroDivisionError" in result for result in local) == 12


class TestMisuse:
    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_calls_in_a_wrong_order(self, place):
        episodes = WorkerEpisodes(Waiting(), LIMITS) if place == "workers" else LocalEpisodes(Waiting())
        with contextlib.closing(episodes):
            with pytest.raises(RuntimeError, match="episode 7 has not been reset"):
                episodes.step(7, "a").result(60)
            episodes.end(7)
            episodes.reset(7, {"name": ""}).result(60)
            episodes.step(7, "hang")
            with pytest.raises(RuntimeError, match="before its last result was known"):
                episodes.step(7, "a").result(60)

    @pytest.mark.parametrize("place", ["workers", "local"])
    def test_end_cancels_a_call(self, place):
        episodes = WorkerEpisodes(Waiting(), LIMITS) if place == "workers" else LocalEpisodes(Waiting())
        with contextlib.closing(episodes):
            episodes.reset(0, {"name": ""}).result(60)
            hanging = episodes.step(0, "hang")
            time.sleep(0.5)
            episodes.end(0)
            with pytest.raises(CancelledError):
                hanging.result(60)
            assert episodes.reset(0, {"name": "again"}).result(60) == "again"

    def test_a_cancelled_future_harms_nothing(self, hostile):
        hostile.reset(0, {}).result(60)
        hostile.step(0, "a").cancel()
        time.sleep(0.5)
        assert hostile.step(0, "b").result(60).observation == ": a b"
        hostile.end(0)

    @pytest.mark.parametrize("setting", ["num_workers", "timeout", "memory_gib", "output_mib"])
    def test_bad_limits_are_rejected(self, setting):
        with pytest.raises(ValueError, match=f"limits.{setting} is 0"):
            EpisodeLimits(**{setting: 0})

    @pytest.mark.parametrize(
        ("environment", "message"),
        [
            (Unloadable(), "Unloadable cannot be loaded in another process: ValueError"),
            (
                Unpicklable(),
                r"Unpicklable cannot be sent to another process .*set data.engine.limits to null",
            ),
        ],
    )
    def test_an_environment_that_cannot_be_sent_is_named(self, environment, message):
        with contextlib.closing(WorkerEpisodes(environment)) as episodes:
            for i in range(3):  # also after the thread has ended
                with pytest.raises(RuntimeError, match=message):
                    episodes.reset(i, {}).result(60)
                episodes.end(i)


class TestProcesses:
    def test_episodes_fail_with_a_killed_fork_server_and_new_ones_work(self):
        with workers(Hostile(), timeout=30.0) as episodes:
            for i in range(3):
                episodes.reset(i, {}).result(60)
            running = episodes.step(0, "hang")
            time.sleep(0.2)
            episodes._pool.fork_server.process.kill()
            seen = failure(running)
            assert seen.kind == "crashes"
            assert str(seen) == "the process that starts the processes of Hostile was killed"
            assert [failure(episodes.step(i, "a")).kind for i in (0, 1, 2)] == ["crashes"] * 3
            assert episodes.reset(3, {"name": "n"}).result(60) is None
            assert episodes.step(3, "a").result(60).observation == "n: a"

    def test_a_hanging_fork_server_is_replaced(self, monkeypatch):
        monkeypatch.setattr(fork_server, "_FORK_TIMEOUT", 1.0)
        with workers(Hostile()) as episodes:
            episodes.reset(0, {}).result(60)
            os.kill(episodes._pool.fork_server.process.pid, signal.SIGSTOP)
            assert episodes.reset(1, {"observation": "o"}).result(60) == "o"
            assert failure(episodes.step(0, "a")).kind == "crashes"

    def test_a_system_without_more_processes_is_named(self, monkeypatch):
        def refuse():
            raise BlockingIOError

        monkeypatch.setattr(worker.os, "fork", refuse)
        monkeypatch.setattr(worker, "end_supervisors", lambda: None)
        server = EnvironmentForkServer(Hostile(), EpisodeLoop, LIMITS)
        server._channel, theirs = socket.socketpair()
        server._channel.settimeout(10.0)
        server.process = subprocess.Popen(["true"])
        thread = threading.Thread(target=worker.fork_workers, args=(theirs, None))
        thread.start()
        with pytest.raises(RuntimeError, match="the system starts no more processes for environment workers"):
            server.fork_worker()
        server.close()
        thread.join()
        theirs.close()

    def test_close_leaves_no_process(self):
        with workers(Hostile(), timeout=60.0) as episodes:
            wait([episodes.reset(i, {}) for i in range(4)])
            calls = [episodes.step(0, "hang"), episodes.step(1, "hang in a child")]
            episodes.end(2)
            time.sleep(0.5)
            server = episodes._pool.fork_server.process.pid
            pids = {server} | descendants(server)
            assert len(pids) >= 1 + 2 * 4
        for call in calls:
            with pytest.raises(RuntimeError, match="the episodes of Hostile are closed"):
                call.result(60)
        assert not [pid for pid in pids if is_running(pid)]

    @pytest.mark.slow("waits for processes to end")
    def test_a_killed_trainer_leaves_no_process(self):
        code = (
            "import time\n"
            "from concurrent.futures import wait\n"
            "from lgrpo.environments import EpisodeLimits, WorkerEpisodes\n"
            "from tests.environments.hostile import Hostile\n"
            "episodes = WorkerEpisodes(Hostile(), EpisodeLimits(timeout=1000.0))\n"
            "wait([episodes.reset(i, {}) for i in range(4)])\n"
            "calls = [episodes.step(0, 'hang'), episodes.step(1, 'hang in C'), episodes.step(2, 'hang in a child')]\n"
            "time.sleep(1)\n"
            "print(episodes._pool.fork_server.process.pid, flush=True)\n"
            "time.sleep(1000)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            server = int(process.stdout.readline())
            pids = {server} | descendants(server)
            assert len(pids) >= 1 + 2 * 4
            process.kill()
        assert until_all_ended(lambda stat: int(stat[0]) in pids)

    @pytest.mark.slow("starts 128 processes")
    def test_many_live_episodes(self, hostile):
        resets = [hostile.reset(i, {"name": str(i)}) for i in range(64)]
        assert [reset.result(60) for reset in resets] == [None] * 64
        steps = [hostile.step(i, "exit" if i % 8 == 0 else "a") for i in range(64)]
        assert [step.exception(60) is not None for step in steps] == [i % 8 == 0 for i in range(64)]
        for i in range(64):
            hostile.end(i)

    def test_workers_start_without_heavy_imports(self):
        heavy = {"torch", "lightning", "transformers"}
        code = f"import sys, lgrpo.environments.episode_loop; print({heavy} & sys.modules.keys())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "set()", done.stdout + done.stderr

    @pytest.mark.slow("starts a script that starts workers")
    def test_environment_of_a_script_without_a_main_guard_runs(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "from lgrpo.environments import Environment, Turn, WorkerEpisodes\n"
            "print('once')\n"
            "FACTOR = 2.0\n"
            "class Mine(Environment):\n"
            "    def reset(self, row):\n"
            "        return row['a']\n"
            "    def step(self, text):\n"
            "        return Turn(text, FACTOR)\n"
            "episodes = WorkerEpisodes(Mine())\n"
            "print(episodes.reset(0, {'a': 'b'}).result(), episodes.step(0, 'c').result().reward)\n"
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
        assert done.stdout.split("\n")[:2] == ["once", "b 2.0"], done.stderr


def test_idle_processes_are_limited():
    with workers(Varied(), num_workers=4, max_idle=2) as episodes:
        for future in [episodes.reset(number, {}) for number in range(5)]:
            future.result(60)
        for number in range(5):
            episodes.end(number)
        episodes.reset("later", {}).result(60)  # ends are in order with it
        assert len(episodes._pool.idle) == 1


def test_a_step_after_close_starts_nothing():
    episodes = WorkerEpisodes(Varied(), LIMITS)
    for method, arguments in (("step", ["text"]), ("truncate", [])):
        with pytest.raises(RuntimeError, match=r"episode 'early' has not been reset, or was closed"):
            getattr(episodes, method)("early", *arguments).result(60)
    episodes.reset("early", {}).result(60)
    episodes.close()
    for call in (lambda: episodes.step("early", "text"), lambda: episodes.reset("late", {})):
        with pytest.raises(RuntimeError, match=r"or was closed"):
            call().result(60)
    assert episodes._pool is None
