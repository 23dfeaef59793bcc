"""Packed or padded, the rows of a batch have the loss and the gradient of rows alone, in every family of models."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest
import torch

from lgrpo import ClippedLoss, Prompt, Sampling, TransformersEngine
from lgrpo.losses import PolicyLogprobs
from lgrpo.types import StepTotals
from tests.helpers import a_batch, largest_difference, tiny_policy

PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "speed.md"
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES = {
    "llama": {},
    "phi3": {},
    "smollm3": {},
    "olmo3": WINDOW,
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma3_text": WINDOW,
    "gemma4_text": WINDOW | {"hidden_size_per_layer_input": 8, "global_head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gpt_oss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ATTENTION = {"lfm2": "sdpa", "qwen3_5_text": "sdpa", "qwen3_next": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}
"""Attention of families whose rows are padded, without further packages."""


def build(family, **settings):
    torch.manual_seed(0)
    policy = tiny_policy(config=SIZE | {"model_type": family} | FAMILIES[family], **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).* cannot be packed, so rows are padded")
        policy.build()
    with torch.no_grad():
        for parameter in policy.parameters():  # as large as trained ones: rows that see each other then differ visibly
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return policy


def loss_and_gradient(policy, batch, logprobs):
    policy.zero_grad()
    loss = ClippedLoss(1.0, 10.0)(batch, PolicyLogprobs(policy=logprobs, entropy=torch.zeros_like(logprobs))).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def logprobs_alone(policy, batch):
    """Compute log-probabilities one row at a time and without padding."""
    rows = []
    for tokens, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
        found = torch.log_softmax(policy.model(input_ids=tokens[None, :length], use_cache=False).logits[0, :-1], -1)
        found = found.gather(1, tokens[1:length, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(found, (1, len(tokens) - length)))
    return torch.where(batch.completion_mask, torch.stack(rows), 0.0)


def check_against_rows_alone(policy):
    """Rows alone are computed by transformers' eager attention."""
    batch, attention = a_batch(size=6, width=20, seed=3), policy.model.config._attn_implementation
    policy.model.set_attn_implementation("eager")
    alone = logprobs_alone(policy, batch)
    batch.behaviour_logprobs = alone.detach() + torch.where(batch.completion_mask, torch.rand(alone.shape) / 10, 0.0)
    tokens = float(batch.completion_mask.sum())
    batch.totals = StepTotals(all_tokens=tokens, live_tokens=tokens, all_sequences=6, live_sequences=6)
    expected_loss, expected = loss_and_gradient(policy, batch, alone)
    policy.model.set_attn_implementation(attention)
    together, _ = policy(batch.tokens, batch.completion_mask, 1.0)
    assert torch.allclose(together, alone, atol=1e-4)
    loss, found = loss_and_gradient(policy, batch, together)
    assert torch.isclose(loss, expected_loss, atol=1e-5)
    assert largest_difference(found, expected) < 1e-4 * max(float(g.abs().max()) for g in expected.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_together_equal_rows_alone(family):
    policy = build(family)
    assert policy.attention == ATTENTION.get(family, "packed")
    check_against_rows_alone(policy)


def convolution_of_rows(hidden_states, weight, bias=None, activation=None, seq_idx=None):
    """Convolve each row alone, as the package causal-conv1d does with ``seq_idx`` [1, N]."""
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, hidden_states.shape[2])
    padding = weight.shape[1] - 1
    found = [
        torch.nn.functional.conv1d(
            hidden_states[:, :, seq_idx[0] == row], weight[:, None], bias, padding=padding, groups=len(weight)
        )[:, :, :-padding]
        for row in seq_idx.unique()
    ]
    whole = torch.cat(found, 2)
    return whole if activation is None else torch.nn.functional.silu(whole)


def delta_rule_of_rows(delta_rule):
    """Apply the linear attention to each row alone, as the package flash-linear-attention does with ``cu_seqlens``."""

    def of_rows(query, key, value, g, beta, cu_seqlens, **options):
        cuts = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        options = {name: options[name] for name in ("use_qk_l2norm_in_kernel",)}
        rows = [[tensor[:, start:end] for tensor in (query, key, value)] + [start, end] for start, end in cuts]
        found = [delta_rule(q, k, v, g=g[:, a:b], beta=beta[:, a:b], **options)[0] for q, k, v, a, b in rows]
        return torch.cat(found, 1), None

    return of_rows


def install_kernels(monkeypatch, family, *, convolution=True):
    """Replace the functions of transformers that ignore the bounds of rows by ones that respect them."""
    name = family.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    original = modeling.causal_conv1d_fn

    def convolve(*arguments, **options):  # alone, rows have no index
        if options.get("seq_idx") is None:
            return original(*arguments, **options)
        names = ("bias", "activation", "seq_idx")
        return convolution_of_rows(*arguments, **{key: options[key] for key in names if key in options})

    if convolution:
        monkeypatch.setattr(modeling, "causal_conv1d_fn", convolve)
    if family != "lfm2":
        delta_rule = modeling.torch_chunk_gated_delta_rule
        of_rows = delta_rule_of_rows(delta_rule)
        monkeypatch.setattr(
            modeling,
            "torch_chunk_gated_delta_rule",
            lambda *a, **o: (delta_rule if o.get("cu_seqlens") is None else of_rows)(*a, **o),
        )


HYBRIDS = ("lfm2", "qwen3_5_text", "qwen3_next")


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_hybrid_models_are_packed_with_kernels_that_take_bounds(family, gradient_checkpointing, monkeypatch):
    install_kernels(monkeypatch, family)
    policy = build(family, gradient_checkpointing=gradient_checkpointing)
    assert policy.attention == "packed"
    check_against_rows_alone(policy)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_one_of_two_kernels_is_not_enough(family, monkeypatch):
    install_kernels(monkeypatch, family, convolution=False)
    assert build(family).attention == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedded_engine_samples_from_the_policy(family):
    """Prompts have different lengths, siblings share a prompt, and rows end at different tokens."""
    policy, engine = build(family), TransformersEngine()
    engine.load_weights(policy.weights(), step=0)
    texts = ("12>", "3456789>", "0>")
    prompts = [Prompt(text=t, token_ids=policy.tokenizer(t).input_ids, row={}, position=i) for i, t in enumerate(texts)]
    groups = engine.generate(prompts, 4, Sampling(max_tokens=12), 0, policy.tokenizer)
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 1
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            tokens = torch.tensor([prompt.token_ids + completion.token_ids])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt.token_ids)
            expected, _ = policy(tokens, mask, 1.0)
            assert torch.allclose(expected[mask], torch.tensor(completion.logprobs), atol=1e-4)


def test_the_page_lists_the_families():
    """The table says what the tests above check."""
    text = PAGE.read_text(encoding="utf-8").split("## Packed rows by family")[1]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    listed = {family.strip(" `"): (plain, kernels) for names, plain, kernels in rows[2:] for family in names.split(",")}
    names = {"packed": "packed", "sdpa": "padded", "eager": "padded, eager attention"}
    plain = {family: names[ATTENTION.get(family, "packed")] for family in FAMILIES}
    assert listed == {family: (text, "packed" if family in HYBRIDS else text) for family, text in plain.items()}
