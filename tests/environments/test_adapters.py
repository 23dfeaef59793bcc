"""Environments of other packages, where these are installed: textarena's games, and a real OpenEnv server."""

from __future__ import annotations

import copy
import pickle
import random
import socket
import threading

import pytest

from lgrpo.environments.adapters import OpenEnv, TextArena


def halve(environment):
    """Play textarena's guess-the-number by halving the range, and return all turns."""
    low, high, turns = 1, 20, []
    while not turns or not turns[-1].done:
        guess = (low + high) // 2
        turns.append(environment.step(f"I try [{guess}]."))
        low, high = (guess + 1, high) if "higher" in turns[-1].observation else (low, guess - 1)
    return turns


@pytest.fixture
def game():
    pytest.importorskip("textarena")
    return TextArena("GuessTheNumber-v0")


def test_a_game_of_textarena(game):
    rows = game.generate_rows(5, seed=0)
    assert rows == game.generate_rows(5, seed=0)
    assert rows != game.generate_rows(5, seed=1)
    assert "between 1 and 20" in rows[0]["question"]
    state = random.getstate()
    episodes = []
    for row in rows:
        assert game.reset(row) is None
        episodes.append(halve(game))
    assert all(turns[-1].reward == 1.0 and not any(turn.errors for turn in turns) for turns in episodes)
    assert len({len(turns) for turns in episodes}) > 1
    assert "I try" not in episodes[0][0].observation
    assert random.getstate() == state
    other = pickle.loads(pickle.dumps(copy.deepcopy(game)))
    for row, turns in zip(rows, episodes, strict=True):
        assert other.reset({"seed": row["seed"]}) == row["question"]
        assert halve(other) == turns


def test_wrong_moves_in_textarena(game):
    game.reset({"seed": 3})
    first, second = game.step("five"), game.step("six")
    assert [error.kind for error in (*first.errors, *second.errors)] == ["impossible_move"] * 2
    assert "invalid move" in first.observation
    assert not first.done
    assert second.done


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("Minesweeper-v0", ["[0 0]", "[7 7]", "[0 7]"]),
        ("FrozenLake-v0", ["[right]", "[down]", "[right]"]),
        ("Mastermind-v0", ["[1 2 3 4]", "[4 3 2 1]"]),
        ("TowerOfHanoi-v0", ["[A C]", "[A B]"]),
        ("Blackjack-v0", ["[Hit]", "[Stand]"] * 3),
    ],
)
def test_interleaved_games_of_textarena(name, texts):
    pytest.importorskip("textarena")

    def play(environment):
        for text in texts:
            turn = environment.step(text)
            yield turn
            if turn.done:
                return

    alone = TextArena(name)
    first = alone.reset({"seed": 5})
    expected = list(play(alone))
    assert not expected[0].errors
    one, two = TextArena(name), TextArena(name)
    assert one.reset({"seed": 5}) == first
    two.reset({"seed": 6})
    other = play(two)
    for turn, again in zip(expected, play(one), strict=True):
        next(other, None)
        random.random()  # others draw from the state of the process
        assert again == turn


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Nowhere-v0", {}, "textarena cannot make the game 'Nowhere-v0'"),
        ("GuessTheNumber-v0", {"minimum": 1}, "textarena cannot make the game"),
        ("TicTacToe-v0", {}, "TicTacToe-v0 is not a game for one player"),
    ],
)
def test_games_that_are_refused(name, settings, message):
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match=message):
        TextArena(name, settings).reset({"seed": 0})


@pytest.fixture(scope="module")
def url():
    """Address of an OpenEnv server with a counting environment."""
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        answer: str
        count: int

    class Counting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State()

        def reset(self, seed=None, episode_id=None, **kwargs):
            self._count, self._seed = 0, seed
            return Heard(answer=f"seed {seed}", count=0)

        def step(self, action, timeout_s=None, **kwargs):
            self._count += 1
            is_done = action.message == "bye"
            return Heard(answer=action.message.upper(), count=self._count, reward=0.5, done=is_done)

        @property
        def state(self):
            return self._state

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def test_a_server_of_openenv(url):
    environment = pickle.loads(pickle.dumps(OpenEnv(url, observation_field="answer")))
    other = OpenEnv(url)
    assert environment.reset({"seed": 3, "question": "Talk."}) == "seed 3"
    assert other.reset({}) == '{"answer": "seed None", "count": 0}'
    assert environment.step("hello") == ("HELLO", 0.5, False, ())
    assert other.step("hi").observation == '{"answer": "HI", "count": 1}'
    assert environment.step("bye") == ("BYE", 0.5, True, ())
    assert environment.reset({"seed": 4}) == "seed 4"
    assert other.step("hi").observation == '{"answer": "HI", "count": 2}'
    assert pickle.loads(pickle.dumps(environment)).reset({"seed": 5}) == "seed 5"


def test_a_field_that_the_observation_lacks(url):
    with pytest.raises(ValueError, match="observation_field is 'text'; the observation has answer, count"):
        OpenEnv(url, observation_field="text").reset({})


@pytest.mark.parametrize("make", [lambda: TextArena("Minesweeper-v0"), lambda: OpenEnv("http://x").reset({})])
def test_a_package_that_is_not_installed(make, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    monkeypatch.setitem(__import__("sys").modules, "openenv.core", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lgrpo\[(textarena|openenv)\]'"):
        make()
