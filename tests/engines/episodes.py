"""Episodes from any engine: a check of its log-probabilities in every turn."""

from __future__ import annotations

import torch

from lgrpo.engines import EnvironmentEngine, Sampling
from lgrpo.environments import Environment, Turn


class Counting(Environment):
    """Answers each turn with its number, and ends after the third."""

    def reset(self, row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return Turn(f"{self.turn}>", reward=1.0, done=self.turn == 3)


def check_episodes(policy, engine, prompts, tolerance):
    """Check that engine and policy agree at every sampled token of every turn."""
    sampling = Sampling(max_tokens=20, stop=list("56789"))
    wrapped = EnvironmentEngine(Counting(), engine, max_tokens_per_turn=6, limits=None)
    groups = wrapped.generate(prompts, 4, sampling, 0, policy.tokenizer)
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for episode in group:
            tokens = torch.tensor([prompt.token_ids + episode.token_ids])
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt.token_ids)
            for start, stop in episode.observed:
                mask[0, len(prompt.token_ids) + start : len(prompt.token_ids) + stop] = False
            expected, _ = policy(tokens, mask, 1.0)
            sampled = mask[0, len(prompt.token_ids) :]
            difference = expected[mask] - torch.tensor(episode.logprobs)[sampled]
            worst = max(worst, float(difference.detach().abs().max()))
    assert worst <= tolerance
    assert sum(len(episode.turns) == 3 for group in groups for episode in group) >= len(prompts)
    again = wrapped.generate(prompts[1:], 4, sampling, 0, policy.tokenizer)
    assert [[e.token_ids for e in group] for group in again] == [[e.token_ids for e in group] for group in groups[1:]]
