"""Episodes from any engine: checks of its log-probabilities in every turn, in one generation and in several."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from lgrpo.engines import EnvironmentEngine, Sampling, completion_text
from lgrpo.engines.completions import Generation
from tests.environments.diaries import Counting, Diary, Talkative, diaries, told

SAMPLING = Sampling(max_tokens=20, stop=list("56789"))
DROPPING = {"max_tokens_per_turn": 4, "max_contexts": 3, "dropped_text": ">"}
"""Settings with which episodes of ``Talkative`` drop observations."""


def texts_of(episode, tokenizer, stop):
    """Return what the environment must have been told in an episode."""
    return [completion_text(episode.token_ids[start:end], stop, tokenizer) for start, end in episode.turns]


def context_of(prompt, episode, turn):
    """Return the tokens that the model read before a turn."""
    kept, start = list(prompt.token_ids), 0
    for one in episode.dropped:
        end = episode.turns[turn][0]
        kept += episode.token_ids[start : min(one.start, end)]
        if one.start < end:
            kept += episode.token_ids[slice(one.middle, one.stop) if one.turn <= turn else slice(one.start, one.middle)]
        start = one.stop
    return kept + episode.token_ids[start : episode.turns[turn][0]]


def mismatch_of(policies, prompt, episode):
    """Return the largest difference of a log-probability from that under the weights of its step, in its context."""
    steps = [step for num_tokens, step, _ in episode.spans for _ in range(num_tokens)]
    assert len(steps) == len(episode.token_ids) == len(episode.logprobs)
    worst = 0.0
    for turn, (start, stop) in enumerate(episode.turns):
        context = context_of(prompt, episode, turn)
        tokens = torch.tensor([context + episode.token_ids[start:stop]])
        mask = torch.arange(tokens.shape[1])[None] >= len(context)
        for step in set(steps[start:stop]):
            with torch.no_grad():
                expected, _ = policies[step](tokens, mask, 1.0)
            own = torch.tensor(steps[start:stop]) == step
            difference = expected[0, len(context) :][own] - torch.tensor(episode.logprobs[start:stop])[own]
            worst = max(worst, float(difference.abs().max()))
    return worst


def check_episodes(policy, engine, prompts, tolerance):
    """Check that engine and policy agree at every sampled token of every turn."""
    wrapped = EnvironmentEngine(Counting(), engine, max_tokens_per_turn=6, limits=None)
    groups = check_agreement(policy, wrapped, prompts, tolerance)
    assert sum(len(episode.turns) == 3 for group in groups for episode in group) >= len(prompts)
    again = wrapped.generate(prompts[1:], 4, SAMPLING, 0, policy.tokenizer)
    assert [[e.token_ids for e in group] for group in again] == [[e.token_ids for e in group] for group in groups[1:]]


def check_limits(policy, engine, prompts):
    """Check that a prompt's own limit cuts its completions, and changes nothing else."""
    sampling = Sampling(max_tokens=8)
    whole = engine.generate(prompts, 3, sampling, 0, policy.tokenizer)
    limits = [1, 5, 20, *[None] * (len(prompts) - 3)]
    limited = [replace(prompt, max_tokens=limit) for prompt, limit in zip(prompts, limits, strict=True)]
    cut = engine.generate(limited, 3, sampling, 0, policy.tokenizer)
    for limit, group, other in zip(limits, cut, whole, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids[:limit] for c in other]
        for one, own in zip(group, other, strict=True):
            assert one.finish_reason == ("length" if len(one.token_ids) < len(own.token_ids) else own.finish_reason)
    assert any(len(c.token_ids) == 8 for c in whole[0])


def check_dropping_episodes(policy, engine, prompts, tolerance, folder):
    """Check the same of episodes that drop observations."""
    wrapped = EnvironmentEngine(Talkative(folder), engine, limits=None, **DROPPING)
    groups = check_agreement(policy, wrapped, prompts, tolerance)
    assert sum(len({one.turn for one in e.dropped}) == 2 for group in groups for e in group) >= len(prompts)


def check_agreement(policy, wrapped, prompts, tolerance):
    groups = wrapped.generate(prompts, 4, SAMPLING, 0, policy.tokenizer)
    policies = {wrapped.state.step: policy}
    mismatches = [
        mismatch_of(policies, p, episode) for p, group in zip(prompts, groups, strict=True) for episode in group
    ]
    assert max(mismatches) <= tolerance
    return groups


def spoken(episode):
    """Return the tokens of an episode without replacements of dropped observations."""
    replacements = {index for one in episode.dropped for index in range(one.middle, one.stop)}
    return [token for index, token in enumerate(episode.token_ids) if index not in replacements]


def generate_in_parts(wrapped, prompts, tokenizer, cuts, before_part=lambda number: None):
    """Sample episodes in several partial generations; return all, and what was unfinished after each generation.

    Each ends after a number of decoding steps, or when a group is whole ("group"); the last one is not cut.
    ``before_part`` is called with the number of each.
    """
    whole, begun, parts = {}, {}, []
    inner = wrapped.engine
    for number, cut in enumerate([*cuts, None]):
        before_part(number)
        asked = [index for index in range(len(prompts)) if index not in whole]
        steps = iter(range(1, 10**6))

        def count(steps=steps, cut=cut):
            if next(steps) == cut:
                wrapped.stop()

        part = Generation(
            [prompts[index] for index in asked], 4, SAMPLING, 0, tokenizer, None, *wrapped.require_weights()
        )
        part.begun = {asked.index(index): group for index, group in begun.items()}
        part.is_partial = True
        part.needed = 1 if cut == "group" else None
        inner.on_step = count
        try:
            wrapped.generate_part(part)
        finally:
            inner.on_step = None
        for place, group in part.begun.items():
            after = part.groups.get(place) or part.unfinished[place]
            for one, other in zip(group, after, strict=True):
                assert spoken(other)[: len(spoken(one))] == spoken(one), "tokens are kept"
                rewards = one.turn_rewards or ()
                assert (other.turn_rewards or ())[: len(rewards)] == rewards
        whole |= {asked[place]: group for place, group in part.groups.items()}
        begun = {asked[place]: group for place, group in part.unfinished.items()}
        assert whole.keys().isdisjoint(begun)
        assert whole.keys() | begun.keys() == set(range(len(prompts)))
        parts.append(begun)
    assert not begun
    return [whole[index] for index in range(len(prompts))], parts


def check_continued_episodes(
    policy, engine, prompts, tolerance, cuts, folder, limits=None, environment=Diary, **settings
):
    """Check that episodes are cut anywhere, and continued with other weights, in the same environments.

    The engine holds the policy's weights, as it does afterwards.
    """
    step, tokenizer = engine.state.step, policy.tokenizer
    policies = {step: policy}
    settings = {"max_tokens_per_turn": 6} | settings
    wrapped = EnvironmentEngine(environment(folder), engine, limits=limits, **settings)

    def change_weights(number):
        if number:
            policies[step + number] = other = copy.deepcopy(policies[step + number - 1])
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(0.3 * torch.randn_like(p))
            engine.load_weights(other.weights(), step=step + number)

    try:
        groups, parts = generate_in_parts(wrapped, prompts, tokenizer, cuts, change_weights)
        episodes = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        assert max(mismatch_of(policies, *episode) for episode in episodes) <= tolerance
        assert max(len(episode.spans) for _, episode in episodes) > 1, "nothing was continued"
        said = sorted(texts_of(episode, tokenizer, SAMPLING.stop) for _, episode in episodes)
        assert sorted(told(calls) for calls in diaries(folder)) == said, "each turn exactly once and in order"
        assert all(len(episode.turn_rewards) == len(episode.turns) for _, episode in episodes)
        return groups, parts
    finally:
        wrapped.end_episodes()
        engine.load_weights(policy.weights(), step=step)
