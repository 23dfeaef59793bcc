"""Seconds of a weight sync to a vLLM server by file and by NCCL, and their ratio.

    python -m tests.benchmarks.vllm_transfer --out transfer.json

A Qwen2-shaped model of 1.5 billion random weights in bfloat16. With several GPUs the server is on the last one. On one
GPU, NCCL is configured to see two machines and uses sockets: that row shows that it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

from lgrpo import CausalPolicy
from lgrpo.engines import VLLMServerEngine

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}

APART = {"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--transfers", nargs="+", choices=["nccl", "file"], default=["nccl", "file"])
    options = parser.parse_args()
    policy = CausalPolicy(config=CONFIG | {"num_hidden_layers": options.layers}, characters="0123456789>")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        policy.build()
    found: dict[str, object] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    found["gpus"] = torch.cuda.device_count()
    if found["gpus"] == 1:
        os.environ |= APART  # now: NCCL reads them once
    for transfer in options.transfers:
        engine = VLLMServerEngine(
            dtype="bfloat16",
            gpu_memory_utilization=0.3,
            max_model_len=1024,
            transfer=transfer,
            environment_variables={"NCCL_HOSTID": "server"} if found["gpus"] == 1 else None,
        )
        try:
            engine.load_weights(policy.weights(), 0)  # which starts the server
            for verify in (True, False):
                engine.verify = verify
                records = [engine.load_weights(policy.weights(), step) for step in range(options.syncs)]
                seconds = statistics.median(record.seconds for record in records)
                found[f"{transfer}, verify {verify}"] = round(seconds, 3)
                found["gigabytes"] = round(records[0].num_bytes / 1e9, 2)
                print(found, flush=True)
        finally:
            engine.close()
    if {"file", "nccl"} <= set(options.transfers):
        for verify in (True, False):
            by_file, by_nccl = (float(str(found[f"{name}, verify {verify}"])) for name in ("file", "nccl"))
            found[f"file over nccl, verify {verify}"] = round(by_file / by_nccl, 2)
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
