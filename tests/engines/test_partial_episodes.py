"""Episodes of several turns in partial rollouts: cut anywhere, continued in the same environments, and never lost."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from lgrpo import TransformersEngine
from lgrpo.engines import EngineError, EnvironmentEngine
from lgrpo.engines.completions import Generation
from lgrpo.environments import EpisodeLimits, Turn
from lgrpo.types import Prompt
from tests.engines.episodes import (
    SAMPLING,
    check_continued_episodes,
    generate_in_parts,
)
from tests.environments.diaries import Counting, Diary, diaries
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


def test_same_episodes_if_the_weights_stay(policy, engine, tmp_path, monkeypatch):
    """However they are cut: within the first turn, within a later one, or between two."""
    monkeypatch.setattr("lgrpo.engines.partial_episodes.GRACE", 60.0)  # so that turns have the same decoding steps
    wrapped = EnvironmentEngine(Diary(tmp_path), engine, max_tokens_per_turn=6, limits=None)
    whole = wrapped.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    kinds = set()
    for cut in range(1, 20):
        groups, (begun, _) = generate_in_parts(wrapped, PROMPTS, policy.tokenizer, [cut])
        assert [[e.token_ids for e in group] for group in groups] == [[e.token_ids for e in group] for group in whole]
        assert [[e.turn_rewards for e in group] for group in groups] == [[e.turn_rewards for e in g] for g in whole]
        for episode in (episode for group in begun.values() for episode in group):
            num_begun = len(episode.turns) if episode.turns[-1][0] < len(episode.token_ids) else len(episode.observed)
            kinds.add((num_begun, episode.finish_reason))
    assert {(0, None), (1, None), (2, None), (3, None), (3, "stop")} <= kinds


def test_an_episode_without_its_environment_starts_again(policy, engine, tmp_path):
    """As after a resume. It has the same random streams, and so, with the same weights, the same tokens."""
    wrapped = EnvironmentEngine(Diary(tmp_path), engine, max_tokens_per_turn=6, limits=None)
    whole = wrapped.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    groups, (begun, _) = generate_in_parts(
        wrapped, PROMPTS, policy.tokenizer, [5], lambda number: number and wrapped.end_episodes()
    )
    num_unfinished = sum(episode.finish_reason is None for group in begun.values() for episode in group)
    assert num_unfinished > 0
    assert [[e.token_ids for e in group] for group in groups] == [[e.token_ids for e in group] for group in whole]
    assert [[e.turn_rewards for e in group] for group in groups] == [[e.turn_rewards for e in g] for g in whole]
    assert len(diaries(tmp_path)) == 12 + 12 + num_unfinished


def test_an_episode_of_other_tokens_starts_again(policy, engine, tmp_path):
    """A live episode that is not the one to continue is ended."""
    wrapped = EnvironmentEngine(Diary(tmp_path), engine, max_tokens_per_turn=6, limits=None)
    whole = wrapped.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    first = partial_generation(wrapped, policy)
    engine.on_step = stopping(wrapped, 5)
    wrapped.generate_part(first)
    engine.on_step = None
    num_live = len(wrapped._live)
    assert num_live > 0
    second = partial_generation(wrapped, policy)  # begins with nothing, although episodes are live
    wrapped.generate_part(second)
    assert [[e.token_ids for e in second.groups[i]] for i in range(3)] == [[e.token_ids for e in g] for g in whole]
    assert len(wrapped._live) == 0
    assert len(wrapped._episodes._episodes) == 0, "an environment was not ended"


def partial_generation(wrapped, policy):
    weights = wrapped.require_weights()
    return Generation(PROMPTS, 4, SAMPLING, 0, policy.tokenizer, None, *weights, is_partial=True)


def stopping(wrapped, step):
    steps = iter(range(1, 10**6))
    return lambda: next(steps) == step and wrapped.stop()


class Refusing(Diary):
    """Its reset returns an observation that is not in the prompt."""

    def reset(self, row):
        super().reset(row)
        return "not in the prompt"


def test_an_error_ends_all_episodes(policy, engine, tmp_path):
    wrapped = EnvironmentEngine(Refusing(tmp_path), engine, max_tokens_per_turn=6, limits=None)
    with pytest.raises(EngineError, match=r"Refusing.reset returned 'not in the prompt'"):
        wrapped.generate_part(partial_generation(wrapped, policy))
    assert len(wrapped._live) == 0
    assert len(wrapped._episodes._episodes) == 0


def test_a_generation_that_waits_for_an_environment_stops(policy, engine):
    """It does not wait for the answer, which comes in the next generation."""
    released, waiting = threading.Event(), threading.Event()

    class Slow(Counting):
        def step(self, text):
            if self.turn == 0:
                waiting.set()
                assert released.wait(60)
            return super().step(text)

    wrapped = EnvironmentEngine(Slow(), engine, max_tokens_per_turn=6, limits=None)
    expected = EnvironmentEngine(Counting(), engine, max_tokens_per_turn=6, limits=None)
    whole = expected.generate(PROMPTS, 4, SAMPLING, 0, policy.tokenizer)
    first = partial_generation(wrapped, policy)
    thread = threading.Thread(target=wrapped.generate_part, args=(first,))
    thread.start()
    assert waiting.wait(60)
    while not all(episode.is_waiting for episode in wrapped._live._episodes.values()):
        time.sleep(0.01)
    wrapped.stop()
    thread.join()
    assert not first.groups
    released.set()
    second = partial_generation(wrapped, policy)
    second.begun = first.unfinished
    wrapped.generate_part(second)
    assert [[e.token_ids for e in second.groups[i]] for i in range(3)] == [[e.token_ids for e in g] for g in whole]


def test_enough_groups_stop_the_engine(policy, engine):
    """An answer of the environment that completes a group stops the turns that are being sampled."""
    answered = threading.Event()

    class Late(Counting):
        """The last answer to the first group comes while the second turn of the other is being sampled."""

        def reset(self, row):
            super().reset(row)
            self.is_short = row["is_short"]

        def step(self, text):
            if self.is_short:
                assert answered.wait(60)
                return Turn(done=True)
            return super().step(text)

    prompts = [replace(PROMPTS[0], row={"is_short": True}), replace(PROMPTS[1], row={"is_short": False})]
    wrapped = EnvironmentEngine(Late(), engine, max_tokens_per_turn=6, limits=None)
    part = Generation(prompts, 4, SAMPLING, 0, policy.tokenizer, None, *wrapped.require_weights(), is_partial=True)
    part.needed = 1
    num_steps = []

    def wait_in_the_second_turn():
        if engine._generation.num_samples > 1:  # first turns, which siblings have together
            return
        num_steps.append(1)
        answered.set()
        for _ in range(6000):
            if engine._generation.is_stopped:
                return
            time.sleep(0.01)

    engine.on_step = wait_in_the_second_turn
    wrapped.generate_part(part)
    assert list(part.groups) == [0]
    assert max(len(episode.observed) for episode in part.unfinished[1]) == 1
    assert len(num_steps) == 1, "the engine sampled on"
