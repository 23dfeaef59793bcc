"""A real vLLM server as judge, on the CPU: an untrained model whose answers are digits."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from lgrpo.engines import JudgeModel
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.rewards import JudgeError, JudgeReward, Question, verdict_statistics
from tests.helpers import MODEL, tiny_policy
from tests.rewards.judge.scripted import Script, score

TEXTS = ("12", "34", "56", "78", "90", "11")


def save_judge(folder):
    """Write a model that continues digits, and the template of its chat."""
    policy = tiny_policy(config=MODEL | {"tie_word_embeddings": False, "initializer_range": 0.5})
    policy.build()
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}>"
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def judge(url=None, **settings):
    """Return a judge whose score depends on all of its answer."""
    template = Question("{completion}", r"(.*)", None)
    template.read = lambda answers: (sum(map(ord, answers[0])) % 101) / 101
    settings = {"max_tokens": 8, "max_retries": 0, "retry_delay": 0.0} | settings
    return JudgeReward(url, template, **settings)


@pytest.mark.slow("starts a vLLM server")
def test_a_real_server(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    folder, verdicts = save_judge(tmp_path / "model"), str(tmp_path / "verdicts")
    flags = {"max_model_len": 32, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    server = VLLMServer.start(folder, tmp_path / "server.log", flags, environment)
    try:
        server.wait_until_ready(300)
        with pytest.raises(JudgeError, match=r"with 401: .* Set LGRPO_JUDGE_API_KEY"):
            score(judge(server.url), "12")
        monkeypatch.setenv("LGRPO_JUDGE_API_KEY", server.api_key)
        with pytest.raises(JudgeError, match=r"with 404: .*does not exist"):
            score(judge(server.url, model="another"), "12")
        with pytest.raises(JudgeError, match=r"with 400: .*maximum context length"):
            score(judge(server.url), "1" * 40)
        kept = judge(server.url, verdicts=verdicts)
        scores = score(kept, *TEXTS)
        assert kept.model == str(folder)
        assert len(set(scores)) > 1
        self_made = score(judge(engine=JudgeModel(str(folder), dtype="float32")), *TEXTS)
        assert [one.notes["answers"] for one in scores] == [one.notes["answers"] for one in self_made]
        assert scores == self_made
        check_sampled_votes(server)
        check_with_bad_luck(server, scores)
        check_slow(server)
        server.kill()
        assert score(judge(server.url, model=str(folder), verdicts=verdicts), *TEXTS) == scores, "from the folder"
        with pytest.raises(JudgeError, match="cannot be reached"):
            score(judge(server.url, verdicts=verdicts), "13")
    finally:
        server.close()
    assert verdict_statistics(verdicts)["verdicts"] == len(TEXTS)


def check_sampled_votes(server):
    """The seeds make votes differ, and the same in every run."""
    first, second = (score(judge(server.url, votes=4, temperature=1.0), "12")[0].notes for _ in range(2))
    assert first["answers"] == second["answers"]
    assert len({answers[0] for answers in first["answers"]}) > 1


def check_with_bad_luck(server, scores):
    """A proxy that limits the rate, fails, hangs and sends nonsense before it passes requests on."""

    def forward(body):
        key = {"Authorization": body.pop("key")}
        response = httpx.post(f"{server.url}{body.pop('path')}", json=body, headers=key, timeout=60)
        return response.status_code, response.text

    busy, broken = (429, "slow down", ("Retry-After", "1")), (503, "broken")
    with Script(busy, broken, "hang", (200, "<html>"), forward) as proxy:
        settings = {"model": "-", "request": {"model": judge_name(server)}, "timeout": 10, "max_retries": 4}
        assert score(judge(proxy.url, **settings), *TEXTS) == scores
        assert len(proxy.requests) == len(TEXTS) + 4


def judge_name(server):
    """Return the name of its model."""
    models = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {server.api_key}"}).json()
    return models["data"][0]["id"]


def check_slow(server):
    """It accepts connections and does not answer; then it goes on."""
    group = os.getpgid(server.process.pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        with pytest.raises(JudgeError, match="did not answer within 1 s, after 2 attempts"):
            score(judge(server.url, model="-", timeout=1, max_retries=1), "12")
    finally:
        os.killpg(group, signal.SIGCONT)
    assert score(judge(server.url, max_retries=4), "12")
