"""Games: each is played by a scripted player, and its rows determine its episodes."""

from __future__ import annotations

import json
import re
from collections import deque

import pytest

from lgrpo.environments import GuessNumber, TextMaze, TwentyQuestions
from lgrpo.environments.games.maze import shortest_path
from lgrpo.environments.games.twenty_questions import PROPERTIES

GAMES = [GuessNumber(), TextMaze(), TextMaze(shows_map=False), TwentyQuestions()]


def halving(row):
    """Player that halves the range, as a generator that receives observations."""
    low, high = 1, row["limit"]
    while True:
        guess = (low + high) // 2
        observation = yield f"I guess {guess}."
        low, high = (guess + 1, high) if observation == "Higher." else (low, guess - 1)


def walking(row):
    """Player that follows a shortest path of the map."""
    steps = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
    maze = row["maze"]
    start = next((i, line.index("S")) for i, line in enumerate(maze) if "S" in line)
    paths, queue = {start: []}, deque([start])
    while queue:
        cell = queue.popleft()
        for name, (down, right) in steps.items():
            other = cell[0] + down, cell[1] + right
            if other not in paths and maze[other[0]][other[1]] != "#":
                paths[other] = [*paths[cell], name]
                queue.append(other)
    goal = next((i, line.index("G")) for i, line in enumerate(maze) if "G" in line)
    yield from (f"Go {name.title()}!" for name in paths[goal])


def asking(row):
    """Player that asks for one value after the other and names the thing at the end."""
    known = []
    for name in row["thing"]:
        values = PROPERTIES[name][: row["choices"]]
        for value in values[:-1]:
            if (yield f"Is it {value}?") == "Yes.":
                known.append(value)
                break
        else:
            known.append(values[-1])
    yield f"It is a {' '.join(known)}!"


PLAYERS = {GuessNumber: halving, TextMaze: walking, TwentyQuestions: asking}


def play(game, row):
    """Play the game of a row, and return its turns."""
    assert game.reset(row) is None
    player, turns = PLAYERS[type(game)](row), []
    text = next(player)
    while True:
        turns.append(game.step(text))
        if turns[-1].done:
            return turns
        text = player.send(turns[-1].observation)


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game).__name__)
def test_a_good_player_wins_every_game(game):
    for row in game.generate_rows(60, seed=1):
        turns = play(game, row)
        assert not any(turn.errors for turn in turns)
        assert [turn.reward for turn in turns[:-1]] == [0.0] * (len(turns) - 1)
        assert len(turns) <= row["max_turns"]
        assert turns[-1].reward == pytest.approx(2 - len(turns) / row["max_turns"])
        if isinstance(game, TextMaze):
            assert len(turns) == shortest_path(row["maze"])


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game).__name__)
def test_a_bad_player_loses_after_all_turns(game):
    for row in game.generate_rows(3, seed=1):
        game.reset(row)
        turns = [game.step("I do not know.") for _ in range(row["max_turns"])]
        assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
        assert all(turn.reward == 0 for turn in turns)
        assert {error.kind for turn in turns for error in turn.errors} == {"no_move"}


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game).__name__)
def test_rows_are_determined_by_the_seed_and_graded(game):
    rows = game.generate_rows(30, seed=3)
    assert rows == game.generate_rows(30, seed=3)
    assert rows[:10] == game.generate_rows(10, seed=3)
    assert rows != game.generate_rows(30, seed=4)
    assert [row["difficulty"] for row in rows] == [0, 1, 2] * 10
    lengths = [sum(row["max_turns"] for row in rows if row["difficulty"] == level) for level in range(3)]
    assert lengths == sorted(lengths)
    assert json.loads(json.dumps(rows)) == rows
    assert all(str(row["max_turns"]) in row["question"] for row in rows)
    problems = [json.dumps(row | {"solution": None}) for row in rows if row["difficulty"] == 2]
    assert len(set(problems)) == 10


@pytest.mark.parametrize("game", GAMES, ids=lambda game: type(game).__name__)
def test_an_episode_depends_on_its_row_only(game):
    rows = game.generate_rows(6, seed=0)
    first = [play(game, row) for row in rows]
    again = [play(type(game)(), row) for row in reversed(rows)]
    assert first == again[::-1]


def test_guesses_that_count():
    game = GuessNumber(limits=[100])
    game.reset({"number": 42, "limit": 100, "max_turns": 20})
    for text, observation in [
        ("Not 10 but 50", "Lower."),
        ("41.", "Higher."),
        ("(41)", "Higher."),
        ("41.5", "Answer with one number."),
        ("x42", "Answer with one number."),
        ("1" * 30, "Answer with one number."),
        ("101", "The number is between 1 and 100."),
        ("-42", "The number is between 1 and 100."),
        ("**42**", "Right."),
    ]:
        assert game.step(text).observation == observation


def test_the_reward_falls_with_the_turns():
    game, rewards = GuessNumber(), []
    for num_wrong in range(4):
        game.reset({"number": 5, "limit": 10, "max_turns": 4})
        turns = [game.step("1") for _ in range(num_wrong)] + [game.step("5")]
        rewards.append(turns[-1].reward)
    assert rewards == [1.75, 1.5, 1.25, 1.0]


def test_walls_and_detours():
    game = TextMaze()
    row = {"maze": ["#####", "#S.G#", "#####"], "max_turns": 10}
    game.reset(row)
    turn = game.step("north")
    assert turn.observation == "There is a wall. You can go east. The goal is 2 east."
    assert [error.kind for error in turn.errors] == ["impossible_move"]
    assert game.step("First west, then east").observation == "You can go east, west. The goal is 1 east."
    assert game.step("east").reward == pytest.approx(2 - 3 / 10)


@pytest.mark.parametrize("maze", [["###", "#S#", "###"], ["#####", "#S#G#", "#####"]])
def test_mazes_without_a_path(maze):
    with pytest.raises(ValueError, match=r"the maze has no G|no path leads from S to G"):
        TextMaze().reset({"maze": maze, "max_turns": 3})


def test_every_cell_of_a_maze_can_be_reached():
    for row in TextMaze(sizes=[6]).generate_rows(20, seed=0):
        cells = [cell for line in row["maze"] for cell in line]
        assert len(cells) - cells.count("#") == 2 * 36 - 1  # a tree: 36 cells and 35 openings


def test_questions_and_answers():
    game = TwentyQuestions()
    game.reset({"thing": {"material": "glass", "shape": "ball"}, "choices": 3, "max_turns": 9})
    for text, observation in [
        ("Is it made of glass?", "Yes."),
        ("glass or metal?", "No."),
        ("A metal ball?", "No."),
        ("Is it a pyramid?", "Name one of the properties."),
        ("A glass ball!", "Right."),
    ]:
        assert game.step(text).observation == observation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GuessNumber(limits=[]), "limits is empty"),
        (lambda: GuessNumber(limits=[1]), "limits is 1; it must be at least 2"),
        (lambda: TextMaze(sizes=[]), "sizes is empty"),
        (lambda: TextMaze(sizes=[51]), "sizes is 51"),
        (lambda: TwentyQuestions(num_properties=[5], choices=[2]), "num_properties is 5"),
        (lambda: TwentyQuestions(num_properties=[2], choices=[2, 3]), "give both for each level"),
    ],
)
def test_settings_that_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
