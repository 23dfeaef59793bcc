"""Real vLLM servers: samples, syncs, and errors at the start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from lightning.pytorch.loggers import CSVLogger

from lgrpo import Sampling
from lgrpo.cli import main
from lgrpo.data.partial import PartialRollouts
from lgrpo.engines import EngineError, Timeouts, VLLMServerEngine, WeightSyncError
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.launch import check_logprobs_mode
from tests.engines.conftest import build_policy
from tests.engines.episodes import check_continued_episodes, check_episodes, check_limits
from tests.engines.kept import check_kept
from tests.engines.partial import SAMPLING, TRUNCATED, check_continued
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, as_ids, check_resume, disturb, mismatch, prompts
from tests.environments.diaries import Uneven
from tests.helpers import fit, tiny_policy
from tests.processes.alive import running as running_processes
from tests.test_in_flight import check_probabilities, in_flight
from tests.test_partial import LONG, Weights, spans_of

pytest.importorskip("vllm")

CONFIGS, PRINT = Path(__file__).parents[3] / "configs", "--print_config"


@pytest.fixture(scope="module")
def engine(two_servers, policy):
    """Return the shared engine after a sync of this module's policy."""
    two_servers.load_weights(policy.weights(), step=3)
    return two_servers


@pytest.fixture
def running(engine, monkeypatch):
    """Return the URL of the first server as ``urls``, with its key in the environment."""
    monkeypatch.setenv("LGRPO_VLLM_API_KEY", engine.group.servers[0].api_key)
    return [engine.group.servers[0].url]


def test_logprobs_agree_before_and_after_a_sync_on_every_server(policy, engine):
    questions, first = prompts(policy, *TEXTS), engine.state.version
    for step in (3, 4):
        groups = engine.generate(questions, 5, Sampling(max_tokens=12), 0, policy.tokenizer)
        assert mismatch(policy, questions, groups) <= TOLERANCE
        assert {(c.behaviour_step, c.version) for group in groups for c in group} == {(step, first + step - 3)}
        if step == 3:
            disturb(policy)
            stale = engine.generate(questions, 5, Sampling(max_tokens=12), 0, policy.tokenizer)
            assert mismatch(policy, questions, stale) > 0.05
            engine.load_weights(policy.weights(), step=4)


def test_episodes(policy, engine):
    check_episodes(policy, engine, prompts(policy, *TEXTS), TOLERANCE)


def test_limits_of_prompts(policy, engine):
    check_limits(policy, engine, prompts(policy, *TEXTS))


def test_samples_do_not_depend_on_the_server(policy, engine):
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=10)
    forwards = as_ids(engine.generate(questions, 4, sampling, 7, policy.tokenizer))
    backwards = as_ids(engine.generate(questions[1:] + questions[:1], 4, sampling, 7, policy.tokenizer))
    assert forwards == backwards[-1:] + backwards[:-1]


def test_copies_of_a_prompt_draw_from_different_streams(policy, engine):
    first, second = engine.generate(prompts(policy, "12>", "12>"), 4, Sampling(max_tokens=10), 7, policy.tokenizer)
    assert as_ids([first]) != as_ids([second])


def test_both_servers_are_used(policy, engine):
    """Before tests with errors, which leave requests that are logged later."""
    before = [server.log.read_text().count("POST /v1/completions") for server in engine.group.servers]
    engine.generate(prompts(policy, *TEXTS * 4), 2, Sampling(max_tokens=8), 7, policy.tokenizer)
    after = [server.log.read_text().count("POST /v1/completions") for server in engine.group.servers]
    assert sum(after) - sum(before) == 4 * len(TEXTS)
    assert all(b > a for a, b in zip(before, after, strict=True))


def test_kept_tokens(policy, engine):
    check_kept(policy, engine, prompts(policy, *TEXTS), TOLERANCE)


def test_a_server_that_returns_too_few_logprobs(policy, engine, monkeypatch):
    monkeypatch.setattr("lgrpo.engines.vllm.requests.num_likeliest", lambda *_: 5000)
    with pytest.raises(
        EngineError, match=r"does not return 5000 log-probabilities .* start it with --max-logprobs 5000"
    ):
        engine.generate(prompts(policy, *TEXTS), 2, Sampling(top_k=4, max_tokens=6).with_kept(), 0, policy.tokenizer)


def test_the_files_are_the_behaviour_policy(policy, engine):
    held = engine.state_dict()["weights"]
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert oct(engine.group.transfer.folder.stat().st_mode)[-3:] == "700"


def test_every_route_requires_the_key(engine):
    url = engine.group.servers[0].url
    for method, path in (("POST", "/collective_rpc"), ("POST", "/pause"), ("GET", "/v1/models")):
        assert requests.request(method, url + path, json={}, timeout=10).status_code == 401
    with pytest.raises(EngineError, match="rejected the API key"):
        VLLMServer(url, "a wrong key").call("GET", "/v1/models", 10)
    assert url.startswith("http://127.0.0.1:")


def test_a_run_that_samples_while_it_trains(engine):
    run = fit(v=4, rollouts=8, data={"engine": engine})
    assert run.recorder.lags == [0, 1, 2, 3] * 2
    assert all(row["train/engine_mismatch_max"] <= TOLERANCE for row in run.logged if row["train/lag"] == 0)
    lead = fit(v=1, rollouts=6, data={"engine": engine, "lead": 1})
    assert lead.recorder.lags == [0, 1, 1, 1, 1, 1]
    exact = fit(v=1, rollouts=4, data={"engine": engine})
    assert exact.recorder.lags == [0] * 4


@pytest.fixture
def slow(engine):
    """Return the engine with servers that take a while for each token."""
    for seconds in (0.03, 0.0):
        for server in engine.group.servers:
            server.rpc("slow_down", 30, seconds=seconds)
        if seconds:
            yield engine


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED])
def test_continued_completions(policy, slow, sampling):
    slow.load_weights(policy.weights(), step=3)
    check_continued(slow, policy, prompts(policy, *TEXTS, *TEXTS), TOLERANCE, sampling=sampling)


def test_continued_episodes(policy, slow, tmp_path):
    slow.load_weights(policy.weights(), step=3)
    questions = prompts(policy, *TEXTS, *TEXTS)
    check_continued_episodes(policy, slow, questions, TOLERANCE, ["group"], tmp_path, environment=Uneven)


def test_partial_rollouts(slow):
    kept = Weights()
    data = {"engine": slow, "sampling": LONG, "partial": PartialRollouts(extra_prompts=8, max_spans=8)}
    run = fit(rollouts=5, v=1, data=data, callbacks=[kept])
    assert any(len(spans) > 1 for spans in spans_of(run))
    check_probabilities(run, kept)


def test_syncs_in_flight(slow):
    kept = Weights()
    run = in_flight(lead=2, data={"engine": slow}, callbacks=[kept], learning_rate=0.5)
    assert any(len(spans) > 1 for spans in spans_of(run))
    check_probabilities(run, kept)


def test_a_resumed_run(engine, tmp_path):
    check_resume(engine, tmp_path)


def test_no_key_is_written_to_disk_or_logs(engine, running, tmp_path, capfd):
    """Check the servers' command lines and logs, and the config, files and output of a run."""
    keys = [server.api_key for server in engine.group.servers]
    for server in engine.group.servers:
        assert server.api_key.encode() not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert server.api_key not in server.log.read_text()
    fit(rollouts=1, data={"engine": engine}, trainer={"default_root_dir": str(tmp_path), "logger": CSVLogger(tmp_path)})
    overlay = CONFIGS / "vllm_server.yaml"
    with pytest.raises(SystemExit):
        main(
            ["fit", f"--config={CONFIGS / 'tiny.yaml'}", f"--config={overlay}", f"--data.engine.urls={running}", PRINT]
        )
    printed = "".join(capfd.readouterr())
    assert "api_key_env: LGRPO_VLLM_API_KEY" in printed
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not [key for key in keys for text in [printed, *written] if key in text]


def test_a_server_that_is_already_running(policy, engine, running):
    for step in (6, 7):
        engine.load_weights(policy.weights(), step)
    expected = engine.generate(prompts(policy, *TEXTS), 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    disturb(policy)
    other = VLLMServerEngine(urls=running, seeded=True)
    record = other.load_weights(policy.weights(), step=8)
    assert record.version == 0
    groups = other.generate(prompts(policy, *TEXTS), 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    assert mismatch(policy, prompts(policy, *TEXTS), groups) <= TOLERANCE
    other.close()
    assert engine.group.servers[0].process.poll() is None, "a server of urls is left running"
    disturb(policy)
    with pytest.warns(UserWarning, match=rf"{running[0]} holds version 0 of the weights, not {engine.state.version}"):
        stale = engine.generate(prompts(policy, *TEXTS), 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    assert stale == expected, "its weights were restored"
    assert engine.group.servers[0].process.poll() is None


def test_another_client_syncs_the_server_during_a_request(policy, engine, running, monkeypatch):
    """The answer comes from weights of another version. It is dropped, and sampled again."""
    for step in (9, 10):  # so that the version differs from the other client's, which is 0
        engine.load_weights(policy.weights(), step)
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=6)
    expected = engine.generate(questions, 3, sampling, 0, policy.tokenizer)
    other, disturbed, call = VLLMServerEngine(urls=running, seeded=True), [], VLLMServer.call

    def late(server, method, path, *arguments, **options):
        if path == "/v1/completions" and not disturbed and server.url == running[0]:
            disturbed.append(path)
            disturb(policy)
            other.load_weights(policy.weights(), step=0)
        return call(server, method, path, *arguments, **options)

    monkeypatch.setattr(engine.group, "servers", engine.group.servers[:1])
    monkeypatch.setattr(engine, "requests_at_a_time", 1)
    monkeypatch.setattr(VLLMServer, "call", late)
    with pytest.warns(UserWarning, match=rf"{running[0]} holds version 0 of the weights, not {engine.state.version}"):
        groups = engine.generate(questions, 3, sampling, 0, policy.tokenizer)
    other.close()
    assert disturbed
    assert groups == expected


@pytest.mark.slow("starts a server")
class TestPrefixCache:
    """Neither keys nor values of the previous weights are read after a sync.

    The cache is emptied, and requests of another version do not share its blocks. Each of the two is enough.
    """

    @pytest.fixture(scope="class")
    def long(self):
        """Return a policy with long prompts, and one server of it that caches blocks of 32 tokens."""
        policy = build_policy(max_position_embeddings=512)
        engine = VLLMServerEngine(options={"block_size": 32})
        engine.load_weights(policy.weights(), step=0)
        yield policy, engine
        engine.close()

    @pytest.mark.parametrize(
        "without", [{"cache_salt"}, {"/reset_prefix_cache"}, {"cache_salt", "/reset_prefix_cache"}]
    )
    def test_a_long_prompt_after_a_sync(self, long, without, monkeypatch):
        policy, engine = long
        questions, call = prompts(policy, "1234567890" * 30 + ">"), VLLMServer.call

        def changed(server, method, path, *arguments, json=None, **options):
            if path in without:
                return {"success": True}
            path = path.replace("/pause?", "/pause?clear_cache=false&")  # it would empty the cache too
            json = {k: v for k, v in json.items() if k not in without} if path == "/v1/completions" else json
            return call(server, method, path, *arguments, json=json, **options)

        monkeypatch.setattr(VLLMServer, "call", changed)
        for step in (1, 2):
            disturb(policy)
            engine.load_weights(policy.weights(), step)
            groups = engine.generate(questions, 4, Sampling(max_tokens=8), 0, policy.tokenizer)
        if len(without) == 2:
            assert mismatch(policy, questions, groups) > 0.01, "the prompt fills no block, so the others prove nothing"
        else:
            assert mismatch(policy, questions, groups) <= TOLERANCE


def test_a_server_with_another_model(policy, running):
    with pytest.raises(EngineError, match=r"serves \['policy'\], not 'other'"):
        VLLMServerEngine(urls=running, served_model_name="other").load_weights(policy.weights(), 0)
    larger = tiny_policy(config={**dict(policy.settings), "num_hidden_layers": 2})
    larger.build()
    with pytest.raises(WeightSyncError, match="the sync failed"):
        VLLMServerEngine(urls=running).load_weights(larger.weights(), 0)


def test_syncs_work_after_an_error(policy, engine):
    for server in engine.group.servers:
        server.call("POST", "/resume", 30)
    engine.load_weights(policy.weights(), step=10)
    questions = prompts(policy, *TEXTS)
    groups = engine.generate(questions, 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    assert mismatch(policy, questions, groups) <= TOLERANCE


@pytest.mark.slow("starts a server")
def test_a_server_that_returns_raw_logprobs(policy):
    engine = VLLMServerEngine(options={"logprobs_mode": "raw_logprobs"})
    expected = r"returns raw_logprobs, not log-probabilities of .*Start it with --logprobs-mode processed_logprobs"
    with pytest.raises(EngineError, match=expected):
        engine.load_weights(policy.weights(), step=0)
    assert not engine.group.servers
    engine.close()


def test_a_server_without_the_worker_extension(engine, monkeypatch):
    rpc = VLLMServer.rpc
    monkeypatch.setattr(VLLMServer, "rpc", lambda self, method, timeout: rpc(self, "missing_method", timeout))
    with pytest.raises(EngineError, match=r"does not say which log-probabilities .*--worker-extension-cls lgrpo\."):
        check_logprobs_mode(engine.group.servers[0], 30)


def test_a_server_that_is_down(policy):
    with pytest.raises(EngineError, match=r"no vLLM server answers at http://127\.0\.0\.1:9"):
        VLLMServerEngine(urls=["http://127.0.0.1:9"], timeouts=Timeouts(start=1)).load_weights(policy.weights(), 0)


def test_a_prompt_that_is_too_long(policy, engine):
    with pytest.raises(ValueError, match="exceed vLLM's max_model_len of 32"):
        engine.generate(prompts(policy, "0" * 30), 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    body = {"model": "policy", "prompt": [2] * 40, "max_tokens": 4}
    with pytest.raises(EngineError, match="answered /v1/completions with 400"):
        engine.group.servers[0].call("POST", "/v1/completions", 30, json=body)


def test_a_wrong_request_is_not_a_failure_of_the_server(policy, engine):
    before = replace(engine.faults)
    wrong = [replace(prompt, token_ids=[10**6]) for prompt in prompts(policy, *TEXTS)]
    with pytest.raises(EngineError, match="answered /v1/completions with 400"):
        engine.generate(wrong, 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    assert engine.faults == before


@pytest.mark.slow("starts a server")
def test_no_memory_for_the_cache(policy):
    engine = VLLMServerEngine(kv_cache_gib=1e-6)
    with pytest.raises(EngineError, match=r"ended with exit code 1\. Its log says(.|\n)*(KV cache|memory)"):
        engine.load_weights(policy.weights(), 0)
    engine.close()


def test_interrupted_between_two_starts(policy, monkeypatch):
    """The first server is ended if the start is interrupted before the second."""
    started, start = [], VLLMServer.start

    def interrupted(*arguments):
        if started:
            raise KeyboardInterrupt
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(VLLMServer, "start", interrupted)
    engine = VLLMServerEngine(num_servers=2)
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(policy.weights(), 0)
    assert started[0].process.poll() is not None
    engine.close()


@pytest.mark.slow("starts a server and waits for it to end")
def test_a_trainer_killed_during_a_sync_leaves_no_server():
    """vLLM ends its engine, and then waits for the answer to the request of the sync."""
    script = (
        "import os, signal\n"
        "from tests.helpers import tiny_policy; from lgrpo.engines import VLLMServerEngine\n"
        "from tests.processes.alive import running\n"
        "policy = tiny_policy(); policy.build(); engine = VLLMServerEngine()\n"
        "engine.load_weights(policy.weights(), 0)\n"
        "server = engine.group.servers[0].process.pid\n"
        "for stat in running():\n"
        "    if stat[4] == str(server) and stat[0] != str(server):\n"
        "        os.kill(int(stat[0]), signal.SIGSTOP)\n"
        "print(server, flush=True)\n"
        "engine.load_weights(policy.weights(), 1)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    server = int(trainer.stdout.readline())
    try:
        time.sleep(3)  # the request of the sync waits for the stopped engine
        assert trainer.poll() is None
        trainer.kill()
        deadline = time.monotonic() + 60
        while left := [stat for stat in running_processes() if stat[4] == str(server)]:
            assert time.monotonic() < deadline, f"left running: {left}"
            time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)


@pytest.mark.slow("starts servers")
def test_a_failed_run_leaves_no_server(tmp_path):
    """Neither server nor files are left after a process ends with an error while its server runs."""
    script = (
        "from tests.helpers import tiny_policy; from lgrpo.engines import VLLMServerEngine\n"
        "policy = tiny_policy(); policy.build(); engine = VLLMServerEngine()\n"
        "engine.load_weights(policy.weights(), 0)\n"
        "print(engine.group.servers[0].process.pid, engine.group.transfer.folder, flush=True)\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 3, done.stderr
    pid, folder = done.stdout.split()[-2:]
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
