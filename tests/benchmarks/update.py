"""Time the update alone, without engine and rollouts: ``python -m tests.benchmarks.update``.

Random weights and tokens: forward, clipped loss, backward, gradient clipping, step of AdamW, without Lightning. Each
row runs in a separate process, so that a row without enough memory does not stop the others. Results are written to
``tests/benchmarks/results/update-MACHINE.json`` after each row.

With N parameters, L layers, heads of total width H and sequences of T tokens, the shares of the peak count

    6 N                  FLOP per token: products with weights, forward and backward
    6 N + 6 L H T        the same and attention: 12 L H T, of which a causal mask needs half

Recomputed activations are not counted, and a shared prompt counts once. Each row has the norm of its first gradient:
rows that differ only in memory settings or in shared prompts must have the same norm.

    python -m tests.benchmarks.update                                     # on a GPU, all rows
    python -m tests.benchmarks.update --rows "1.5b" "1.5b, budget 0.4"    # some rows
    python -m tests.benchmarks.update --rows "1.5b, groups" "1.5b, groups, shared prompts"
    python -m tests.benchmarks.update --rows "1.5b, 28 micro-batches" "1.5b, 7 micro-batches"
    python -m tests.benchmarks.update --rows "135m, group" "135m, group, shared prompt"    # on a CPU
    python -m tests.benchmarks.update --shape tiny                        # a small model and short rows, on a CPU too
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lgrpo import CausalPolicy, ClippedLoss, RolloutBatch
from lgrpo.losses import PolicyLogprobs
from lgrpo.types import StepTotals
from tests.benchmarks.isolated import isolated_part, measure_isolated
from tests.benchmarks.stages import matmul_peak, peak_memory
from tests.benchmarks.step import H200, RESULTS, machine_name, slug
from tests.benchmarks.workload import SHAPES

QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152}


@dataclass(kw_only=True, slots=True)
class Row:
    """A model and the micro-batches of a step."""

    model_type: str = "qwen2"
    shape: dict[str, int]
    sequences: int = 16
    """Number of sequences of a micro-batch."""
    length: int = 612
    prompt: int = 100
    """Number of prompt tokens of each sequence."""
    group: int = 1
    """Number of consecutive sequences with the same prompt."""
    share_prompts: bool = False
    """``policy.share_prompts``: whether a prompt is read once."""
    micro_batches: int = 7
    checkpointing: bool = False
    budget: float = 1.0
    """``policy.activation_memory``: share of its activations that a compiled layer keeps."""
    chunk_size: int = 4096
    """Number of tokens whose logits are held together."""

    def small(self) -> Row:
        """Return the row with a tiny model and a sixteenth of the length."""
        return replace(self, shape=SHAPES["tiny"], length=self.length // 16, prompt=max(1, self.prompt // 16))

    @property
    def tokens_read(self) -> int:
        """Number of tokens of a step that the model reads."""
        num_prompts = self.sequences // (self.group if self.share_prompts else 1)
        return self.micro_batches * (self.sequences * (self.length - self.prompt) + num_prompts * self.prompt)


LONG = Row(model_type="qwen3", shape=QWEN3, sequences=1, length=16384, prompt=1, micro_batches=4)
"""Sizes of the trainer benchmark of prime-rl, which recomputes all activations."""
GROUPS = Row(shape=SHAPES["1.5b"], sequences=32, length=352, prompt=128, group=16)
"""Two groups with about the lengths of GSM8K in a micro-batch."""
GROUP = Row(model_type="llama", shape=SMOLLM2, sequences=16, length=88, prompt=32, group=16, micro_batches=1)
"""One short group, for a CPU."""
ROWS: dict[str, Row] = {
    "qwen3-0.6b, 16k": LONG,
    "qwen3-0.6b, 16k, checkpointing": replace(LONG, checkpointing=True),
    "1.5b": Row(shape=SHAPES["1.5b"]),
    "1.5b, checkpointing": Row(shape=SHAPES["1.5b"], checkpointing=True),
    "1.5b, chunks of 1024": Row(shape=SHAPES["1.5b"], chunk_size=1024),
    **{f"1.5b, budget {share}": Row(shape=SHAPES["1.5b"], budget=share) for share in (0.8, 0.6, 0.4)},
    "0.5b": Row(shape=SHAPES["0.5b"]),
    "135m, group": GROUP,
    "135m, group, shared prompt": replace(GROUP, share_prompts=True),
    "135m, 4 micro-batches": replace(GROUP, sequences=4, group=4, micro_batches=4),
    **{f"1.5b, {n} micro-batches": Row(shape=SHAPES["1.5b"], sequences=224 // n, micro_batches=n) for n in (28, 7)},
    "1.5b, groups": GROUPS,
    "1.5b, groups, shared prompts": replace(GROUPS, share_prompts=True),
}


def random_batch(row: Row, device: str) -> RolloutBatch:
    """Return a micro-batch of random tokens with advantages 1 and -1; ``step`` fills in log π_α."""
    size = row.sequences, row.length
    mask = (torch.arange(row.length, device=device) >= row.prompt).expand(size)
    signs = torch.randint(0, 2, (row.sequences, 1), device=device).float() * 2 - 1
    sampled, none = float(row.micro_batches * mask.sum()), torch.zeros(row.sequences, dtype=torch.int64, device=device)
    sequences = float(row.micro_batches * row.sequences)
    tokens = torch.randint(2, row.shape["vocab_size"], size, device=device)
    tokens[:, : row.prompt] = tokens[:: row.group, : row.prompt].repeat_interleave(row.group, 0)
    return RolloutBatch(
        tokens=tokens,
        attention_mask=torch.ones_like(mask),
        completion_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=torch.full(size, torch.nan, device=device),
        rewards=signs[:, 0],
        advantages=signs * mask,
        behaviour_step=none,
        positions=none,
        truncated=none.bool(),
        failed=none.bool(),
        rows=torch.arange(row.sequences, device=device),
        group_size=row.sequences,
        temperature=1.0,
        max_tokens=row.length - row.prompt,
        rollout=0,
        totals=StepTotals(all_tokens=sampled, live_tokens=sampled, all_sequences=sequences, live_sequences=sequences),
    )


def step(policy: CausalPolicy, optimizer: torch.optim.Optimizer, batches: list[RolloutBatch]) -> Tensor:
    """Make one on-policy optimizer step and return the norm of its gradient."""
    loss = ClippedLoss()
    for batch in batches:
        device = batch.tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logprobs, entropy = policy(batch.tokens, batch.completion_mask, batch.temperature)
            on_policy = replace(batch, behaviour_logprobs=logprobs.detach())
            output = loss(on_policy, PolicyLogprobs(policy=logprobs, entropy=entropy))
        output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def state_bytes(policy: CausalPolicy, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients and optimizer state."""
    kept = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    return sum(t.nbytes for t in kept) + 2 * sum(p.nbytes for p in policy.parameters())


def flops_per_token(policy: CausalPolicy, length: int) -> tuple[int, int]:
    """Return FLOP per token without and with attention, by the formulas of the module docstring."""
    config, weights = policy.config, 6 * sum(p.numel() for p in policy.parameters())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim * length
    return weights, weights + attention


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy = CausalPolicy(
        config={"model_type": row.model_type, "max_position_embeddings": row.length, "tie_word_embeddings": True}
        | row.shape,
        characters="0123456789",
        gradient_checkpointing=row.checkpointing,
        compile=options.compile,
        activation_memory=row.budget,
        chunk_size=row.chunk_size,
        share_prompts=row.share_prompts,
    )
    with torch.device(device):
        policy.build()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device == "cuda")
    batches = [random_batch(row, device) for _ in range(row.micro_batches)]
    seconds, norms = [], []
    for number in range(options.warm_up + options.steps):
        if device == "cuda":
            torch.cuda.synchronize()
            if number == options.warm_up:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        norms.append(step(policy, optimizer, batches))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    measured = seconds[options.warm_up :]
    mean, tokens = sum(measured) / len(measured), row.sequences * row.length * row.micro_batches
    weights, whole = flops_per_token(policy, row.length)
    return {
        "step_seconds": mean,
        "steps": measured,
        "warm_up_steps": seconds[: options.warm_up],
        "tokens": tokens,
        "tokens_read": row.tokens_read,
        "tokens_per_second": tokens / mean,
        "parameters": weights // 6,
        "mfu": weights * row.tokens_read / mean / options.peak_flops,
        "mfu_with_attention": whole * row.tokens_read / mean / options.peak_flops,
        "peak_gib": (torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()) / 2**30,
        "state_gib": state_bytes(policy, optimizer) / 2**30,
        "gradient_norm": float(norms[0]),
        "packed": policy.attention == "packed",
    }


def chosen(name: str, options: argparse.Namespace) -> Row:
    """Return a row, small with ``--shape tiny``."""
    return ROWS[name].small() if options.shape == "tiny" else ROWS[name]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| | step, s | tokens/s | MFU, 6N | MFU with attention | peak, GiB | weights, gradients, optimizer, GiB |"]
    lines.append("|---|" + "---:|" * 6)
    for name, found in rows.items():
        if "error" in found:
            lines.append(f"| {name} | {str(found['error'])[:100]} | | | | | |")
            continue
        shares = f"{found['mfu']:.1%} | {found['mfu_with_attention']:.1%}"
        memory = f"{found['peak_gib']:.3g} | {found['state_gib']:.3g}"
        lines.append(
            f"| {name} | {found['step_seconds']:.3g} | {found['tokens_per_second']:,.0f} | {shares} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    if part := isolated_part():
        name, options = part
        Path(options.results).write_text(json.dumps(measure(chosen(name, options), options)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--shape", choices=["tiny"], help="shape of all rows, with a sixteenth of the tokens")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the measurement")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--limit", type=float, default=400, help="time limit in seconds for each row")
    parser.add_argument("--out", type=Path, help="path of the results; by default in tests/benchmarks/results")
    options = parser.parse_args()
    if options.steps < 1 or options.warm_up < 0:
        parser.error(f"--steps is {options.steps}, --warm-up {options.warm_up}; they must be at least 1 and 0")
    cuda = torch.cuda.is_available()
    machine = machine_name("cuda" if cuda else "cpu")
    out = options.out or RESULTS / f"update-{slug(machine)}.json"
    options.peak_flops = H200 if cuda else matmul_peak()
    rows: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {"machine": machine, "device": "cuda" if cuda else "cpu"}
    results["versions"] = {name: version(name) for name in ("torch", "transformers")}
    results["settings"] = {name: getattr(options, name) for name in ("shape", "steps", "warm_up", "compile")}
    results |= {"peak_flops": options.peak_flops, "rows": rows}
    for name in options.rows:
        found, failure = measure_isolated("tests.benchmarks.update", name, options, options.limit)
        rows[name] = {"settings": asdict(chosen(name, options))} | (found or failure)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {rows[name].get('error') or rows[name]['step_seconds']}", flush=True)
    print(f"\n{table(rows)}\n\n{out}")
    if any("error" in found for found in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
