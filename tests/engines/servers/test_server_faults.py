"""Real vLLM servers that are killed, stopped, run out of memory, or are restarted.

All tests share two servers, and each leaves them working, except the last ones. Requests are seeded, so a prompt that
is sent again after a failure must have the same completions, to the token, as without the failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lgrpo import RolloutCallback, Sampling
from lgrpo.engines import EngineError, Faults, Timeouts, VLLMServerEngine
from lgrpo.engines.processes import start_process
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.weights import PolicyWeights
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, disturb, mismatch, prompts
from tests.test_in_flight import ROLLOUTS, check_probabilities, in_flight
from tests.test_partial import Weights

pytest.importorskip("vllm")

SAMPLING = Sampling(max_tokens=20)


@pytest.fixture
def engine(two_servers, policy):
    """Return the engine after a sync. Tests then change the policy: a restart must restore the weights of the sync."""
    requests_at_a_time, max_failures = two_servers.requests_at_a_time, two_servers.group.budget.max_failures
    two_servers.requests_at_a_time = 3  # so that many prompts are unanswered when the first answer arrives
    disturb(policy, 0.05)
    two_servers.load_weights(policy.weights(), step=len(two_servers.state.ledger))
    yield two_servers
    two_servers.requests_at_a_time, two_servers.group.budget.max_failures = requests_at_a_time, max_failures


def send_signal(server, number):
    os.killpg(server.process.pid, number)


def processes_of(folder):
    """Return the processes that were started from a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class OnGroup:
    """Callback that counts the calls per group, and runs an action at some total numbers of calls."""

    def __init__(self, actions):
        self.groups, self.count, self.actions = {}, Counter(), actions

    def __call__(self, index, group):
        self.groups[index] = group
        self.count[index] += 1
        self.actions.get(self.count.total(), lambda: None)()


def check(engine, policy, questions, expected, actions, **faults):
    """Check that a generation with failures equals the one before it and the one after it; return its warnings."""
    on_group, before = OnGroup(actions), replace(engine.faults)
    disturb(policy)
    with pytest.warns(UserWarning, match="recovering from failure 1 of at most") as warned:
        groups = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer, on_group)
    assert groups == expected
    assert on_group.groups == dict(enumerate(expected))
    assert set(on_group.count.values()) == {1}
    assert {(c.version, c.behaviour_step) for group in groups for c in group} == {
        (engine.state.version, engine.state.step)
    }
    assert engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer) == expected, "the restarted servers"
    assert engine.faults - before == Faults(**faults)
    assert engine.faults.recovery_seconds > 0
    return "\n".join(str(warning.message) for warning in warned)


def test_killed_and_out_of_memory_during_a_generation(policy, engine):
    """One server is killed, and the other continues alone until it runs out of memory too."""
    questions, (killed, exhausted) = prompts(policy, *TEXTS * 8), engine.group.servers
    expected = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    assert mismatch(policy, questions, expected) <= TOLERANCE
    actions = {1: lambda: send_signal(killed, signal.SIGKILL), 16: lambda: exhausted.rpc("exhaust_memory", 30)}
    messages = check(engine, policy, questions, expected, actions, num_failures=2, num_restarts=2)
    assert "you tried to allocate" in messages, "the end of the server's log"
    assert not {killed, exhausted} & set(engine.group.servers)
    for server in engine.group.servers:
        assert server.process.poll() is None
        assert "POST /v1/completions" in server.log.read_text(), "the restarted servers were used"


@pytest.mark.slow("starts servers")
def test_killed_with_syncs_in_flight(engine):
    """Completions of the killed server are sampled again, and no prompt is lost."""

    class Kill(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 3:
                send_signal(engine.group.servers[0], signal.SIGKILL)

    kept = Weights()
    with pytest.warns(UserWarning, match="recovering"):
        run = in_flight(lead=2, data={"engine": engine}, callbacks=[Kill(), kept], learning_rate=0.5)
    trained = [int(position) for batch in run.recorder.rollouts for position in batch.positions[::4]]
    assert trained == list(range(ROLLOUTS * 4))
    check_probabilities(run, kept)


@pytest.mark.slow("starts servers")
def test_killed_and_hung_during_a_sync(policy, engine):
    """Both fail while the weights are being written. They restart with the new weights."""
    killed, hung = engine.group.servers
    before, group = replace(engine.faults), engine.group

    def tensors():
        for number, pair in enumerate(policy.weights()):
            if number == 1:
                send_signal(killed, signal.SIGKILL)
                send_signal(hung, signal.SIGSTOP)
            yield pair

    disturb(policy)
    timeouts = group.timeouts
    group.timeouts, group.transfer.timeout = replace(timeouts, sync=8.0), 8.0
    with pytest.warns(UserWarning, match="recovering from failure 2 of at most 3"):
        record = engine.load_weights(PolicyWeights(config=policy.model.config, tensors=tensors), step=77)
    group.timeouts, group.transfer.timeout = timeouts, timeouts.sync
    assert (record.version, record.step) == (engine.state.version, 77)
    assert engine.faults - before == Faults(num_failures=2, num_restarts=2)
    assert not {killed, hung} & set(engine.group.servers)
    for server in engine.group.servers:
        assert server.rpc("lgrpo_version", 30) == {"version": record.version}
    questions = prompts(policy, *TEXTS)
    groups = engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    assert mismatch(policy, questions, groups) <= TOLERANCE


@pytest.fixture
def url_engine(engine, policy, monkeypatch):
    """Return an engine that finds the servers through ``urls`` and has synced other weights."""
    keys = {server.url: server.api_key for server in engine.group.servers}
    monkeypatch.setattr(  # servers of one user would share a key
        "lgrpo.engines.servers.launch.VLLMServer", lambda url, key: VLLMServer(url, keys[url])
    )
    url_engine = VLLMServerEngine(
        urls=list(keys), seeded=True, timeouts=Timeouts(hang=5.0, reconnect=1.0), requests_at_a_time=3
    )
    disturb(policy, 0.05)
    url_engine.load_weights(policy.weights(), step=1)
    yield url_engine
    url_engine.close()


@pytest.mark.slow("starts servers")
def test_a_server_of_urls_that_hangs_is_left_out_until_the_next_sync(policy, engine, url_engine):
    questions, hung = prompts(policy, *TEXTS * 8), engine.group.servers[0]
    expected = url_engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    on_group = OnGroup({1: lambda: send_signal(hung, signal.SIGSTOP)})
    with pytest.warns(UserWarning, match="recovering from failure 1 of at most 3"):
        assert url_engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer, on_group) == expected
    assert set(on_group.count.values()) == {1}
    url_engine.group.wait_for_restarts()
    assert [server.is_unavailable for server in url_engine.group.servers] == [True, False]
    assert url_engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer) == expected
    assert url_engine.faults == Faults(num_failures=1)
    send_signal(hung, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while not hung.is_up():
        assert time.monotonic() < deadline
    url_engine.load_weights(policy.weights(), step=2)
    assert [server.is_unavailable for server in url_engine.group.servers] == [False, False]
    assert mismatch(policy, questions, url_engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)) <= TOLERANCE


@pytest.mark.slow("starts servers")
def test_a_server_of_urls_that_is_restarted_gets_its_weights_again(policy, engine, url_engine):
    """It restarts with the weights it was first started from, which are different."""
    questions, server, group = prompts(policy, *TEXTS * 8), engine.group.servers[0], url_engine.group
    group.servers, group.timeouts = group.servers[:1], replace(group.timeouts, reconnect=300.0)
    expected = url_engine.generate(questions, 4, SAMPLING, 0, policy.tokenizer)
    entries = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)

    def restart():
        send_signal(server, signal.SIGKILL)
        server.process.wait()
        with server.log.open("w") as log:
            server.process = start_process(server.process.args, env=environment, stdout=log, stderr=log)

    check(url_engine, policy, questions, expected, {1: restart}, num_failures=1, num_restarts=1)
    assert group.servers[0].process is None


def test_more_failures_than_allowed(policy, engine, tmp_path, monkeypatch):
    """Every restarted server fails at once. The weights can still be saved."""
    failing = tmp_path / "failing"
    # slow, so that the threads of both servers have noticed that these are dead before the last failure
    failing.write_text("#!/bin/sh\nsleep 2\necho 'torch.OutOfMemoryError: out of memory'\nexit 3\n")
    failing.chmod(0o700)
    held, before = engine.state_dict(), replace(engine.faults)
    engine.group.budget.max_failures = 4
    for server in engine.group.servers:
        send_signal(server, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(failing))
        message = (
            r"failed 5 times(.|\n)*ended with exit code 3(.|\n)*OutOfMemoryError(.|\n)*max_num_seqs(.|\n)*ckpt_path"
        )
        with pytest.warns(UserWarning, match="failure 4 of at most 4"), pytest.raises(EngineError, match=message):
            engine.generate(prompts(policy, *TEXTS), 4, SAMPLING, 0, policy.tokenizer)
        engine.group.wait_for_restarts()
    assert (engine.faults - before).num_restarts == 0
    saved = engine.state_dict()
    assert saved["version"] == held["version"] == engine.state.ledger[-1].version
    assert all((saved["weights"][name] == tensor).all() for name, tensor in held["weights"].items())
    assert processes_of(engine.group.transfer.folder) == []


@pytest.mark.filterwarnings("ignore:recovering from failure")
def test_closed_while_servers_are_restarted(policy, failed_engine):
    """No process is left, and the generation raises an error."""
    engine, errors = failed_engine, []
    folder = engine.group.transfer.folder

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
def failed_engine(two_servers):
    """Return the engine as the previous test left it, with servers that have ended."""
    return two_servers
