"""Tokens of the solutions that a warm start trains on: texts, or the turns of an episode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable
from typing import TypeVar, final

from transformers import PreTrainedTokenizerBase

from lgrpo.engines.observations import ObservationEncoder
from lgrpo.environments import Environment, Turn
from lgrpo.rewards.base import run_anywhere
from lgrpo.types import Prompt

_T = TypeVar("_T")


@final
class Demonstrations:
    """Turns the solution of a row into tokens, each with whether it is trained on.

    A solution of several turns is played: the environment of the task, in this process, answers each turn, and its
    observations are put between them as in a sampled episode.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, environment: Environment | None) -> None:
        self._tokenizer = tokenizer
        self._environment = copy.deepcopy(environment)
        if self._environment is not None:
            self._environment.use_chat_template(tokenizer.chat_template)

    def __call__(self, prompt: Prompt) -> tuple[list[int], list[bool]]:
        """Return the tokens of a solution, without those of the prompt, and which of them the policy writes."""
        solution = prompt.row["solution"]
        if not isinstance(solution, list):
            token_ids = self._encode(str(solution))
            return token_ids, [True] * len(token_ids)
        return self._play(prompt, [str(turn) for turn in solution])

    def _play(self, prompt: Prompt, turns: list[str]) -> tuple[list[int], list[bool]]:
        if self._environment is None:
            raise ValueError(
                f"the solution of the prompt {prompt.text[:60]!r} has {len(turns)} turns, but the task has no "
                "environment that answers them: write it as one text"
            )
        encoder = ObservationEncoder(self._tokenizer, prompt.chat)
        _resolved(self._environment.reset(prompt.row))
        token_ids: list[int] = []
        is_trained: list[bool] = []
        for number, text in enumerate(turns, 1):
            written = self._encode(text)
            token_ids += written
            is_trained += [True] * len(written)
            answer: Turn = _resolved(self._environment.step(text))
            if number == len(turns):
                break
            if answer.done:
                raise ValueError(
                    f"the solution of the prompt {prompt.text[:60]!r} has {len(turns)} turns, but the episode ends "
                    f"after turn {number}: {text[:60]!r}"
                )
            observed = encoder(answer.observation, token_ids[-1])
            token_ids += observed
            is_trained += [False] * len(observed)
        return token_ids, is_trained

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a turn and the one that ends it."""
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        end = self._tokenizer.eos_token_id
        return token_ids if end is None else [*token_ids, int(end)]


def _resolved(value: _T | Awaitable[_T]) -> _T:
    """Return a value, waited for if it is awaitable."""
    return run_anywhere(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[_T]) -> _T:
    return await value
