"""Tests of micro-batches by a budget of tokens, and of the memory estimate."""

from __future__ import annotations

import re

import lightning as L
import pytest
from transformers import Qwen2Config

from lgrpo.data.prepare import num_micro_batches
from lgrpo.policy.memory import activation_bytes, check_token_budget, logit_bytes
from tests.benchmarks.workload import SHAPES
from tests.helpers import a_batch, fit, largest_difference


class Sizes(L.Callback):
    """Records the tokens of every micro-batch."""

    def __init__(self):
        self.sizes: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.sizes.append(int(batch.lengths.sum()))


@pytest.mark.parametrize("budget", [10, 11, 25, 40, 80])
def test_no_lengths_exceed_the_budget(budget):
    for seed in range(40):
        batch = a_batch(size=24, seed=seed)
        if seed == 0:
            batch.attention_mask[:], batch.completion_mask[:, 1:], batch.loss_mask[:, 1:] = True, True, True
        pieces = batch.split(num_micro_batches(len(batch), 10, budget))
        assert max(int(piece.lengths.sum()) for piece in pieces) <= budget
        assert sum(len(piece) for piece in pieces) == len(batch)


def test_a_run_respects_the_budget_and_its_gradient_is_the_same():
    whole = fit(rollouts=2)
    run = fit(rollouts=2, data={"micro_batch_tokens": 30}, callbacks=[seen := Sizes()])
    longest = run.data.train_prompts.longest + 6
    assert run.trainer.accumulate_grad_batches == -(-16 // (30 // longest)) > 1
    assert len(seen.sizes) == 2 * run.trainer.accumulate_grad_batches
    assert max(seen.sizes) <= 30
    assert largest_difference(run.weights, whole.weights) < 1e-6


@pytest.mark.parametrize(
    ("data", "trainer", "message"),
    [
        ({"micro_batch_tokens": 7}, {}, "micro_batch_tokens is 7, but a single completion may have"),
        ({"micro_batch_tokens": 30}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches is 3: set one of"),
    ],
)
def test_impossible_budgets(data, trainer, message):
    with pytest.raises(ValueError, match=message):
        fit(data=data, trainer=trainer)


def test_a_budget_that_exceeds_the_memory():
    check_token_budget(1000, lambda tokens: 6e6 * tokens + 1e9, state=2e9, free=10e9)
    with pytest.raises(ValueError, match=r"about 10\.2 GiB beside 1\.9 GiB .* about 700 tokens fit"):
        check_token_budget(1000, lambda tokens: 10e6 * tokens + 1e9, state=2e9, free=10e9)
    with pytest.raises(ValueError, match="about 0 tokens fit"):
        check_token_budget(1000, lambda tokens: 10e6 * tokens + 1e9, state=2e9, free=2e9)


def test_the_suggested_number_of_tokens_fits():
    config = Qwen2Config(**SHAPES["1.5b"])

    def needs(tokens):
        return activation_bytes(config, tokens, 2, False, 0.8) + logit_bytes(config, tokens, 4096)

    with pytest.raises(ValueError, match="tokens fit") as error:
        check_token_budget(40_000, needs, 0, 60 * 2**30)
    fitting = int(re.search(r"about ([\d,]+) tokens", str(error.value))[1].replace(",", ""))
    check_token_budget(fitting, needs, 0, 60 * 2**30)
    with pytest.raises(ValueError, match=f"about {fitting:,} tokens fit"):
        check_token_budget(fitting + 1, needs, 0, 60 * 2**30)


@pytest.mark.parametrize(("share", "measured"), [(1.0, 26.8), (0.8, 16.9), (0.6, 15.1)])
def test_the_estimate_is_above_the_measurement(share, measured):
    """GiB above weights, gradients and optimizer on an H200; ``policy.compile``, rows "1.5b" of benchmarks.update."""
    config, tokens = Qwen2Config(**SHAPES["1.5b"]), 16 * 612
    estimate = activation_bytes(config, tokens, 2, False, share) + logit_bytes(config, tokens, 4096)
    assert measured < estimate / 2**30 < 1.55 * measured


def test_a_share_of_activations_in_the_estimate():
    config = Qwen2Config(**SHAPES["1.5b"])
    shares = [activation_bytes(config, 9792, 2, False, share) for share in (1.0, 0.8, 0.3, 0.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > activation_bytes(config, 9792, 2, True), "a checkpointed layer keeps one input"
    few = 1000  # tokens with activations smaller than the weights of a layer: torch keeps all
    assert activation_bytes(config, few, 2, False, 0.3) == activation_bytes(config, few, 2, False)
    assert activation_bytes(config, 9792, 2, True, 0.3) == activation_bytes(config, 9792, 2, True)
