"""Parts of an episode that a person watches or plays: engines of the turns, and the environment."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Awaitable, Mapping
from typing import Any, final

from lgrpo.commands.play_view import EpisodeView
from lgrpo.engines import RolloutEngine
from lgrpo.engines.completions import Generation
from lgrpo.engines.wrapper import WrapperEngine
from lgrpo.environments import Environment, Observation, Turn
from lgrpo.types import Completion


@final
class WatchedEngine(WrapperEngine):
    """Samples turns with an inner engine and shows each."""

    def __init__(self, engine: RolloutEngine, view: EpisodeView, pauses: bool) -> None:
        super().__init__(engine)
        self._view = view
        self._pauses = pauses

    def sample(self, generation: Generation) -> None:
        [prompt] = generation.prompts
        self._view.observe(prompt.token_ids)
        if self._pauses:
            input("Enter for the next turn ")
        [[completion]] = self.engine.generate(
            generation.prompts, 1, generation.sampling, generation.seed, generation.tokenizer
        )
        self._view.sample(completion)
        generation.keep(0, [completion])


@final
class PlayerEngine(WrapperEngine):
    """Lets a person write the turns: a line each. The end of the input raises ``EOFError``."""

    def __init__(self, engine: RolloutEngine, view: EpisodeView) -> None:
        super().__init__(engine)
        self._view = view

    def sample(self, generation: Generation) -> None:
        [prompt] = generation.prompts
        self._view.observe(prompt.token_ids)
        text = input("your turn> " if sys.stdin.isatty() else "")
        tokenizer = generation.tokenizer
        token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        if (end := tokenizer.eos_token_id) is not None:
            token_ids = [*token_ids, int(end)]
        completion = Completion(
            token_ids=token_ids,
            logprobs=[float("nan")] * len(token_ids),
            text=text,
            finish_reason="stop",
            behaviour_step=generation.step,
            version=generation.version,
        )
        self._view.sample(completion)
        generation.keep(0, [completion])


@final
class WatchedEnvironment(Environment):
    """Environment whose turns are shown. A deep copy has a copy of the environment and the same view."""

    def __init__(self, environment: Environment, view: EpisodeView) -> None:
        self._environment = environment
        self._view = view
        self.keeps_special_tokens = environment.keeps_special_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedEnvironment:
        return WatchedEnvironment(copy.deepcopy(self._environment, memo), self._view)

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._environment.tool_schemas()

    def use_chat_template(self, chat_template: str | None) -> None:
        self._environment.use_chat_template(chat_template)

    def reset(self, row: Mapping[str, Any]) -> Observation | Awaitable[Observation | None] | None:
        return self._environment.reset(row)

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        self._view.called(text)
        turn = self._environment.step(text)
        if inspect.isawaitable(turn):
            return self._report_later(turn)
        self._report(turn)
        return turn

    def truncate(self) -> float | Awaitable[float]:
        return self._environment.truncate()

    async def _report_later(self, turn: Awaitable[Turn]) -> Turn:
        answer = await turn
        self._report(answer)
        return answer

    def _report(self, turn: object) -> None:
        if isinstance(turn, Turn):  # another value is an error, which the engine describes
            self._view.answered(turn)
