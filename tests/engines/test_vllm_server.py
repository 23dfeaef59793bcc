"""Real vLLM servers in processes of their own: how they sample, how they are synced, and how they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from lightning.pytorch.loggers import CSVLogger

from lgrpo import Sampling
from lgrpo.cli import main
from lgrpo.engines import EngineError, VLLMServerEngine, WeightSyncError
from lgrpo.engines.server import VLLMServer
from tests.engines.test_vllm import TEXTS, TOLERANCE, as_ids, check_that_it_goes_on, disturb, mismatch, prompts
from tests.helpers import fit, tiny_policy

pytest.importorskip("vllm")

CONFIGS, PRINT = Path(__file__).parents[2] / "configs", "--print_config"


@pytest.fixture(scope="module")
def engine(two_servers, policy):
    """Given the policy: other tests may have had it before."""
    two_servers.load_weights(policy.weights(), step=3)
    return two_servers


@pytest.fixture
def running(engine, monkeypatch):
    """The first server, as one the user runs: its address, and its key in the environment."""
    monkeypatch.setenv("LGRPO_VLLM_API_KEY", engine.servers[0].api_key)
    return [engine.servers[0].url]


def test_logprobs_agree_before_and_after_a_sync_on_every_server(policy, engine):
    questions, first = prompts(policy, *TEXTS), engine.version
    for step in (3, 4):
        groups = engine.generate(questions, 5, Sampling(max_tokens=12), 0, policy.tokenizer)
        assert mismatch(policy, questions, groups) <= TOLERANCE
        assert {(c.behaviour_step, c.version) for group in groups for c in group} == {(step, first + step - 3)}
        if step == 3:
            disturb(policy)
            stale = engine.generate(questions, 5, Sampling(max_tokens=12), 0, policy.tokenizer)
            assert mismatch(policy, questions, stale) > 0.05
            engine.load_weights(policy.weights(), step=4)


def test_samples_do_not_depend_on_the_server(policy, engine):
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=10)
    forwards = as_ids(engine.generate(questions, 4, sampling, 7, policy.tokenizer))
    backwards = as_ids(engine.generate(questions[1:] + questions[:1], 4, sampling, 7, policy.tokenizer))
    assert forwards == backwards[-1:] + backwards[:-1]


def test_both_servers_are_asked(policy, engine):
    before = [server.log.read_text().count("POST /v1/completions") for server in engine.servers]
    engine.generate(prompts(policy, *TEXTS * 4), 2, Sampling(max_tokens=8), 7, policy.tokenizer)
    after = [server.log.read_text().count("POST /v1/completions") for server in engine.servers]
    assert sum(after) - sum(before) == 4 * len(TEXTS)
    assert all(b > a for a, b in zip(before, after, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to share")
def test_memory_of_a_gpu_that_is_not_there(policy):
    with pytest.raises(EngineError, match="there is none here: use 'file'"):
        VLLMServerEngine(transfer="ipc").load_weights(policy.weights(), 0)


def test_the_files_are_the_behaviour_policy(policy, engine):
    held = engine.state_dict()["weights"]
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert oct(engine._transfer.folder.stat().st_mode)[-3:] == "700"


def test_every_route_wants_the_key(engine):
    url = engine.servers[0].url
    for method, path in (("POST", "/collective_rpc"), ("POST", "/pause"), ("GET", "/v1/models")):
        assert requests.request(method, url + path, json={}, timeout=10).status_code == 401
    with pytest.raises(EngineError, match="refused the API key"):
        VLLMServer(url, "a wrong key").call("GET", "/v1/models", 10)
    assert url.startswith("http://127.0.0.1:")


def test_a_whole_run_that_samples_while_it_trains(engine):
    run = fit(v=4, rollouts=8, data={"engine": engine})
    assert run.recorder.lags == [0, 1, 2, 3] * 2
    assert all(row["train/engine_mismatch_max"] <= TOLERANCE for row in run.logged if row["train/lag"] == 0)
    lead = fit(v=1, rollouts=6, data={"engine": engine, "lead": 1})
    assert lead.recorder.lags == [0, 1, 1, 1, 1, 1]
    exact = fit(v=1, rollouts=4, data={"engine": engine})
    assert exact.recorder.lags == [0] * 4


def test_a_run_that_goes_on(engine, tmp_path):
    check_that_it_goes_on(engine, tmp_path)


def test_no_key_is_written_down(engine, running, tmp_path, capfd):
    """Neither on a server's command line, nor in its log, nor in a run's config, files and output."""
    keys = [server.api_key for server in engine.servers]
    for server in engine.servers:
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


def test_a_server_that_runs_already(policy, engine, running):
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
    assert engine.servers[0].process.poll() is None, "a server of the user's is left running"
    disturb(policy)
    with pytest.warns(UserWarning, match=rf"{running[0]} holds version 0 of the weights, not {engine.version}"):
        stale = engine.generate(prompts(policy, *TEXTS), 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    assert stale == expected, "its own weights were given to it again"
    assert engine.servers[0].process.poll() is None


def test_a_server_with_another_model(policy, running):
    with pytest.raises(EngineError, match=r"serves \['policy'\], not 'other'"):
        VLLMServerEngine(urls=running, served_model_name="other").load_weights(policy.weights(), 0)
    larger = tiny_policy(config={**dict(policy.settings), "num_hidden_layers": 2})
    larger.build()
    with pytest.raises(WeightSyncError, match="the sync failed"):
        VLLMServerEngine(urls=running).load_weights(larger.weights(), 0)


def test_recovered_after_that(policy, engine):
    for server in engine.servers:
        server.call("POST", "/resume", 30)
    engine.load_weights(policy.weights(), step=10)
    questions = prompts(policy, *TEXTS)
    groups = engine.generate(questions, 3, Sampling(max_tokens=6), 0, policy.tokenizer)
    assert mismatch(policy, questions, groups) <= TOLERANCE


def test_a_server_that_is_down(policy):
    with pytest.raises(EngineError, match=r"no vLLM server answers at http://127\.0\.0\.1:9"):
        VLLMServerEngine(urls=["http://127.0.0.1:9"], start_timeout=1).load_weights(policy.weights(), 0)


def test_a_prompt_that_is_too_long(policy, engine):
    with pytest.raises(ValueError, match="exceed vLLM's max_model_len of 32"):
        engine.generate(prompts(policy, "0" * 30), 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    body = {"model": "policy", "prompt": [2] * 40, "max_tokens": 4}
    with pytest.raises(EngineError, match="answered /v1/completions with 400"):
        engine.servers[0].call("POST", "/v1/completions", 30, json=body)


def test_a_request_that_is_wrong_is_no_failure_of_the_server(policy, engine):
    before = Counter(engine.faults)
    wrong = [replace(prompt, token_ids=[10**6]) for prompt in prompts(policy, *TEXTS)]
    with pytest.raises(EngineError, match="answered /v1/completions with 400"):
        engine.generate(wrong, 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    assert engine.faults == before


def test_no_memory_for_the_cache(policy):
    engine = VLLMServerEngine(kv_cache_gib=1e-6)
    with pytest.raises(EngineError, match=r"ended with exit code 1\. Its log says(.|\n)*(KV cache|memory)"):
        engine.load_weights(policy.weights(), 0)
    engine.close()


def test_interrupted_between_two_starts(policy, monkeypatch):
    """The first server is up, or about to be, when the second is not started any more: it does not stay."""
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


def test_a_run_that_fails_leaves_no_server_behind(tmp_path):
    """A process that ends by an error, its server still up: afterwards neither server nor files are there."""
    script = (
        "from tests.helpers import tiny_policy; from lgrpo.engines import VLLMServerEngine\n"
        "policy = tiny_policy(); policy.build(); engine = VLLMServerEngine()\n"
        "engine.load_weights(policy.weights(), 0)\n"
        "print(engine.servers[0].process.pid, engine._transfer.folder, flush=True)\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 3, done.stderr
    pid, folder = done.stdout.split()[-2:]
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
