"""The law of truncated sampling, for every engine that returns the tokens that could have been drawn."""

from __future__ import annotations

import torch

from lgrpo import Sampling
from lgrpo.data.collate import Group, collate_rollout
from lgrpo.engines.transformers import log_distribution
from tests.helpers import tiny_policy

TRUNCATIONS = (
    {"top_k": 5},
    {"top_k": 8, "top_p": 0.9},
    {"top_k": 8, "min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 100, "top_p": 0.8, "temperature": 1.6},
)


@torch.no_grad()
def dense_distributions(policy, batch, sampling):
    """Return log-probabilities [B, T, V] that tokens are drawn from, by the whole logits of every row."""
    logits = torch.zeros(*batch.tokens.shape, policy.num_logits)
    for row, length in enumerate(batch.lengths.tolist()):
        logits[row, 1:length] = policy.model(input_ids=batch.tokens[row : row + 1, :length]).logits[0, :-1]
    return log_distribution(logits.flatten(0, 1), sampling).view(logits.shape)


def sets_of(batch, vocabulary=13):
    """Return which tokens [B, T, V] are kept at every sampled token."""
    ids, counts = batch.kept
    mask = torch.zeros(*batch.tokens.shape, vocabulary, dtype=torch.bool)
    for row in range(len(batch)):
        start = 0
        for column, count in enumerate(counts[row].tolist()):
            mask[row, column, ids[row, start : start + count].long()] = True
            start += count
    return mask


def batch_of(prompts, groups, sampling):
    """Return completions as a rollout."""
    scored = [Group(p, group, [0.0] * len(group)) for p, group in zip(prompts, groups, strict=True)]
    return collate_rollout(scored, 0, sampling, 0)


def sharp_policy(**settings):
    """Return a policy whose distributions differ much from token to token, so that the sets do too."""
    torch.manual_seed(2)
    policy = tiny_policy(**settings)
    policy.build()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(3.0)
    return policy


def check_kept(policy, engine, prompts, tolerance):
    """Check sets and log-probabilities of each token; the engine holds the policy's weights, as it does afterwards."""
    sharp, step, sizes = sharp_policy(config=policy.settings), engine.state.step, set()
    engine.load_weights(sharp.weights(), step=step + 1)
    for truncation in TRUNCATIONS:
        sampling = Sampling(max_tokens=12, **truncation)
        groups = engine.generate(prompts, 4, sampling.with_kept(), 0, policy.tokenizer)
        plain = engine.generate(prompts, 4, sampling, 0, policy.tokenizer)
        assert all(c.kept is None for group in plain for c in group), "nobody asked for them"
        assert [[c.token_ids for c in group] for group in plain] == [[c.token_ids for c in group] for group in groups]
        batch = batch_of(prompts, groups, sampling)
        own, expected = batch.completion_mask, dense_distributions(sharp, batch, sampling)
        assert torch.equal(sets_of(batch)[own], expected[own] > -torch.inf)
        with torch.no_grad():
            logprobs, _ = sharp(batch.tokens, own, batch.temperature, kept=batch.kept)
        assert float((logprobs - batch.behaviour_logprobs)[own].abs().max()) <= tolerance
        assert not any(c.kept.incomplete for group in groups for c in group)
        sizes |= set(batch.kept_counts[own].tolist())
    assert len(sizes) > 5
    engine.load_weights(policy.weights(), step=step)
