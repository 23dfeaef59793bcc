"""Games of textarena for one player."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from lgrpo.environments.base import Environment, Turn, TurnError


@final
class TextArena(Environment):
    """Game of textarena for one player, such as ``Minesweeper-v0`` or ``FrozenLake-v0``.

    An episode depends on the field ``seed`` of its row only. The rules are the first observation, unless the row has
    them in ``question``. The reward is that of the game, at its end. Some games need word lists of nltk.
    """

    def __init__(self, game: str, settings: dict[str, Any] | None = None) -> None:
        """
        Args:
            game: Name of the game in textarena.
            settings: Arguments of its class.
        """
        self.game = game
        self.settings = settings or {}
        self._env: Any = None
        self._random: Any = None
        self._make()

    def generate_rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return rows with different seeds and with the rules in ``question``."""
        seeds, rows = random.Random(seed).sample(range(2**31), count), []
        for own in seeds:
            rows.append({"question": self._begin(own), "seed": own})
        return rows

    def reset(self, row: Mapping[str, Any]) -> str | None:
        observation = self._begin(int(row["seed"]))
        return None if row.get("question") == observation else observation

    def step(self, text: str) -> Turn:
        with self._own_random():
            is_done, _ = self._env.step(text)
            observation, errors = self._observe()
        if not is_done:
            return Turn(observation, errors=errors)
        rewards, info = self._env.close()
        reason = str(info[0].get("reason") or "")
        if info[0].get("invalid_move"):
            errors.append(TurnError("impossible_move", reason))
        return Turn(reason or observation, float((rewards or {}).get(0, 0.0)), True, errors)

    def _begin(self, seed: int) -> str:
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._env = self._make()
            try:
                self._env.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ValueError(f"{self.game} is not a game for one player ({error})") from error
            return self._observe()[0]

    def _make(self) -> Any:
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("TextArena needs textarena: pip install 'lgrpo[textarena]'") from error
        try:
            # Without wrappers, an observation has only what is new. A wrapper would repeat all that came before.
            return textarena.make(self.game.removesuffix("-raw") + "-raw", **self.settings)
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f"textarena cannot make the game {self.game!r} ({error})") from error

    def _observe(self) -> tuple[str, list[TurnError]]:
        """Return the new messages of the game as text, and those about moves that are not allowed as errors."""
        _, messages = self._env.get_observation()
        kinds = [(message, kind.name) for _, message, kind in messages if kind.name != "PLAYER_ACTION"]
        errors = [TurnError("impossible_move", message) for message, name in kinds if name == "GAME_ADMIN"]
        return "\n".join(message.strip() for message, _ in kinds), errors

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Use the random state of this episode: textarena draws from the one of the process."""
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)
