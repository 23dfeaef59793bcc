"""Measure how log-probabilities depend on what is computed together: in the engine, in the policy, and between them.

    python -m tests.benchmarks.mismatch --model FOLDER --data GSM8K    # on a GPU; both arms, resumable
    python -m tests.benchmarks.mismatch --report                       # tables of tutorials/pages/engines.md

An arm samples the same prompts twice with vLLM, in one call and in several, with a seed for each completion, with and
without kernels whose results do not depend on the batch (``VLLMEngine.batch_invariant``). The policy then computes the
log-probabilities of the first completions in micro-batches of 16, 8 and 1 rows, in bfloat16 as with the precision
``bf16-mixed``. Rows are appended to ``tests/benchmarks/results/mismatch.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from lgrpo import CausalPolicy, Completion, Prompt, Sampling
from lgrpo.engines import EnginePool, RolloutEngine, TransformersEngine, VLLMEngine
from tests.benchmarks.step import machine_name
from tests.benchmarks.workload import real_prompts

ROWS = Path(__file__).parent / "results" / "mismatch.jsonl"
PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "engines.md"
BANDS = (0.1, 0.2)
"""Half-widths of bands around a ratio of 1."""
ARMS = {"vLLM": False, "vLLM, batch-invariant": True}
MICRO_BATCHES = (16, 8, 1)
Groups = list[list[Completion]]


def statistics_of(differences: Tensor) -> dict[str, float]:
    """Return mean, quantiles and maximum of |differences of log-probabilities|, and shares outside of bands.

    >>> statistics_of(torch.tensor([0.0, 0.0, 0.0, -0.15]))
    {'tokens': 4, 'mean': 0.0375, 'p95': 0.1275, 'p99': 0.1455, 'max': 0.15, 'outside_0.1': 0.25, 'outside_0.2': 0.0}
    """
    size, ratio = differences.double().abs(), differences.double().exp()
    quantiles = {f"p{q}": float(size.quantile(q / 100)) if len(size) else 0.0 for q in (95, 99)}
    found = {"mean": float(size.mean()), **quantiles, "max": float(size.max())}
    found |= {f"outside_{band}": float(((ratio - 1).abs() > band).double().mean()) for band in BANDS}
    return {"tokens": len(size)} | {name: float(f"{value:.4g}") for name, value in found.items()}


def policy_logprobs(policy: CausalPolicy, rows: Sequence[tuple[Prompt, Completion]], at_once: int) -> Tensor:
    """Return log π of all completion tokens of some rows, computed ``at_once`` rows together."""
    device, found = next(policy.parameters()).device, []
    for start in range(0, len(rows), at_once):
        piece = rows[start : start + at_once]
        texts = [[*prompt.token_ids, *completion.token_ids] for prompt, completion in piece]
        tokens = torch.zeros(len(piece), max(map(len, texts)), dtype=torch.int64)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (text, (prompt, _)) in enumerate(zip(texts, piece, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            mask[row, len(prompt.token_ids) : len(text)] = True
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            logprobs, _ = policy(tokens.to(device), mask.to(device), 1.0)
        found.append(logprobs.cpu()[mask])
    return torch.cat(found)


def between_calls(one: Groups, other: Groups) -> dict[str, Any]:
    """Compare two samples of the same completions: the share with equal tokens, and log-probabilities while equal."""
    pairs = [pair for groups in zip(one, other, strict=True) for pair in zip(*groups, strict=True)]
    differences: list[float] = []
    for a, b in pairs:
        equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a.token_ids, b.token_ids, strict=False))))
        differences += [x - y for x, y in zip(a.logprobs[:equal], b.logprobs[:equal], strict=True)]
    same = sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)
    return statistics_of(torch.tensor(differences, dtype=torch.float64)) | {"equal_completions": round(same, 4)}


def measure(policy: CausalPolicy, engine: RolloutEngine, prompts: list[Prompt], options: argparse.Namespace) -> dict:
    """Return the row of an arm, without its name and where it was measured."""
    sampling = Sampling(max_tokens=options.max_tokens)
    start = time.perf_counter()
    engine.load_weights(policy.weights(), 0)
    row: dict[str, Any] = {"start_seconds": round(time.perf_counter() - start, 1), "generate": []}

    def generate(chosen: Sequence[Prompt]) -> Groups:
        return engine.generate(chosen, options.group, sampling, 0, policy.tokenizer)

    generate(prompts[:1])  # captures what the first call captures
    for _ in range(options.repeats):
        start = time.perf_counter()
        groups = generate(prompts)
        row["generate"].append(round(time.perf_counter() - start, 3))
    row["tokens"] = sum(len(completion.token_ids) for group in groups for completion in group)
    quarter = -(-len(prompts) // 4)
    pieces = [generate(prompts[first : first + quarter]) for first in range(0, len(prompts), quarter)]
    row["between_calls"] = between_calls(groups, [group for piece in pieces for group in piece])
    engine.close()
    rows = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    rows = rows[:: max(1, len(rows) // options.rows)][: options.rows]
    found = {size: policy_logprobs(policy, rows, size) for size in MICRO_BATCHES}
    sampled = torch.tensor([logprob for _, completion in rows for logprob in completion.logprobs])
    row["engine_and_policy"] = statistics_of(found[16] - sampled)
    row |= {f"policy_16_and_{size}_rows": statistics_of(found[16] - found[size]) for size in MICRO_BATCHES[1:]}
    return row


def make_engine(is_invariant: bool, options: argparse.Namespace) -> RolloutEngine:
    """Return a pool of vLLM, or on a CPU the embedded engine."""
    if not torch.cuda.is_available():
        return TransformersEngine()
    one = VLLMEngine(
        dtype="bfloat16",
        max_model_len=640,
        gpu_memory_utilization=0.2,
        kv_cache_gib=12.0,
        seeded=True,
        batch_invariant=is_invariant,
    )
    return EnginePool(one, options.processes)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page with the tables of the rows."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(
        r"(<!-- mismatch -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{report(rows)}\n\n{m[2]}", text, flags=re.DOTALL
    )


def report(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the page: what differs by how much, and what kernels without batch dependence cost."""
    names = {
        "engine_and_policy": "engine and policy",
        "policy_16_and_8_rows": "policy and itself, 16 and 8 rows",
        "policy_16_and_1_rows": "policy and itself, 16 rows and 1",
        "between_calls": "engine and itself, one call and four",
    }
    titles = ["mean", "p95", "p99", "max", *(f"ratio off by {band}" for band in BANDS)]
    lines = [f"| engine | compared | {' | '.join(titles)} |", "|---|---|" + "---:|" * len(titles)]
    for row in rows:
        for key, name in names.items():
            found = row[key]
            cells = [f"{found[title]:.2g}" for title in ("mean", "p95", "p99", "max")]
            cells += [f"{found[f'outside_{band}']:.2%}" for band in BANDS]
            lines.append(f"| {row['arm']} | {name} | {' | '.join(cells)} |")
    lines += ["", "| engine | completions with the same tokens in one call and in four | tokens/s |", "|---|---:|---:|"]
    for row in rows:
        rate = row["tokens"] / min(row["generate"])
        lines.append(f"| {row['arm']} | {row['between_calls']['equal_completions']:.1%} | {rate:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder of the model.")
    parser.add_argument("--data", type=Path, help="Folder or file with the training questions of GSM8K.")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="Arms to run.")
    parser.add_argument("--prompts", type=int, default=28, help="Number of prompts.")
    parser.add_argument("--group", type=int, default=16, help="Completions of a prompt.")
    parser.add_argument("--max-tokens", type=int, default=320, help="Upper limit of a completion's length.")
    parser.add_argument("--rows", type=int, default=128, help="Completions that the policy computes again.")
    parser.add_argument("--repeats", type=int, default=2, help="Number of timed calls; the fastest is shown.")
    parser.add_argument("--processes", type=int, default=2, help="Processes of the pool.")
    parser.add_argument("--out", type=Path, default=ROWS, help="File to append rows to.")
    parser.add_argument("--commit", default="", help="Commit to note in the rows.")
    parser.add_argument("--report", action="store_true", help="Print the tables and measure nothing.")
    options = parser.parse_args()
    rows = read(options.out)
    if not options.report:
        if options.model is None or options.data is None:
            parser.error("--model and --data are required to measure")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = CausalPolicy(options.model)
        with torch.device(device):
            policy.build()
        policy.to(device)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompts = []
        for position, text in enumerate(real_prompts(options.data, options.prompts)):
            chat = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            prompts.append(Prompt(token_ids=list(ids), text=text, row={}, position=position))
        for arm in options.arms:
            if arm in {row["arm"] for row in rows}:
                continue
            row = {"arm": arm, "model": Path(options.model).name, "machine": machine_name(device)}
            row |= {"torch": torch.__version__, "commit": options.commit, "prompts": options.prompts}
            row |= {"group": options.group, "max_tokens": options.max_tokens, "processes": options.processes}
            row |= measure(policy, make_engine(ARMS[arm], options), prompts, options)
            rows.append(row)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    PAGE.write_text(page(read(ROWS)), encoding="utf-8")
    print(report(rows))


if __name__ == "__main__":
    main()
