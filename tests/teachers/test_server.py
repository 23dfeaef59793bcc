"""A teacher behind a real vLLM server: the same divergences as in the trainer's process, and its messages."""

from __future__ import annotations

import secrets

import pytest
import torch

from lgrpo.engines import EngineError
from lgrpo.engines.servers.client import VLLMServer, free_port
from lgrpo.losses import ComposedLoss, MinClip, TeacherKL
from lgrpo.teachers import FrozenTeacher, ServerTeacher
from tests.helpers import fit, largest_difference, tiny_policy

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow("starts a vLLM server")
FLAGS = {"max_model_len": 16, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True, "max_logprobs": 6}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(11)
    policy, folder = tiny_policy(), tmp_path_factory.mktemp("teacher")
    policy.build()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    server = VLLMServer.start(folder, tmp_path_factory.mktemp("log") / "server.log", FLAGS, environment)
    try:
        server.wait_until_ready(300)
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def key(server, monkeypatch):
    monkeypatch.setenv("LGRPO_VLLM_API_KEY", server.api_key)


def distil(teacher, **settings):
    return ComposedLoss(gate=MinClip(), regularisers=[TeacherKL(teacher, **{"top_k": 6} | settings)], scale=0.0)


@pytest.mark.parametrize("top_k", [1, 6])
def test_same_probabilities_as_in_this_process(server, folder, top_k):
    policy = tiny_policy()
    tokens = torch.randint(2, 13, (9, 12), generator=torch.Generator().manual_seed(0))
    column, start = torch.arange(12), torch.arange(9)[:, None] % 4 + 1
    mask = (column >= start) & (column < start + 7) & (column != start + 3)  # an observed token in between
    mask[4] = False
    found = []
    for teacher in (ServerTeacher(server.url), FrozenTeacher(str(folder), dtype="float32")):
        teacher.start(policy.tokenizer, top_k, 1.0)
        found.append(teacher.top_logprobs(tokens, mask, top_k, 1.0, policy.num_logits))
    assert torch.equal(found[0].token_ids, found[1].token_ids)
    torch.testing.assert_close(found[0].logprobs, found[1].logprobs, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found[0].rest, found[1].rest, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_run(server, folder, direction):
    settings = {"rollouts": 3, "v": 2, "i": 2, "trainer": {"accumulate_grad_batches": 2}}
    runs = [
        fit(loss=distil(teacher, direction=direction), **settings)
        for teacher in (ServerTeacher(server.url), FrozenTeacher(str(folder), dtype="float32"))
    ]
    assert largest_difference(runs[0].recorder.gradients[0], runs[1].recorder.gradients[0]) < TOLERANCE
    assert largest_difference(runs[0].weights, runs[1].weights) < TOLERANCE


class TestRejected:
    def test_more_log_probabilities_than_the_server_sends(self, server):
        with pytest.raises(ValueError, match=r"does not send 7 log-probabilities: start it with --max-logprobs 7"):
            fit(rollouts=1, loss=distil(ServerTeacher(server.url), top_k=7))

    def test_another_vocabulary(self, server):
        with pytest.raises(ValueError, match="has another vocabulary than the policy"):
            ServerTeacher(server.url).start(tiny_policy(characters="abcdefghijk").tokenizer, 6, 1.0)

    def test_a_short_context(self, server):
        teacher, tokens = ServerTeacher(server.url), torch.full((1, 16), 5)
        teacher.start(tiny_policy().tokenizer, 6, 1.0)
        with pytest.raises(ValueError, match=r"up to 16 tokens, but the teacher at .* can read only 15"):
            teacher.top_logprobs(tokens, tokens == 5, 6, 1.0, 13)

    def test_tokens_that_the_policy_does_not_have(self, server):
        """A model may have more rows than its tokenizer has tokens."""
        teacher, tokens = ServerTeacher(server.url), torch.full((1, 8), 5)
        teacher.start(tiny_policy().tokenizer, 6, 1.0)
        mask = torch.arange(8)[None] > 0
        found = teacher.top_logprobs(tokens, mask, 1, 1.0, 13)
        with pytest.raises(EngineError, match=r"sent \d tokens of the policy's vocabulary instead of 6"):
            teacher.top_logprobs(tokens, mask, 6, 1.0, max(6, int(found.token_ids.max())))

    def test_settings(self, server):
        with pytest.raises(ValueError, match="set TeacherKL's top_k"):
            fit(rollouts=1, loss=distil(ServerTeacher(server.url), top_k=None))
        with pytest.raises(ValueError, match=r"at temperature 1, not 0\.5"):
            fit(rollouts=1, loss=distil(ServerTeacher(server.url), temperature=0.5))

    def test_a_wrong_key(self, server, monkeypatch):
        monkeypatch.setenv("LGRPO_VLLM_API_KEY", secrets.token_hex(4))
        with pytest.raises(EngineError, match="rejected the API key"):
            fit(rollouts=1, loss=distil(ServerTeacher(server.url)))

    def test_no_server(self):
        with pytest.raises(EngineError, match=r"the connection to the vLLM server at .* broke"):
            fit(rollouts=1, loss=distil(ServerTeacher(f"http://127.0.0.1:{free_port()}", retries=1)))
