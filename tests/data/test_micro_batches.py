"""Tests of micro-batches by a budget of tokens, and of the memory estimate."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import Qwen2Config

from lgrpo.advantages import LeastVariance
from lgrpo.data.micro_batches import TokenBudget, fewest_parts, num_micro_batches
from lgrpo.engines import Sampling
from lgrpo.losses import ComposedLoss, Importance, SecondMoment
from lgrpo.policy import EffectiveSampleSize
from lgrpo.policy.memory import activation_bytes, check_token_budget, logit_bytes
from lgrpo.rewards import NOT_YET
from lgrpo.tasks import SortDigits
from tests.benchmarks.workload import SHAPES, lengths
from tests.helpers import LowDigits, a_batch, build, fit, largest_difference, tiny_policy


class Sizes(L.Callback):
    """Records the tokens of every micro-batch, 0 for empty ones."""

    def __init__(self):
        self.sizes: list[int] = []
        self.read: list[int] = []
        """Rows of the calls of the policy."""

    def on_train_start(self, trainer, pl_module):
        pl_module.policy.register_forward_pre_hook(lambda policy, args: self.read.append(len(args[0])))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.sizes.append(int(batch.num_read.sum()))


@pytest.mark.parametrize("budget", [10, 11, 25, 40, 80])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_no_lengths_exceed_the_budget(budget, share_prompts):
    for seed in range(40):
        batch = a_batch(size=24, seed=seed)
        if seed == 0:
            batch.attention_mask[:], batch.completion_mask[:, 1:], batch.loss_mask[:, 1:] = True, True, True
        pieces = batch.split(num_micro_batches(len(batch), 10, budget), share_prompts)
        assert max(int(piece.lengths.sum()) for piece in pieces) <= budget
        rows = [row for piece in pieces for row in piece.rows.tolist()]
        assert sorted(rows) == list(range(24))
        assert not share_prompts or rows == sorted(rows), "siblings are separated by a cut only"


@pytest.mark.parametrize("budget", [30, 45, 80])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_contexts_of_episodes_count(budget, share_prompts):
    for seed in range(40):
        batch = a_batch(size=24, seed=seed)
        num_contexts = torch.randint(1, 4, (24, 1), generator=torch.Generator().manual_seed(seed))
        batch.contexts = ((1 << num_contexts) - 1) * batch.attention_mask
        assert batch.num_read.tolist() == (batch.lengths * num_contexts[:, 0]).tolist()
        pieces = batch.split(num_micro_batches(len(batch), 3 * 10, budget), share_prompts)
        assert max(int(piece.num_read.sum()) for piece in pieces) <= budget
    batch.attention_mask[:8], batch.loss_mask[:8] = True, True
    batch.contexts[:8] = torch.tensor([7, 1, 1, 1, 7, 1, 1, 1])[:, None]
    pieces = batch.select(torch.arange(8)).split(4)
    assert [int(piece.num_read.sum()) for piece in pieces] == [30] * 4


@pytest.mark.parametrize("budget", [12, 25, 60, 500])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_as_few_micro_batches_as_the_lengths_need(budget, share_prompts):
    for seed in range(40):
        batch = a_batch(size=24, seed=seed)
        batch.loss_mask[seed % 24 :] = False
        most = num_micro_batches(len(batch), 10, budget)
        limit = TokenBudget(max_tokens=budget, num_micro_batches=most, num_rows=24)
        number = fewest_parts(batch, limit, share_prompts)
        assert 1 <= number <= most
        assert max(part.size for part in batch.parts(number, share_prompts)) <= budget
        if number > 1:
            assert max(part.size for part in batch.parts(number - 1, share_prompts)) > budget


def test_lengths_of_the_benchmark_fill_a_third_of_the_worst_case():
    """The example of ``tutorials/pages/speed.md``."""
    sizes = torch.tensor([100 + tokens for tokens in lengths("realistic", 448, 0, 256, 1024)])
    batch = a_batch(size=448, width=1124)
    batch.attention_mask = torch.arange(1124) < sizes[:, None]
    batch.completion_mask = batch.loss_mask = batch.attention_mask & (torch.arange(1124) >= 100)
    budget = TokenBudget(max_tokens=20480, num_micro_batches=num_micro_batches(448, 1124, 20480), num_rows=448)
    assert (budget.num_micro_batches, fewest_parts(batch, budget, False)) == (25, 8)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several passes, with a limit on lag": {"v": 3, "i": 3, "data": {"max_lag": 3}},
    "log-probabilities of the policy": {"data": {"behaviour_logprobs": "policy"}},
    "advantages that read log-probabilities": {"v": 2, "data": {"advantage": LeastVariance()}},
    "a loss that surveys the step": {"v": 2, "loss": ComposedLoss(gate=SecondMoment(1e-4), weight=Importance())},
    "a rule for the step": {"v": 2, "step_rule": EffectiveSampleSize()},
    "clipping": {"trainer": {"gradient_clip_val": 0.01}},
}


def fit_with_rule(step_rule=None, **settings):
    data = {"sampling": Sampling(max_tokens=16)} | settings.pop("data", {})
    run = build(rollouts=4, learning_rate=0.1, data=data, **settings)
    run.module.step_rule = step_rule
    run.trainer.fit(run.module, datamodule=run.data)
    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_run_respects_the_budget_and_its_steps_are_the_same(name):
    whole = fit_with_rule(**RUNS[name])
    settings = RUNS[name] | {"data": RUNS[name].get("data", {}) | {"micro_batch_tokens": 60}}
    run = fit_with_rule(callbacks=[seen := Sizes()], **settings)
    longest = run.data.train_prompts.longest + 16
    number = run.trainer.accumulate_grad_batches
    assert number == -(-16 // (60 // longest)) > 1
    assert len(seen.sizes) == run.trainer.global_step * number
    steps = [seen.sizes[start : start + number] for start in range(0, len(seen.sizes), number)]
    assert any(0 in sizes for sizes in steps)
    for sizes in steps:
        num_empty = sizes.count(0)
        assert sizes[:num_empty] == [0] * num_empty, "the last one has rows: then gradients are reduced"
        assert max(sizes) <= 60
    assert min(seen.read) > 0, "empty ones are not computed"
    assert largest_difference(run.weights, whole.weights) < 1e-6
    for ours, theirs in zip(run.logged, whole.logged, strict=True):
        for metric in ("train/loss", "train/grad_norm", "train/kl_behaviour", "train/step_skipped"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric


def test_a_development_run_trains_on_rows():
    """It ends after one micro-batch."""
    run = fit(trainer={"fast_dev_run": True}, data={"micro_batch_tokens": 60, "sampling": Sampling(max_tokens=16)})
    assert run.trainer.accumulate_grad_batches > len(run.data.micro_batches)
    assert run.recorder.gradients[0]


def test_padded_rows_fill_as_many_micro_batches_as_the_longest_would():
    """Together, rows of different lengths would take more memory than their tokens do."""
    policy = tiny_policy(attention="sdpa")
    run = fit(rollouts=2, policy=policy, data={"micro_batch_tokens": 40}, callbacks=[seen := Sizes()])
    assert len(seen.read) == 2 * run.trainer.accumulate_grad_batches
    assert min(seen.sizes) > 0


class DownAtFirst(LowDigits):
    """Scores nothing until a number of completions was seen: then every late score arrives at once."""

    def __init__(self, calls):
        self.left = calls

    def score(self, prompt, completion):
        self.left -= 1
        return NOT_YET if self.left >= 0 else super().score(prompt, completion)


@pytest.mark.parametrize("max_lag", [None, 3])
@pytest.mark.parametrize("budget", [10, 20, 24, 30, 60])
def test_late_groups_respect_the_budget(budget, max_lag):
    """Two rollouts of 16 completions are late, and join when they fit; none is trained twice or lost."""
    task = SortDigits(2, num_held_out=20, reward=DownAtFirst(16 + 32))
    data = {"task": task, "micro_batch_tokens": budget, "max_lag": max_lag}
    run = fit(rollouts=8, data=data, callbacks=[seen := Sizes()])
    assert max(seen.sizes) <= budget
    waiting, joined, dropped = (
        [batch.metrics.get(f"rollout/late_{name}", 0) for batch in run.recorder.rollouts]
        for name in ("waiting", "joined", "dropped")
    )
    assert waiting[:2] == [4, 8]
    assert sum(joined) + sum(dropped) + waiting[-1] == 8
    trained = [p for batch in run.recorder.rollouts for p in batch.positions[batch.is_known][::4].tolist()]
    assert len(trained) == len(set(trained)) == 24 + sum(joined)
    assert max_lag is None or waiting[-1] == 0
    assert budget < 60 or sum(joined) > 0, "completions shorter than the limit leave space"


@given(st.lists(st.integers(1, 10), min_size=1, max_size=40), st.integers(10, 60), st.integers(1, 16), st.data())
def test_an_admitted_rollout_fits_with_any_rows_masked(lengths, max_tokens, num_rows, data):
    number = num_micro_batches(num_rows, 10, max_tokens)
    budget = TokenBudget(max_tokens=max_tokens, num_micro_batches=number, num_rows=num_rows)
    batch = a_batch(size=40).select(torch.arange(len(lengths)))
    batch.attention_mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    batch.loss_mask = batch.attention_mask & torch.tensor([data.draw(st.booleans()) for _ in lengths])[:, None]
    assume(budget.admits([batch]) and number <= len(lengths))
    assert max(int(piece.lengths.sum()) for piece in batch.split(number)) <= max_tokens


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
