"""Environments of verifiers, where it is installed, and its version that cannot be used."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
from types import ModuleType

import pytest

from lgrpo.engines import EnvironmentEngine, Sampling
from lgrpo.environments import EpisodeLimits
from lgrpo.environments.adapters import Verifiers
from lgrpo.tasks import EnvironmentTask, Template
from lgrpo.types import Prompt
from tests.helpers import tiny_policy

MODULE = "tests.environments.verifiers_style"


def play(environment, row, *texts):
    """Return the answers of an environment to texts, and its reward if none of them ended the episode."""

    async def episode():
        observation = await environment.reset(row)
        turns = [await environment.step(text) for text in texts]
        return observation, turns, None if turns[-1].done else await environment.truncate()

    return asyncio.run(episode())


@pytest.fixture
def game():
    pytest.importorskip("verifiers")
    return Verifiers(f"{MODULE}.hot_or_cold")


def test_a_game_of_several_turns(game):
    rows = game.generate_rows(10, seed=0)
    assert len(rows) == 6
    assert rows != game.generate_rows(10, seed=1)
    row = next(row for row in rows if row["answer"] == "4")
    assert row["prompt"] == [{"role": "system", "content": "A game."}, {"role": "user", "content": "Guess, round 4."}]
    observation, turns, _ = play(game, row, "0", "2", "4")
    assert observation is None
    assert [turn.observation for turn in turns[:2]] == [
        [{"role": "user", "content": "cold"}],
        [{"role": "user", "content": "hot"}],
    ]
    assert turns[2] == (turns[2].observation, pytest.approx(1.2), True, [])
    for other in (copy.deepcopy(game), pickle.loads(pickle.dumps(game))):
        assert play(other, row, "0", "2", "4") == (observation, turns, None)


def test_the_ends_of_an_episode(game):
    row = game.generate_rows(10, seed=0)[0]
    assert play(game, row, "100")[2] == pytest.approx(0.4)  # truncated by the engine
    _, turns, _ = play(game, row, "100", "100", "stop")
    assert turns[-1].done  # by an error that verifiers scores
    assert turns[-1].reward == pytest.approx(0.2)
    short = Verifiers(f"{MODULE}.hot_or_cold", {"max_turns": 2})
    assert [turn.done for turn in play(short, row, "100", "100")[1]] == [False, True]


def test_tools():
    pytest.importorskip("verifiers")
    environment = Verifiers(f"{MODULE}.calculator")
    assert environment.keeps_special_tokens
    (schema,) = environment.tool_schemas()
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    environment.use_chat_template("<tool_call>{{ tool_call | tojson }}</tool_call>")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    row = environment.generate_rows(1, seed=0)[0]
    _, turns, _ = play(environment, row, f"Let me see. {call}", "<tool_call>add</tool_call>", "It is 5.")
    assert turns[0].observation == [{"role": "tool", "name": "add", "content": "5", "tool_call_id": "call00000"}]
    assert [error.kind for error in turns[1].errors] == ["malformed_call"]
    assert turns[1].observation[0]["role"] == "tool"
    assert (turns[2].reward, turns[2].done) == (1.0, True)
    environment = Verifiers(f"{MODULE}.calculator", parser="python")
    assert play(environment, row, "[add(40, b=2)]", "42")[1][0].observation[0]["content"] == "42"


def test_a_single_turn_and_what_is_refused():
    pytest.importorskip("verifiers")
    environment = Verifiers(f"{MODULE}.one_turn")
    row = environment.generate_rows(1, seed=0)[0]
    assert [play(environment, row, text)[1][0].reward for text in ("yes", "no")] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"compares episodes of a group"):
        Verifiers(f"{MODULE}.compared")
    with pytest.raises(ValueError, match=r"dict, not an environment that answers turn by turn"):
        Verifiers("builtins.dict")


def test_episodes_in_worker_processes(game):
    """The tiny model writes digits, which are guesses."""
    policy = tiny_policy()
    policy.build()
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}>{% endfor %}"
    task = EnvironmentTask(game, num_rows=6, num_held_out=2, template=Template(prompt="{prompt}", chat=True))
    prompts = [
        Prompt(token_ids=[3], text=">", row=row, position=i, chat={}) for i, row in enumerate(task.rows("train"))
    ]
    engine = EnvironmentEngine(game, limits=EpisodeLimits(num_workers=2), max_turns=3, max_tokens_per_turn=6)
    engine.load_weights(policy.weights(), step=0)
    try:
        groups = engine.generate(prompts, 2, Sampling(max_tokens=40, stop=list("0123456789")), 0, policy.tokenizer)
    finally:
        engine.close()
    assert all(episode.turn_rewards and episode.failure is None for group in groups for episode in group)
    assert {len(episode.turns) for group in groups for episode in group} >= {3}


def test_newer_versions_are_refused(monkeypatch):
    newer = ModuleType("verifiers")
    newer.__version__ = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    with pytest.raises(ImportError, match=r"verifiers 0\.4\.0 has no MultiTurnEnv.*verifiers>=0\.3,<0\.4"):
        Verifiers("game")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lgrpo\[verifiers\]'"):
        Verifiers("game")
