"""Sampling of episodes, turn by turn."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation
from lgrpo.engines.episode import Episode
from lgrpo.engines.observations import ObservationEncoder, as_messages, replaced
from lgrpo.engines.recovery import EngineError
from lgrpo.environments.base import Environment, Observation, Turn
from lgrpo.environments.episodes import EpisodeFailure, Episodes
from lgrpo.types import Completion, Prompt

GRACE = 0.05
"""Seconds to wait for further steps of the environment before the next turns are sampled."""


class EpisodeSampler:
    """Samples the episodes of one generation."""

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        episodes: Episodes,
        generation: Generation,
        *,
        max_turns: int,
        max_tokens_per_turn: int | None,
        max_contexts: int = 1,
        dropped_text: str = "",
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._episodes = episodes
        self._generation = generation
        self._max_turns = max_turns
        self._max_tokens_per_turn = max_tokens_per_turn
        self._max_contexts = max_contexts
        self._dropped_text = dropped_text
        limits = (generation.sampling.max_tokens, max_tokens_per_turn or generation.sampling.max_tokens)
        self._turn_sampling = replace(generation.sampling, max_tokens=min(limits))
        self._groups = [
            [Episode(index, sibling, prompt) for sibling in range(generation.num_samples)]
            for index, prompt in enumerate(generation.prompts)
        ]
        self._answers: SimpleQueue[tuple[Episode, Future[Any]] | None] = SimpleQueue()
        self._num_waiting = 0
        """Number of episodes whose environment is busy."""
        self.seconds_waited = 0.0
        """Time in which nothing was sampled, because all live episodes waited for their environments."""

    def run(self, max_live: int | None) -> list[Episode]:
        """Sample all episodes, keep each group when its last one has ended, and return the episodes.

        Args:
            max_live: Upper limit of episodes at the same time, in whole groups; None for no limit.
        """
        total, group_size = len(self._groups), self._generation.num_samples
        num_groups = total if max_live is None else max(1, max_live // group_size)
        for first in range(0, total, num_groups):
            self._run_groups(range(first, min(first + num_groups, total)))
        return [episode for group in self._groups for episode in group]

    def _run_groups(self, indices: range) -> None:
        live = [episode for index in indices for episode in self._groups[index]]
        try:
            for episode in live:
                episode.reset = self._episodes.reset(episode, episode.prompt.row)
            self._num_waiting = len(live)
            self._sample_first_turns(indices)
            while self._num_waiting:
                if ready := self._ready_episodes():
                    self._num_waiting += len(ready)
                    self._sample_turns(ready)
        finally:
            for episode in live:
                self._episodes.end(episode)

    def _sample_first_turns(self, indices: range) -> None:
        """Sample the first turn of some groups, as a run without an environment would."""
        generation = self._generation

        def on_group(index: int, completions: list[Completion]) -> None:
            for episode, completion in zip(self._groups[indices[index]], completions, strict=True):
                self._add_turn(episode, completion)

        self._engine.generate(
            generation.prompts[indices.start : indices.stop],
            generation.num_samples,
            self._turn_sampling,
            generation.seed,
            generation.tokenizer,
            on_group,
        )

    def _sample_turns(self, ready: list[Episode]) -> None:
        generation = self._generation
        self._engine.generate(
            self._turn_prompts(ready),
            1,
            self._turn_sampling,
            generation.seed,
            generation.tokenizer,
            lambda index, completions: self._add_turn(ready[index], completions[0]),
        )

    def _turn_prompts(self, ready: list[Episode]) -> list[Prompt]:
        """Return the contexts of the next turns of some episodes, each with the limit of its length."""
        return [episode.turn_prompt(self._generation.seed, self._num_left(episode, 0)) for episode in ready]

    def _add_turn(self, episode: Episode, completion: Completion) -> None:
        """Add a sampled turn, and have the environment answer it. Called from any thread."""
        episode.add_turn(completion)
        episode.is_waiting = True
        text = self._text_for_environment(completion)
        if episode.num_turns == 1:
            assert episode.reset is not None
            episode.reset.add_done_callback(partial(self._step_after_reset, episode, text))
        else:
            self._step(episode, text)

    def _text_for_environment(self, completion: Completion) -> str:
        """Return the text of a turn, with special tokens, except for the last one, if the environment reads them."""
        if not self._environment.keeps_special_tokens:
            return completion.text
        generation, token_ids = self._generation, completion.token_ids
        if token_ids and token_ids[-1] in generation.stop_ids(self._engine.held_config()):
            token_ids = token_ids[:-1]
        text = generation.tokenizer.decode(token_ids)
        ends = [end for stop in generation.sampling.stop or [] if (end := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _step_after_reset(self, episode: Episode, text: str, reset: Future[Observation | None]) -> None:
        if reset.cancelled() or reset.exception() is not None or not self._is_shown(episode, reset.result()):
            self._answers.put((episode, reset))
        else:
            self._step(episode, text)

    def _step(self, episode: Episode, text: str) -> None:
        try:
            answer = self._episodes.step(episode, text)
        except Exception as error:  # a callback of a future would only log it
            answer = Future()
            answer.set_exception(error)
        answer.add_done_callback(lambda future: self._answers.put((episode, future)))

    @staticmethod
    def _is_shown(episode: Episode, observation: Observation | None) -> bool:
        """Return whether the prompt has the first observation."""
        messages = as_messages(observation or [])
        return all(str(message["content"]).strip() in episode.prompt.text for message in messages)

    def _ready_episodes(self) -> list[Episode]:
        """Wait for answers of the environment; return the episodes whose next turn can be sampled."""
        ready = []
        timeout = None
        start = time.perf_counter()
        while self._num_waiting:
            try:
                answer = self._answers.get(timeout=timeout)
            except Empty:
                break
            assert answer is not None
            self._num_waiting -= 1
            if self._add_answer(*answer):
                ready.append(answer[0])
                timeout = GRACE
        self.seconds_waited += time.perf_counter() - start
        return ready

    def _add_answer(self, episode: Episode, future: Future[Any]) -> bool:
        """Add the environment's answer to an episode, or end it; return whether its next turn can be sampled."""
        try:
            turn = future.result()
        except EpisodeFailure as failure:
            self._fail(episode, failure)
            return False
        if episode.awaits_last_reward:
            episode.rewards[-1] += turn
            self._finish(episode, "length")
            return False
        if not isinstance(turn, Turn):
            raise EngineError(
                f"{type(self._environment).__name__}.reset returned {str(turn)[:60]!r}, which is not in the prompt "
                f"{episode.prompt.text[:60]!r}: use lgrpo.tasks.EnvironmentTask with a template that reads "
                "{observation}, or return None"
            )
        episode.rewards.append(turn.reward)
        episode.errors += turn.errors
        if turn.done:
            self._finish(episode, "length" if episode.is_cut else "stop")
            return False
        if episode.is_cut or episode.num_turns == self._max_turns:
            self._truncate(episode)
            return False
        encoder = ObservationEncoder(self._generation.tokenizer, episode.prompt.chat)
        try:
            token_ids = encoder(turn.observation, episode.token_ids[-1])
            if not token_ids:
                raise ValueError("the observation is empty, but the episode is not over")
            self._drop_if_needed(episode, len(token_ids), encoder)
        except ValueError as error:
            self._fail(episode, EpisodeFailure("errors", str(error)))
            return False
        if self._num_left(episode, len(token_ids)) <= 0:
            self._truncate(episode)
            return False
        episode.add_observation(token_ids, turn.observation)
        return True

    def _num_left(self, episode: Episode, num_tokens: int) -> int:
        """Return how many tokens of the context are left for another turn after an observation of so many tokens."""
        return self._generation.max_tokens_of(episode.index) - episode.context_length - num_tokens

    def _drop_if_needed(self, episode: Episode, num_tokens: int, encoder: ObservationEncoder) -> None:
        """Drop the earlier observations of an episode if a whole turn does not fit after one of so many tokens.

        None is dropped if that would leave no token for another turn.
        """
        left = self._num_left(episode, num_tokens)
        if episode.num_contexts == self._max_contexts or left >= (self._max_tokens_per_turn or 0):
            return
        shorter: dict[int, list[int]] = {}
        for index in episode.in_context:
            start, stop = episode.observed[index]
            observation = replaced(episode.observations[index], self._dropped_text)
            token_ids = encoder(observation, episode.token_ids[start - 1])
            if len(token_ids) < stop - start:
                shorter[index] = token_ids
                left += stop - start - len(token_ids)
        if left > 0:
            for index, token_ids in shorter.items():
                episode.drop(index, token_ids)

    def _truncate(self, episode: Episode) -> None:
        """End an episode at a limit, once the environment has given its last reward."""
        episode.awaits_last_reward = True
        self._num_waiting += 1
        self._episodes.truncate(episode).add_done_callback(lambda future: self._answers.put((episode, future)))

    def _fail(self, episode: Episode, failure: EpisodeFailure) -> None:
        """End an episode whose environment failed."""
        episode.failure = failure
        episode.rewards += [0.0] * (episode.num_turns - len(episode.rewards))
        self._finish(episode, "stop")

    def _finish(self, episode: Episode, reason: Literal["stop", "length"]) -> None:
        """End an episode, and keep its group if it was the last one."""
        episode.finish_reason = reason
        self._end(episode)
        group = self._groups[episode.index]
        if all(one.finish_reason is not None for one in group):
            step, version = self._generation.step, self._generation.version
            self._generation.keep(episode.index, [one.completion(step, version) for one in group])

    def _end(self, episode: Episode) -> None:
        """Free the environment of an episode."""
        self._episodes.end(episode)
