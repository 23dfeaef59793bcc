"""Prompts that are read once for all their completions (``policy.share_prompts``)."""

from __future__ import annotations

from itertools import combinations, pairwise

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lgrpo.partition import consecutive_parts
from lgrpo.policy import LoRA
from lgrpo.policy.forward import can_share_prompts
from lgrpo.policy.sequences import read_in_context
from lgrpo.tasks import SortDigits
from tests.environments.diaries import UnevenlyTalkative
from tests.helpers import LowDigits, a_batch, fit, largest_difference, tiny_policy
from tests.policy.test_families import ATTENTION, FAMILIES, HYBRIDS, SIZE, build, install_kernels, loss_and_gradient
from tests.test_partial_turns import data_of


def batch_of_groups(seed=3, width=24):
    """Return three groups of four rows, of which one has a single sampled token and one an observation."""
    batch = a_batch(size=12, width=width, seed=seed)
    for rows in torch.arange(12).split(4):
        prompt = int(torch.randint(1, 8, (1,), generator=torch.Generator().manual_seed(int(rows[0]))))
        batch.tokens[rows, :prompt] = batch.tokens[rows[0], :prompt]
        column, lengths = torch.arange(width), torch.tensor([1, 5, 14, 9])[:, None] + prompt
        batch.attention_mask[rows] = column < lengths
        batch.completion_mask[rows] = (column < lengths) & (column >= prompt)
    batch.completion_mask[6, 12:14] = False
    batch.loss_mask = batch.completion_mask.clone()
    batch.behaviour_logprobs = torch.where(batch.completion_mask, -torch.rand(12, width), 0.0)
    batch.advantages = torch.where(batch.completion_mask, torch.randn(12, 1), 0.0)
    batch.totals.all_tokens = batch.totals.live_tokens = float(batch.completion_mask.sum())
    batch.totals.all_sequences = batch.totals.live_sequences = 12
    return batch


def tokens_read(policy, compute):
    """Return the number of tokens that the model reads while a function runs."""
    found = []
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: found.append(inputs[0]))
    compute()
    hook.remove()
    return sum(tokens.numel() for tokens in found)


def results(policy, batch, share_prompts):
    policy.share_prompts = share_prompts
    logprobs, entropy = policy(batch.tokens, batch.completion_mask, 0.8)
    return logprobs.detach(), entropy.detach(), *loss_and_gradient(policy, batch, logprobs)


def compare(policy, batch, other=None):
    """Compare log-probabilities, loss and gradient with those of rows that each read their prompt."""
    alone, shared = results(other or policy, batch, False), results(policy, batch, True)
    for ours, theirs in zip(shared[:3], alone[:3], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in alone[3].values())
    assert scale > 0
    assert largest_difference(shared[3], alone[3]) < 1e-5 * scale


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ATTENTION])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_same_gradient_as_rows_with_their_own_prompts(family, gradient_checkpointing):
    policy = build(family, share_prompts=True, gradient_checkpointing=gradient_checkpointing)
    assert policy.share_prompts
    compare(policy, batch_of_groups())


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("packed", [False, True])
def test_models_with_other_layers_read_their_own_prompts(family, packed, monkeypatch):
    if packed:
        install_kernels(monkeypatch, family)
    with pytest.warns(UserWarning, match="cannot share prompts, so each completion is read with its own"):
        policy = build(family, share_prompts=True)
    assert policy.attention == ("packed" if packed else "sdpa")
    assert not policy.share_prompts
    with pytest.raises(AssertionError):
        compare(policy, batch_of_groups())  # which shares them nevertheless


@pytest.mark.slow("compiles layers")
def test_compiled_layers():
    """Also with other numbers of rows, groups and tokens than those they were compiled for."""
    policy, plain = build("qwen3", share_prompts=True, compile=True), build("qwen3")
    graphs = []
    for rows in (slice(0, 12), slice(2, 9), slice(0, 4)):
        compare(policy, batch_of_groups().select(torch.arange(12)[rows]), plain)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1], "compiled again for other sizes"


def test_each_prompt_is_read_once():
    """The last token of a row predicts nothing, and a row's order among the others does not matter."""
    policy, batch = build("qwen3", share_prompts=True), batch_of_groups()
    batch = batch.select(torch.randperm(12, generator=torch.Generator().manual_seed(0)))
    prompts = batch.completion_mask.int().argmax(1)
    num_own = int((batch.lengths - prompts - 1).sum())
    num_prompts = sum(int(prompts[batch.positions == group][0]) for group in range(3))
    read = tokens_read(policy, lambda: policy(batch.tokens, batch.completion_mask, 1.0))
    assert read == num_own + num_prompts
    policy.share_prompts = False
    read = tokens_read(policy, lambda: policy(batch.tokens, batch.completion_mask, 1.0))
    assert read == num_own + int(prompts.sum())


def test_prompts_that_begin_alike_are_not_shared():
    policy, batch = build("qwen3", share_prompts=True), batch_of_groups()
    batch.tokens[:, :1] = 5
    batch.tokens[4:8, :3] = batch.tokens[8:12, :3]
    batch.completion_mask[11] = False  # nothing was sampled in this row
    batch.tokens[10, 0] = 6
    compare(policy, batch)


@pytest.mark.parametrize("family", HYBRIDS)
def test_other_layers_of_a_new_model_in_bfloat16(family, monkeypatch):
    """Its states depend so little on them that a comparison does not show it."""
    install_kernels(monkeypatch, family)
    policy = tiny_policy(config=SIZE | {"model_type": family} | FAMILIES[family])
    policy.build()
    assert not can_share_prompts(policy.model.bfloat16())


def test_padded_attention_is_refused():
    with pytest.raises(ValueError, match=r"policy.share_prompts needs policy.attention packed, not sdpa"):
        tiny_policy(share_prompts=True, attention="sdpa")


SETTINGS = {
    "several micro-batches": {"trainer": {"accumulate_grad_batches": 3}},
    "budget": {"data": {"micro_batch_tokens": 40}},
    "lag, reuse and log-probabilities of the policy": {
        "v": 2,
        "i": 2,
        "data": {"behaviour_logprobs": "policy", "generate_ahead": True},
    },
    "lora": {"policy": {"lora": LoRA(rank=2)}},
    "checkpointing": {"policy": {"gradient_checkpointing": True}},
}


class Pieces(L.Callback):
    """Records the rows of every micro-batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rows.append(batch.rows.tolist())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_is_the_same(name):
    runs = []
    for share_prompts in (False, True):
        settings = dict(SETTINGS[name])
        data = {"task": SortDigits(num_digits=3, num_held_out=4, reward=LowDigits())} | settings.pop("data", {})
        torch.manual_seed(0)
        policy = tiny_policy(share_prompts=share_prompts, **settings.pop("policy", {}))
        pieces = Pieces()
        runs.append(fit(policy=policy, rollouts=4, learning_rate=0.1, data=data, callbacks=[pieces], **settings))
        assert policy.share_prompts == share_prompts
        filled = [rows for rows in pieces.rows if rows]
        consecutive = all(max(rows) - min(rows) == len(rows) - 1 for rows in filled)
        assert consecutive == (share_prompts or all(len(rows) == 16 for rows in filled))
    own, shared = runs
    for ours, theirs in zip(shared.recorder.rollouts, own.recorder.rollouts, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
    assert largest_difference(own.weights, shared.weights) < 1e-5
    for ours, theirs in zip(shared.logged, own.logged, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)


def test_episodes_with_dropped_observations(tmp_path):
    """Their first contexts have a prompt in common; later ones begin with what was said before."""
    run = fit(v=1, rollouts=2, data=data_of(tmp_path / "diaries", environment=UnevenlyTalkative, partial=False))
    policy, batch = run.module.policy, run.recorder.rollouts[-1]
    assert batch.contexts is not None
    with torch.no_grad():
        alone, _ = read_in_context(policy, batch)
        policy.share_prompts = True
        shared, _ = read_in_context(policy, batch)
    assert torch.allclose(alone, shared, atol=1e-5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_parts_are_the_best(sizes, data):
    """No other cut has a smaller largest part."""
    number = data.draw(st.integers(1, len(sizes)))
    prompts, repeated = [0] * len(sizes), [0] * len(sizes)
    for row in range(1, len(sizes)):
        is_sibling = data.draw(st.booleans())
        prompts[row] = prompts[row - 1] if is_sibling else data.draw(st.integers(0, 9))
        repeated[row] = prompts[row] if is_sibling else 0
    sizes = [size + prompt for size, prompt in zip(sizes, prompts, strict=True)]
    parts = consecutive_parts(sizes, number, repeated)
    assert [row for part in parts for row in part.rows] == list(range(len(sizes)))
    assert len(parts) == number
    assert all(part.rows for part in parts)

    def size_of(start, end):
        return sum(sizes[start:end]) - sum(repeated[start + 1 : end])

    assert [part.size for part in parts] == [size_of(part.rows[0], part.rows[-1] + 1) for part in parts]
    cuts = [(0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), number - 1)]
    best = min(max(size_of(start, end) for start, end in pairwise(cut)) for cut in cuts)
    assert max(part.size for part in parts) == best


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_size_of_a_part_is_what_the_model_reads(share_prompts):
    """But for the last token of a row, which predicts none."""
    run = fit(rollouts=1, data={"task": SortDigits(num_digits=3, num_held_out=4, reward=LowDigits())})
    policy, batch, sizes = run.module.policy, run.recorder.rollouts[0], []
    policy.share_prompts = share_prompts
    policy.model.base_model.register_forward_pre_hook(
        lambda model, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    for piece, part in zip(batch.split(3, share_prompts), batch.parts(3, share_prompts), strict=True):
        assert piece.rows.tolist() == part.rows
        with torch.no_grad():
            read_in_context(policy, piece)
        assert sizes[-1] == part.size - len(piece)
