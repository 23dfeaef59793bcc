"""Time implementations of token log-probabilities, forward and backward: ``python -m tests.benchmarks.logprobs``.

Time and memory for the tokens of one micro-batch, from hidden states to the gradients of states and head: all logits at
once; lgrpo in chunks, plain and compiled (``policy.compile``); and the fused cross-entropies of Liger and of
cut-cross-entropy, if they are installed. These two return no entropy, lgrpo does. Gradients are compared with those of
the first implementation.

    python -m tests.benchmarks.logprobs                                                 # on a GPU: the shape of 1.5B
    python -m tests.benchmarks.logprobs --tokens 256 --width 64 --vocabulary 2000       # a small one, on a CPU too
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from lgrpo.functional import chunked_token_logprobs, token_logprobs

Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]


def implementations(chunk_size: int) -> dict[str, Implementation]:
    """Return functions of (hidden states, head, targets) that compute log-probabilities, by name."""

    def in_chunks(compile: bool) -> Implementation:
        return lambda hidden, head, targets: chunked_token_logprobs(
            hidden, lambda h: linear(h, head), targets, chunk_size=chunk_size, compile=compile
        )[0]

    found: dict[str, Implementation] = {
        "all logits at once": lambda hidden, head, targets: token_logprobs(linear(hidden, head), targets)[0],
        "lgrpo, in chunks": in_chunks(False),
        "lgrpo, in chunks, compiled": in_chunks(True),
    }
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger"] = lambda hidden, head, targets: (
            -liger_fused_linear_cross_entropy(hidden, head, targets, reduction="none")
        )
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = lambda hidden, head, targets: (
            -linear_cross_entropy(hidden, head, targets, reduction="none")
        )
    except ImportError:
        pass
    return found


def measure(
    implementation: Implementation, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, repeats: int
) -> dict[str, object]:
    cuda = hidden.is_cuda
    seconds: list[float] = []
    for attempt in range(repeats + 2):
        hidden.grad = head.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        (implementation(hidden, head, targets).float() * weights).sum().backward()
        if cuda:
            torch.cuda.synchronize()
        if attempt >= 2:
            seconds.append(time.perf_counter() - start)
    found: dict[str, object] = {"milliseconds": 1000 * min(seconds)}
    if cuda:
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16 * 512)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shape = {"device": device, "dtype": dtype}
    hidden = torch.randn(options.tokens, options.width, **shape).requires_grad_()
    head = (torch.randn(options.vocabulary, options.width, **shape) / options.width**0.5).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), device=device)
    weights = torch.randn(options.tokens, device=device)
    rows: dict[str, dict[str, object]] = {}
    expected: Tensor | None = None
    print("| | milliseconds | memory, MiB | gradient, relative difference |\n|---|---:|---:|---:|")
    for name, implementation in implementations(options.chunk_size).items():
        try:
            row = measure(implementation, hidden, head, targets, weights, options.repeats)
            assert hidden.grad is not None
            gradient = hidden.grad.float()
            expected = gradient if expected is None else expected
            row["gradient_difference"] = float((gradient - expected).norm() / expected.norm())
            peak = f"{row['peak_mib']:,.0f}" if "peak_mib" in row else ""
            print(f"| {name} | {row['milliseconds']:.1f} | {peak} | {row['gradient_difference']:.1e} |", flush=True)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(f"| {name} | {row['error'][:80]} | | |", flush=True)
        rows[name] = row
    if options.out:
        options.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(options).items()}, "rows": rows}))


if __name__ == "__main__":
    main()
