"""Twenty questions about a generated thing: the answer to a question is yes or no."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from lgrpo.checks import check_count
from lgrpo.environments.base import TurnError
from lgrpo.environments.games.base import Game, Play

PROPERTIES = {
    "size": ["small", "large", "tiny", "huge", "medium", "giant"],
    "colour": ["red", "blue", "green", "yellow", "black", "white"],
    "material": ["wooden", "metal", "glass", "paper", "stone", "plastic"],
    "shape": ["cube", "ball", "ring", "cone", "pyramid", "cylinder"],
}
"""Properties of things, and their values in the order in which levels add them."""


@final
class TwentyQuestions(Game):
    """Find the properties of a thing, such as a small red wooden cube.

    The answer to a text that names properties is whether the thing has all of them. A text that names a value of every
    property, all right, wins. All text counts, so it should name only what it asks for.

    >>> game = TwentyQuestions()
    >>> game.reset({"thing": {"colour": "red", "shape": "cube"}, "choices": 2, "max_turns": 4})
    >>> game.step("Is it blue?").observation
    'No.'
    >>> game.step("Is it a red cube?")
    Turn(observation='Right.', reward=1.5, done=True, errors=())
    """

    def __init__(
        self, num_properties: Sequence[int] = (2, 3, 4), choices: Sequence[int] = (2, 3, 6), num_spare_turns: int = 3
    ) -> None:
        """
        Args:
            num_properties: Number of properties of a thing, 1 to 4, of each level.
            choices: Number of values of each property, 2 to 6, of each level.
            num_spare_turns: Turns beyond those in which every thing can be found by one question for each value.
        """
        if not num_properties or len(num_properties) != len(choices):
            raise ValueError(f"num_properties is {num_properties} and choices {choices}; give both for each level")
        for number, num_choices in zip(num_properties, choices, strict=True):
            check_count("num_properties", number, at_least=1, at_most=len(PROPERTIES))
            check_count("choices", num_choices, at_least=2, at_most=6)
        check_count("num_spare_turns", num_spare_turns, at_least=0)
        self.num_properties = tuple(num_properties)
        self.choices = tuple(choices)
        self.num_spare_turns = num_spare_turns

    @property
    def num_levels(self) -> int:
        return len(self.choices)

    def generate(self, level: int, rng: random.Random) -> dict[str, Any]:
        number, choices = self.num_properties[level], self.choices[level]
        values = {name: PROPERTIES[name][:choices] for name in list(PROPERTIES)[-number:]}
        max_turns = number * (choices - 1) + 1 + self.num_spare_turns
        listed = "; ".join(f"{name}: {', '.join(own)}" for name, own in values.items())
        thing = {name: own[int(rng.random() * choices)] for name, own in values.items()}
        question = (
            f"Find out which thing I think of. Ask questions that I can answer with yes or no, such as: is it "
            f"{next(iter(values.values()))[0]}? To win, name all its properties in one question. You have {max_turns} "
            f"questions. The properties are {listed}."
        )
        return {"question": question, "thing": thing, "choices": choices, "max_turns": max_turns}

    def begin(self, row: Mapping[str, Any]) -> None:
        self._thing = dict(row["thing"])
        choices = {name: PROPERTIES[name][: row["choices"]] for name in self._thing}
        self._property = {value: name for name, values in choices.items() for value in values}

    def move(self, text: str) -> Play:
        found = [word for word in re.findall(r"[a-z]+", text.lower()) if word in self._property]
        if not found:
            error = TurnError("no_move", f"no property in {text[:100]!r}")
            return Play("Name one of the properties.", error=error)
        is_right = all(self._thing[self._property[word]] == word for word in found)
        if is_right and {self._property[word] for word in found} == set(self._thing):
            return Play("Right.", has_won=True)
        return Play("Yes." if is_right else "No.")
