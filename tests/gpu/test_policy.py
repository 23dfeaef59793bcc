"""The policy's kernels on a GPU. ``pytest tests/gpu -s``."""

from __future__ import annotations

import pytest
import torch

from lgrpo.functional import Keys, packed_attention
from lgrpo.policy.sequences import on_device
from tests.policy.test_families import build
from tests.policy.test_shared_prompts import batch_of_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_shared_prompts(family, compile):
    """With the kernel for variable lengths, whose queries are then the last tokens of their sequences.

    In bfloat16 sharing loses as much of the float32 gradient as not sharing, within a fifth.
    """
    policy, batch = build(family, share_prompts=True, compile=compile).cuda(), on_device(batch_of_groups(), "cuda")
    weight = torch.linspace(-1, 1, batch.tokens.numel(), device="cuda").view_as(batch.tokens)

    def gradient(precise, share_prompts):
        policy.share_prompts = share_prompts
        policy.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=not precise):
            logprobs, _ = policy(batch.tokens, batch.completion_mask, 1.0)
        (logprobs * weight).sum().backward()
        found = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
        return logprobs.detach(), torch.cat(found)

    exact, exact_gradient = gradient(True, False)
    alike, alike_gradient = gradient(True, True)
    assert torch.allclose(alike, exact, atol=1e-4)
    assert torch.allclose(alike_gradient, exact_gradient, atol=1e-4 * float(exact_gradient.abs().max()))
    errors = []
    for share_prompts in (False, True):
        found, found_gradient = gradient(False, share_prompts)
        errors.append((float((found - exact).abs().mean()), float((found_gradient - exact_gradient).norm())))
    assert all(shared <= 1.2 * alone for alone, shared in zip(*errors, strict=True)), errors


def test_gradients_of_shared_tokens_are_summed_in_float32():
    """Each of 2,000 sequences sees a shared token and its own one alike. On a CPU sums in bfloat16 are exact enough."""
    count = 2000
    states = torch.zeros(1 + count, 1, 8, dtype=torch.bfloat16, device="cuda")
    value = states.clone().requires_grad_()
    numbers = torch.arange(count + 1, device="cuda")
    pairs = torch.stack([torch.zeros_like(numbers), numbers], 1).flatten()[1:]  # the first sequence has token 0 alone
    keys = Keys(pairs, torch.nn.functional.pad(2 * numbers + 1, (1, 0)).to(torch.int32), 2)
    bounds = torch.arange(count + 2, dtype=torch.int32, device="cuda")
    packed_attention(states, states, value, bounds, 1, 1.0, keys=keys).sum().backward()
    assert float(value.grad[0, 0, 0]) == pytest.approx(1 + count / 2, rel=0.01)
