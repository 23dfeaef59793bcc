"""A real vLLM server sharded over two workers: gathered weights are compared with the policy's."""

from __future__ import annotations

import pytest
import torch

from lgrpo import LoRA, Sampling
from lgrpo.engines import Timeouts, VLLMServerEngine
from lgrpo.engines.vllm.layout import engine_layout
from lgrpo.engines.weight_files import read_folder
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, mismatch, prompts
from tests.helpers import MODEL, tiny_policy

pytestmark = pytest.mark.slow("starts vLLM in two processes")

pytest.importorskip("vllm")

SIZES = {  # fewer key and value heads than workers: both workers have the same head
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["weights", "adapters"])
def test_two_workers(lora, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    torch.manual_seed(0)
    policy = tiny_policy(config=MODEL | SIZES, lora=lora)
    policy.build()
    engine = VLLMServerEngine(tensor_parallel_size=2, timeouts=Timeouts(start=240, generate=60))
    try:
        for step in range(2):
            with torch.no_grad():
                for p in policy.parameters():
                    if p.requires_grad:
                        p.add_(0.1 * torch.randn_like(p))
            record = engine.load_weights(policy.weights(), step)
            questions = prompts(policy, *TEXTS)
            groups = engine.generate(questions, 3, Sampling(max_tokens=6), 0, policy.tokenizer)
            assert mismatch(policy, questions, groups) < TOLERANCE
        weights = policy.weights()
        sent = dict(weights if weights.adapter is None else weights.adapter.tensors())
        assert record.num_bytes == sum(4 * tensor.numel() for tensor in sent.values())
        reported = engine.group.checksums(engine.group.servers[0])
        assert reported.keys() == sent.keys()
        if lora is None:  # servers write their weights to files if these were not sent as files
            layout = engine_layout({name: tensor.shape for name, tensor in sent.items()})
            engine.group.servers[0].rpc("lgrpo_write_weights", 30, folder=str(tmp_path), layout=layout)
            written = read_folder(tmp_path)
            assert all(torch.equal(written[name], tensor) for name, tensor in sent.items())
    finally:
        engine.close()
