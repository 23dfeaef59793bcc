"""Episodes of several turns in partial rollouts: cut anywhere, continued in the same environments, and never lost."""

from __future__ import annotations

import pytest
import torch

from lgrpo import TransformersEngine
from lgrpo.engines import EnvironmentEngine
from lgrpo.environments import EpisodeLimits
from lgrpo.types import Prompt
from tests.engines.episodes import (
    SAMPLING,
    check_continued_episodes,
    generate_in_parts,
)
from tests.environments.diaries import Diary
from tests.helpers import tiny_policy

PROMPTS = [Prompt(token_ids=[3, 5, 11], text="24>", row={"question": "24"}, position=position) for position in range(3)]
PROCESSES = EpisodeLimits(num_workers=2)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    return policy


@pytest.fixture
def engine(policy):
    engine = TransformersEngine()
    engine.load_weights(policy.weights(), step=5)
    return engine


@pytest.mark.parametrize("cuts", [[2], [3], [5, 1], [8], [1, 2, 3], [10, 2]])
def test_each_token_has_the_probability_under_its_weights(policy, engine, tmp_path, cuts):
    check_continued_episodes(policy, engine, PROMPTS, 1e-5, cuts, tmp_path)


def test_in_worker_processes(policy, engine, tmp_path):
    check_continued_episodes(policy, engine, PROMPTS, 1e-5, [3, 2], tmp_path, PROCESSES)


@pytest.mark.parametrize("max_live", [1, 9])
def test_few_episodes_at_a_time(policy, engine, tmp_path, max_live):
    limits = EpisodeLimits(num_workers=2, max_live=max_live)
    check_continued_episodes(policy, engine, PROMPTS, 1e-5, [2, 6], tmp_path, limits)


def test_same_episodes_if_the_weights_stay(policy, engine, tmp_path):
    """However they are cut: within the first turn, within a later one, or between two."""
    wrapped = EnvironmentEngine(Diary(tmp_path), engine, max_tokens_per_turn=6, limits=None)
    whole = wrapped.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    kinds = set()
    for cut in range(1, 14):
        groups, (begun, _) = generate_in_parts(wrapped, PROMPTS, policy.tokenizer, [cut])
        assert [[e.token_ids for e in group] for group in groups] == [[e.token_ids for e in group] for group in whole]
        assert [[e.turn_rewards for e in group] for group in groups] == [[e.turn_rewards for e in g] for g in whole]
        for episode in (episode for group in begun.values() for episode in group):
            num_begun = len(episode.turns) if episode.turns[-1][0] < len(episode.token_ids) else len(episode.observed)
            kinds.add((num_begun, episode.finish_reason))
    assert {(0, None), (1, None), (2, None), (3, None), (3, "stop")} <= kinds
