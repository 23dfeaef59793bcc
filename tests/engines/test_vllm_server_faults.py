"""Real vLLM servers that are really broken, killed, stopped, exhausted, started again.

The servers are shared, and each test leaves them working, but for the last ones. Samples are seeded, so an answer that
was lost and asked for again must equal, to the token, that of a generation nothing happened to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from lgrpo import Sampling
from lgrpo.engines import EngineError, VLLMServerEngine
from lgrpo.engines.children import start_process
from lgrpo.engines.server import VLLMServer
from lgrpo.types import PolicyWeights
from tests.engines.test_vllm import TEXTS, TOLERANCE, disturb, mismatch, prompts

pytest.importorskip("vllm")

SAMPLING = Sampling(max_tokens=20)


@pytest.fixture
def engine(two_servers, policy):
    """Given the policy, which moves on after that: what comes back after a failure must not be the policy of then."""
    names = ("hang_timeout", "sync_timeout", "max_failures", "requests_at_a_time")
    before = {name: getattr(two_servers, name) for name in names}
    two_servers.requests_at_a_time = 3  # so that at the first answer there is much left to do
    disturb(policy, 0.05)
    two_servers.load_weights(policy.weights(), step=len(two_servers.ledger))
    yield two_servers
    for name, value in before.items():
        setattr(two_servers, name, value)


def signal_to(server, number):
    os.killpg(server.process.pid, number)


def processes_of(folder):
    """Those that were started from a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class Told:
    """Notes which group came how often, and does something when so many have come."""

    def __init__(self, do):
        self.groups, self.count, self.do = {}, Counter(), do

    def __call__(self, place, group):
        self.groups[place] = group
        self.count[place] += 1
        self.do.get(self.count.total(), lambda: None)()


def check(engine, policy, questions, expected, do, **faults):
    """A generation to which something is done equals the one before, and the one after."""
    told, before = Told(do), Counter(engine.faults)
    disturb(policy)
    with pytest.warns(UserWarning, match="recovering from failure 1 of at most") as warned:
        groups = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer, told)
    assert groups == expected
    assert told.groups == dict(enumerate(expected))
    assert set(told.count.values()) == {1}
    assert {(c.version, c.behaviour_step) for group in groups for c in group} == {(engine.version, engine.step)}
    assert engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer) == expected, "the ones in their places"
    assert engine.faults - before == Counter(faults)
    assert engine.recovery_seconds > 0
    return "\n".join(str(warning.message) for warning in warned)


def test_killed_and_out_of_memory_while_they_generate(policy, engine):
    """First one is killed, and the other goes on alone, until it runs out of memory too."""
    questions, (killed, exhausted) = prompts(policy, *TEXTS * 8), engine.servers
    expected = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    assert mismatch(policy, questions, expected) <= TOLERANCE
    do = {1: lambda: signal_to(killed, signal.SIGKILL), 16: lambda: exhausted.rpc("exhaust_memory", 30)}
    messages = check(engine, policy, questions, expected, do, failures=2, restarts=2)
    assert "you tried to allocate" in messages, "the end of the server's log"
    assert not {killed, exhausted} & set(engine.servers)
    for server in engine.servers:
        assert server.process.poll() is None
        assert "POST /v1/completions" in server.log.read_text(), "the ones in their places were asked"


def test_killed_and_hung_while_they_are_synced(policy, engine):
    """In the middle of it, when the weights are being written. They start from the new ones."""
    killed, hung = engine.servers
    before = Counter(engine.faults)

    def tensors():
        for number, pair in enumerate(policy.weights()):
            if number == 1:
                signal_to(killed, signal.SIGKILL)
                signal_to(hung, signal.SIGSTOP)
            yield pair

    disturb(policy)
    engine.sync_timeout = engine._transfer.timeout = 8.0
    with pytest.warns(UserWarning, match="recovering from failure 2 of at most 3"):
        record = engine.load_weights(PolicyWeights(config=policy.model.config, tensors=tensors), step=77)
    engine._transfer.timeout = 300.0
    assert (record.version, record.step) == (engine.version, 77)
    assert engine.faults - before == Counter(failures=2, restarts=2)
    assert not {killed, hung} & set(engine.servers)
    for server in engine.servers:
        assert server.rpc("lgrpo_version", 30) == {"version": record.version}
    questions = prompts(policy, *TEXTS)
    groups = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    assert mismatch(policy, questions, groups) <= TOLERANCE


@pytest.fixture
def users(engine, policy, monkeypatch):
    """An engine to which the servers are some that the user runs, and which has other weights."""
    keys = {server.url: server.api_key for server in engine.servers}
    monkeypatch.setattr(  # a user's servers would share one key
        "lgrpo.engines.vllm_server.VLLMServer", lambda url, key: VLLMServer(url, keys[url])
    )
    users = VLLMServerEngine(urls=list(keys), seeded=True, hang_timeout=5.0, return_timeout=1.0, requests_at_a_time=3)
    disturb(policy, 0.05)
    users.load_weights(policy.weights(), step=1)
    yield users
    users.close()


def test_a_server_of_the_users_that_hangs_is_left_out_until_the_next_sync(policy, engine, users):
    questions = prompts(policy, *TEXTS * 8)
    expected = users.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    told = Told({1: lambda: signal_to(engine.servers[0], signal.SIGSTOP)})
    with pytest.warns(UserWarning, match="recovering from failure 1 of at most 3"):
        assert users.generate(questions, 4, SAMPLING, 0, policy.tokenizer, told) == expected
    assert set(told.count.values()) == {1}
    users._settle()
    assert [server.is_given_up for server in users.servers] == [True, False]
    assert users.generate(questions, 4, SAMPLING, 0, policy.tokenizer) == expected
    assert users.faults == Counter(failures=1)
    signal_to(engine.servers[0], signal.SIGCONT)
    deadline = time.monotonic() + 60
    while not engine.servers[0].is_up():
        assert time.monotonic() < deadline
    users.load_weights(policy.weights(), step=2)
    assert [server.is_given_up for server in users.servers] == [False, False]
    assert mismatch(policy, questions, users.generate(questions, 4, SAMPLING, 0, policy.tokenizer)) <= TOLERANCE


def test_a_server_of_the_users_that_is_started_again_gets_its_weights_again(policy, engine, users):
    """It comes back with those it was started from, which are other ones."""
    questions, server = prompts(policy, *TEXTS * 8), engine.servers[0]
    users.servers, users.return_timeout = users.servers[:1], 300.0
    expected = users.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    entries = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)

    def start_again():
        signal_to(server, signal.SIGKILL)
        server.process.wait()
        with server.log.open("w") as log:
            server.process = start_process(server.process.args, env=environment, stdout=log, stderr=log)

    check(users, policy, questions, expected, {1: start_again}, failures=1, restarts=1)
    assert users.servers[0].process is None


def test_failing_again_and_again(policy, engine, tmp_path, monkeypatch):
    """Every server that is started dies. What they held can still be saved."""
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho 'torch.OutOfMemoryError: out of memory'\nexit 3\n")
    dying.chmod(0o700)
    held, before = engine.state_dict(), Counter(engine.faults)
    engine.max_failures = 4
    for server in engine.servers:
        signal_to(server, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(dying))
        message = (
            r"failed 5 times(.|\n)*ended with exit code 3(.|\n)*OutOfMemoryError(.|\n)*max_num_seqs(.|\n)*ckpt_path"
        )
        with pytest.warns(UserWarning, match="failure 4 of at most 4"), pytest.raises(EngineError, match=message):
            engine.generate(prompts(policy, *TEXTS), 4, SAMPLING, 0, policy.tokenizer)
        engine._settle()
    assert (engine.faults - before)["restarts"] == 0
    saved = engine.state_dict()
    assert saved["version"] == held["version"] == engine.ledger[-1].version
    assert all((saved["weights"][name] == tensor).all() for name, tensor in held["weights"].items())
    assert processes_of(engine._transfer.folder) == []


@pytest.mark.filterwarnings("ignore:recovering from failure")
def test_closed_while_a_server_is_being_replaced(policy, engine_in_ruins):
    """Nothing is left running, and the one who waits for samples is told."""
    engine, errors = engine_in_ruins, []
    folder = engine._transfer.folder

    def generate():
        try:
            engine.generate(prompts(policy, *TEXTS), 4, SAMPLING, 0, policy.tokenizer)
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    deadline = time.monotonic() + 60
    while len(processes_of(folder)) < 2:
        assert time.monotonic() < deadline
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert processes_of(folder) == []
    assert not folder.exists()


@pytest.fixture
def engine_in_ruins(two_servers):
    """As the test before left it."""
    return two_servers
