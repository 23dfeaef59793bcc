"""Environments as users write them for TRL's ``environment_factory``: plain classes that import nothing from lgrpo."""

from __future__ import annotations

import asyncio
import random
import sqlite3


class Increment:
    """A counter, as in TRL's guide: no reward of its own."""

    def __init__(self) -> None:
        self.counter = 0

    def reset(self, **kwargs) -> None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increase the counter.

        Args:
            step: The amount to add.

        Returns:
            The value of the counter.
        """
        self.counter += step
        return self.counter


class Echo:
    """An environment whose tool has the name ``step``, with a reward that the environment owns."""

    def __init__(self) -> None:
        self.longest = 0

    def reset(self) -> str | None:
        self.longest = 0
        return None

    def step(self, message: str) -> str:
        """
        Echo a message.

        Args:
            message: The message.

        Returns:
            The same message.
        """
        self.longest = max(self.longest, len(message))
        return message

    def get_reward(self) -> float:
        return self.longest / 10


class Words:
    """A word game: the first observation comes from ``reset``, and moves after the end raise an error."""

    def reset(self, word: str, num_guesses: int = 3, **kwargs) -> str:
        self._word = word
        self._left = num_guesses
        self.reward = 0.0
        self.done = False
        return f"The word has {len(word)} letters. You have {num_guesses} guesses."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: A word of the right length.

        Returns:
            A letter for each of the guess: G (right place), Y (wrong place) or X (not in the word).
        """
        if self.done:
            raise ValueError("Game over.")
        if len(word) != len(self._word):
            raise ValueError(f"The word has {len(self._word)} letters.")
        self._left -= 1
        self.reward = float(word == self._word)
        self.done = bool(self.reward) or self._left == 0
        pairs = zip(word, self._word, strict=True)
        return "".join("G" if a == b else "Y" if a in self._word else "X" for a, b in pairs)

    def get_reward(self) -> float:
        return self.reward

    def _hidden(self, secret):
        return secret

    @property
    def left(self) -> int:
        raise AssertionError("properties are not evaluated")


class Shop:
    """Async tools and an async reward, beside a sync tool and a static one."""

    async def reset(self, **kwargs) -> str:
        self._basket = []
        self._prices = {"tea": 2.5, "milk": 1.0}
        return "You have 5 coins."

    async def price(self, item: str) -> float:
        """Look a price up.

        Args:
            item: The item (choices: ["tea", "milk"])
        """
        await asyncio.sleep(0)
        return self._prices[item]

    def buy(self, item: str, count: int = 1) -> dict:
        """Buy something.

        Args:
            item: The item.
            count: How many.
        """
        self._basket += [item] * count
        return {"basket": self._basket}

    @staticmethod
    def weather() -> str:
        """Look out of the window."""
        return "rain"

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(self._basket == ["tea", "tea"])


class Tables:
    """Questions about a database that the model queries, as TRL's agent script has them: SQL in, rows out."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:")
        self._connection.execute("create table genes (name text, length integer)")

    def reset(self, genes: dict, **kwargs) -> list:
        self.num_queries = 0
        self._connection.execute("delete from genes")
        self._connection.executemany("insert into genes values (?, ?)", genes.items())
        return [{"type": "text", "text": "The table genes has the columns name and length."}]

    def query(self, sql: str, limit: int | None = None) -> list[tuple]:
        """
        Run a query.

        Args:
            sql: The query, which may only read.
            limit: Number of rows to return.

        Returns:
            The rows.
        """
        self.num_queries += 1
        if not sql.lower().startswith("select"):
            raise PermissionError("only SELECT is allowed")
        return self._connection.execute(sql).fetchmany(limit or 100)

    def get_reward(self) -> float:
        return 1.0 / self.num_queries if self.num_queries else 0.0


def make_increment() -> Increment:
    return Increment()


def dice(sides: int) -> int:
    """Throw a die.

    Args:
        sides: Number of sides.
    """
    return random.Random(0).randint(1, sides)
