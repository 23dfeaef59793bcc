"""Text maze: walk from the start to the goal, one step in each turn."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

from lgrpo.checks import check_count
from lgrpo.environments.base import TurnError
from lgrpo.environments.games.base import Game, Play

Cell: TypeAlias = tuple[int, int]

_STEPS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
_WORD = re.compile(r"\b(north|east|south|west)\b", re.IGNORECASE)


@final
class TextMaze(Game):
    """Walk through a maze from S to G. The step is the last direction that a text names.

    >>> game = TextMaze()
    >>> game.reset({"maze": ["#####", "#S.G#", "#####"], "max_turns": 4})
    >>> game.step("I go east.").observation
    'You can go east, west. The goal is 1 east.'
    >>> game.step("east").reward
    1.5
    """

    def __init__(self, sizes: Sequence[int] = (2, 3, 4), shows_map: bool = True, num_spare_turns: int = 4) -> None:
        """
        Args:
            sizes: Number of cells on each side of the maze, of each level.
            shows_map: Show the map at the start; otherwise the model sees only the directions it can go.
            num_spare_turns: Turns beyond twice the length of the shortest path.
        """
        if not sizes:
            raise ValueError("sizes is empty; give the size of each level, such as [2, 4]")
        for size in sizes:
            check_count("sizes", size, at_least=2, at_most=50)
        check_count("num_spare_turns", num_spare_turns, at_least=0)
        self.sizes = tuple(sizes)
        self.shows_map = shows_map
        self.num_spare_turns = num_spare_turns

    @property
    def num_levels(self) -> int:
        return len(self.sizes)

    def generate(self, level: int, rng: random.Random) -> dict[str, Any]:
        maze = generate_maze(self.sizes[level], rng)
        max_turns = 2 * shortest_path(maze) + self.num_spare_turns
        start, goal = find_cell(maze, "S"), find_cell(maze, "G")
        question = (
            f"Walk through a maze to the goal. Answer with one direction: north, east, south or west. You have "
            f"{max_turns} steps. {describe(maze, start, goal)}"
        )
        if self.shows_map:
            question += "\nMap (S: you, G: goal, #: wall, north is up):\n" + "\n".join(maze)
        return {"question": question, "maze": maze, "max_turns": max_turns}

    def begin(self, row: Mapping[str, Any]) -> None:
        self._maze = list(row["maze"])
        self._cell, self._goal = find_cell(self._maze, "S"), find_cell(self._maze, "G")
        shortest_path(self._maze)  # raises an error if there is none

    def move(self, text: str) -> Play:
        found = _WORD.findall(text)
        if not found:
            error = TurnError("no_move", f"no direction in {text[:100]!r}")
            return Play("Answer with one direction: north, east, south or west.", error=error)
        direction = found[-1].lower()
        cell = neighbour(self._cell, direction)
        if self._maze[cell[0]][cell[1]] == "#":
            observation = f"There is a wall. {describe(self._maze, self._cell, self._goal)}"
            return Play(observation, error=TurnError("impossible_move", f"there is a wall to the {direction}"))
        self._cell = cell
        if cell == self._goal:
            return Play("You are at the goal.", has_won=True)
        return Play(describe(self._maze, cell, self._goal))


def generate_maze(size: int, rng: random.Random) -> list[str]:
    """Return a maze of ``size`` by ``size`` cells with walls between them, in which every cell can be reached."""
    grid = [["#"] * (2 * size + 1) for _ in range(2 * size + 1)]
    path, grid[1][1] = [(1, 1)], "."
    while path:
        row, column = path[-1]
        around = [(row + 2 * a, column + 2 * b, row + a, column + b) for a, b in _STEPS.values()]
        is_inside = range(1, 2 * size)
        free = [
            step for step in around if step[0] in is_inside and step[1] in is_inside and grid[step[0]][step[1]] == "#"
        ]
        if not free:
            path.pop()
            continue
        new_row, new_column, wall_row, wall_column = free[int(rng.random() * len(free))]
        grid[wall_row][wall_column] = grid[new_row][new_column] = "."
        path.append((new_row, new_column))
    cells = [(row, column) for row in range(1, 2 * size, 2) for column in range(1, 2 * size, 2)]
    start = cells.pop(int(rng.random() * len(cells)))
    goal = cells.pop(int(rng.random() * len(cells)))
    grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
    return ["".join(line) for line in grid]


def find_cell(maze: Sequence[str], sign: str) -> Cell:
    """Return row and column of a sign."""
    for row, line in enumerate(maze):
        if sign in line:
            return row, line.index(sign)
    raise ValueError(f"the maze has no {sign}: {maze}")


def neighbour(cell: Cell, direction: str) -> Cell:
    return cell[0] + _STEPS[direction][0], cell[1] + _STEPS[direction][1]


def shortest_path(maze: Sequence[str]) -> int:
    """Return the number of steps from S to G.

    >>> shortest_path(["#####", "#S.G#", "#####"])
    2
    """
    start, goal = find_cell(maze, "S"), find_cell(maze, "G")
    distances, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for direction in _STEPS:
            other = neighbour(cell, direction)
            if other not in distances and maze[other[0]][other[1]] != "#":
                distances[other] = distances[cell] + 1
                queue.append(other)
    if goal not in distances:
        raise ValueError(f"no path leads from S to G: {maze}")
    return distances[goal]


def describe(maze: Sequence[str], cell: Cell, goal: Cell) -> str:
    """Return the directions without a wall, and where the goal is."""
    free = [direction for direction in _STEPS if maze[(c := neighbour(cell, direction))[0]][c[1]] != "#"]
    south, east = goal[0] - cell[0], goal[1] - cell[1]
    parts = [f"{abs(south)} {'south' if south > 0 else 'north'}"] * bool(south)
    parts += [f"{abs(east)} {'east' if east > 0 else 'west'}"] * bool(east)
    return f"You can go {', '.join(free)}. The goal is {' and '.join(parts)}."
