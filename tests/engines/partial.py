"""The law of partial generations, for every engine that can continue completions from their tokens."""

from __future__ import annotations

import copy

import torch

from lgrpo import Sampling
from lgrpo.engines.completions import Generation

SAMPLING = Sampling(max_tokens=22)
TRUNCATED = Sampling(max_tokens=22, top_k=11, top_p=0.98).with_kept()


def check_continued(engine, policy, questions, tolerance, needed=1, sampling=SAMPLING):
    """Check that completions are left, kept, and continued from their tokens with other weights.

    The engine holds the policy's weights, as it does afterwards.
    """
    step, tokenizer = engine.state.step, policy.tokenizer
    whole = engine.generate(questions, 2, sampling, 7, tokenizer)
    seen = []
    first = Generation(
        questions, 2, sampling, 7, tokenizer, lambda index, _: seen.append(index), *engine.require_weights()
    )
    first.needed, first.is_partial = needed, True
    engine.generate_part(first)
    assert needed <= len(first.groups) < len(questions)
    assert sorted(seen) == sorted(first.groups)
    assert first.groups.keys().isdisjoint(first.unfinished)
    assert first.groups.keys() | first.unfinished.keys() == set(range(len(questions)))
    assert all([c.token_ids for c in group] == [c.token_ids for c in whole[i]] for i, group in first.groups.items())
    for index, group in first.unfinished.items():
        assert any(c.finish_reason is None for c in group)
        for completion, its in zip(group, whole[index], strict=True):
            assert its.token_ids[: len(completion.token_ids)] == completion.token_ids
            assert len(completion.logprobs) == len(completion.token_ids)
            assert len(completion.kept or ()) == (len(completion.token_ids) if sampling.returns_kept else 0)
    assert any(c.token_ids and c.finish_reason is None for group in first.unfinished.values() for c in group)

    other = copy.deepcopy(policy)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn_like(p))
    engine.load_weights(other.weights(), step=step + 1)
    indices = sorted(first.unfinished)
    second = Generation([questions[i] for i in indices], 2, sampling, 7, tokenizer, None, *engine.require_weights())
    second.begun = {number: first.unfinished[index] for number, index in enumerate(indices)}
    second.is_partial = True
    engine.generate_part(second)
    assert not second.unfinished
    assert len(second.groups) == len(indices)
    policies, num_continued = {step: policy, step + 1: other}, 0
    for number, group in second.groups.items():
        prompt = questions[indices[number]].token_ids
        for completion, before in zip(group, second.begun[number], strict=True):
            assert completion.token_ids[: len(before.token_ids)] == before.token_ids
            assert completion.finish_reason
            assert len(completion.token_ids) <= sampling.max_tokens
            if before.finish_reason:
                assert completion == before, "it was finished"
            tokens = torch.tensor([prompt + completion.token_ids])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
            start = 0
            for length, at, version in completion.spans:
                assert version == engine.state.version - (at == step)
                expected, _ = policies[at](tokens, mask, 1.0, kept=kept_of(completion, len(prompt)))
                expected = expected[mask][start : start + length]
                found = torch.tensor(completion.logprobs[start : start + length])
                assert float((expected - found).detach().abs().max()) <= tolerance
                start += length
            num_continued += len(completion.spans) > 1
    assert num_continued > 0
    engine.load_weights(policy.weights(), step=step)


def kept_of(completion, start):
    """Return the sets of a completion as the policy takes them; None if it has none."""
    if completion.kept is None:
        return None
    counts = [0] * start + completion.kept.counts.tolist()
    return torch.tensor([completion.kept.token_ids.tolist()]), torch.tensor([counts])
