"""Sampling of episodes in partial generations, which leave some unfinished and continue them later."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, final

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation
from lgrpo.engines.episode import Episode
from lgrpo.engines.episode_sampler import GRACE, EpisodeSampler
from lgrpo.engines.recovery import EngineError
from lgrpo.environments.base import Environment
from lgrpo.environments.episodes import Episodes
from lgrpo.types import Completion, Prompt

_REPEAT = 0.05
"""Seconds after which an engine that is still sampling is asked again to stop."""

Answers: TypeAlias = "SimpleQueue[tuple[Episode, Future[Any]] | None]"
"""Answers of environments to episodes; None wakes the thread that reads them."""


@final
class LiveEpisodes:
    """Episodes that a partial generation left unfinished, and the answers that their environments give meanwhile."""

    def __init__(self) -> None:
        self.answers: Answers = SimpleQueue()
        self._episodes: dict[tuple[int, int], Episode] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def __contains__(self, episode: Episode) -> bool:
        return self._episodes.get(_key(episode)) is episode

    def add(self, episode: Episode) -> None:
        self._episodes[_key(episode)] = episode

    def remove(self, episode: Episode) -> None:
        self._episodes.pop(_key(episode), None)

    def find(self, prompt: Prompt, sibling: int, begun: Completion) -> Episode | None:
        """Return the episode of a completion; None if it is not live, as after a resume, or has other tokens."""
        episode = self._episodes.get((prompt.position, sibling))
        if episode is None or episode.completion(0, 0).token_ids != begun.token_ids:
            return None
        return episode

    def end_others(self, kept: Sequence[Episode], episodes: Episodes) -> None:
        """End all episodes but some."""
        kept_keys = {_key(episode) for episode in kept}
        for key in self._episodes.keys() - kept_keys:
            episodes.end(self._episodes.pop(key))


def _key(episode: Episode) -> tuple[int, int]:
    return episode.prompt.position, episode.sibling


@final
class PartialEpisodeSampler(EpisodeSampler):
    """Samples episodes until enough groups of a partial generation are whole; the others stay live.

    An episode is cut within a turn, whose tokens are then its ``part``, or between turns, while its environment may
    still be busy. The next generation continues it. An unfinished episode that is not live starts again from its
    prompt. Episodes that the generation does not have any more are ended.

    One thread takes the environment's answers while the engine samples, and stops it when enough groups are whole.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        episodes: Episodes,
        generation: Generation,
        *,
        live: LiveEpisodes,
        **limits: Any,
    ) -> None:
        super().__init__(engine, environment, episodes, generation, **limits)
        self._live = live
        self._answers = live.answers
        self._changed = threading.Condition()
        """Notified when an episode can go on or has ended."""
        self._pending: list[list[Episode]] = []
        """Groups that have not begun in this generation, the next one at the end."""
        self._begun: list[list[Episode]] = []
        self._is_closing = False
        self._error: BaseException | None = None

    def run(self, max_live: int | None) -> list[Episode]:
        """Sample episodes, keep the groups that are whole, leave the others, and return the episodes that ended.

        Args:
            max_live: Upper limit of episodes at the same time, in whole groups; None for no limit.
        """
        self._groups = [self._continued_group(index) for index in range(len(self._groups))]
        continued = [episode for group in self._groups for episode in group if episode in self._live]
        self._live.end_others(continued, self._episodes)
        is_new = [not any(episode in self._live for episode in group) for group in self._groups]
        order = sorted(range(len(self._groups)), key=lambda index: (is_new[index], index))
        self._pending = [self._groups[index] for index in reversed(order)]
        ended_before = {episode for group in self._groups for episode in group if episode.whole is not None}
        thread = threading.Thread(target=self._take_answers, name="episode-answers", daemon=True)
        thread.start()
        try:
            try:
                while not self._is_over:
                    self._begin_groups(max_live)
                    self._sample_ready(max_live)
            finally:
                self._is_closing = True
                self._answers.put(None)
                thread.join()
            if self._error is not None:
                raise self._error
        except BaseException:
            self._live.end_others([], self._episodes)
            raise
        self._leave()
        return [
            episode
            for group in self._groups
            for episode in group
            if episode.finish_reason is not None and episode not in ended_before
        ]

    @property
    def _is_over(self) -> bool:
        generation = self._generation
        is_whole = len(generation.groups) == len(self._groups)
        return generation.is_enough or self._error is not None or is_whole

    def _continued_group(self, index: int) -> list[Episode]:
        """Return the episodes of a group: live ones, those that have ended, and new ones."""
        generation, prompt = self._generation, self._generation.prompts[index]
        group = []
        for sibling, begun in enumerate(generation.begun_of(index)):
            episode = None
            if begun.finish_reason is None:
                episode = self._live.find(prompt, sibling, begun)
            if episode is None:
                episode = Episode(index, sibling, prompt)
                if begun.finish_reason is not None:
                    episode.whole, episode.finish_reason = begun, begun.finish_reason
            episode.index = index
            group.append(episode)
        return group

    def _begin_groups(self, max_live: int | None) -> None:
        """Reset the environments of further groups, as many as may be live."""
        while self._can_begin(max_live):
            self._begun.append(group := self._pending.pop())
            for episode in _unreset(group):
                self._live.add(episode)
                episode.reset = self._episodes.reset(episode, episode.prompt.row)

    def _can_begin(self, max_live: int | None) -> bool:
        if not self._pending or max_live is None:
            return bool(self._pending)
        num_live, num_new = len(self._live), len(_unreset(self._pending[-1]))
        return num_new == 0 or num_live == 0 or num_live + num_new <= max_live

    def _open_episodes(self) -> Iterator[Episode]:
        """Iterate over the episodes of begun groups that are not over."""
        for group in self._begun:
            yield from (episode for episode in group if episode.finish_reason is None)

    def _sample_ready(self, max_live: int | None) -> None:
        """Wait until turns can be sampled, and sample them; return earlier if another group can begin."""

        def ready() -> list[Episode]:
            return [episode for episode in self._open_episodes() if not episode.is_waiting]

        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._can_begin(max_live) or ready())
            if ready():
                self._changed.wait_for(
                    lambda: self._is_over or not any(episode.is_waiting for episode in self._open_episodes()), GRACE
                )
            later = [episode for episode in ready() if episode.num_turns > 0]
            first = sorted({episode.index for episode in ready() if episode.num_turns == 0})
        self.seconds_waited += time.perf_counter() - start
        if later:
            self._sample_part(self._turn_prompts(later), [[episode] for episode in later], is_first=False)
        if first:
            self._sample_part(
                [self._generation.prompts[index] for index in first],
                [self._groups[index] for index in first],
                is_first=True,
            )

    def _sample_part(self, prompts: Sequence[Prompt], groups: Sequence[list[Episode]], is_first: bool) -> None:
        """Sample the first turns of groups, or later turns, until they are whole or enough groups of episodes are.

        Args:
            prompts: Contexts of the turns.
            groups: Episodes with the same context, of which some may need no turn.
            is_first: Whether these are first turns.
        """
        if self._is_over:
            return
        expected = [[_needs_turn(episode, is_first) for episode in group] for group in groups]

        def add(number: int, turns: list[Completion]) -> None:
            for episode, turn, is_expected in zip(groups[number], turns, expected[number], strict=True):
                if is_expected:
                    self._add_turn(episode, turn)

        generation = self._generation
        step, version = self._engine.require_weights()
        part = Generation(
            prompts,
            len(groups[0]),
            self._turn_sampling,
            generation.seed,
            generation.tokenizer,
            add,
            step,
            version,
            begun={
                number: [_begun_turn(episode, own, step, version) for episode, own in zip(group, owns, strict=True)]
                for number, (group, owns) in enumerate(zip(groups, expected, strict=True))
            },
            is_partial=True,
        )
        self._engine.generate_part(part)
        for number, turns in part.unfinished.items():
            for episode, turn, is_expected in zip(groups[number], turns, expected[number], strict=True):
                if is_expected and turn.finish_reason is not None:
                    self._add_turn(episode, turn)
                elif is_expected:
                    episode.part = turn if turn.token_ids else None
        if part.unfinished and not part.is_stopped:
            raise EngineError(f"{type(self._engine).__name__} left {len(part.unfinished)} turns unfinished")

    def _leave(self) -> None:
        """Pass on the groups that are not whole; those that have not begun are left as they were."""
        generation = self._generation
        for group in self._begun:
            if (index := group[0].index) not in generation.groups:
                generation.leave(index, [one.completion(generation.step, generation.version) for one in group])

    # In the thread that takes answers.

    def _take_answers(self) -> None:
        while True:
            try:
                answer = self._answers.get(timeout=_REPEAT if self._is_over else None)
            except Empty:
                answer = None
            if self._is_closing:
                if answer is not None:
                    self._answers.put(answer)  # for the next generation
                return
            with self._changed:
                if answer is not None and answer[0] in self._live:
                    self._take_answer(*answer)
                self._changed.notify_all()
            if self._is_over:
                self._engine.stop()

    def _take_answer(self, episode: Episode, answer: Future[Any]) -> None:
        try:
            if self._add_answer(episode, answer):
                episode.is_waiting = False
        except BaseException as error:
            self._error = error

    def _end(self, episode: Episode) -> None:
        self._live.remove(episode)
        super()._end(episode)


def _unreset(group: list[Episode]) -> list[Episode]:
    """Return the episodes whose environment has to be reset."""
    return [episode for episode in group if episode.finish_reason is None and episode.reset is None]


def _needs_turn(episode: Episode, is_first: bool) -> bool:
    """Return whether the first turn of an episode, or a later one, has to be sampled next."""
    return episode.finish_reason is None and not episode.is_waiting and (episode.num_turns == 0) == is_first


def _begun_turn(episode: Episode, is_expected: bool, step: int, version: int) -> Completion:
    """Return the turn that is sampled next as it is so far; if an episode does not need it, its whole first turn."""
    begun = episode.part if is_expected else episode.first_turn
    if begun is not None:
        return begun
    return Completion(
        token_ids=[],
        logprobs=[],
        text="",
        finish_reason=None if is_expected else "stop",
        behaviour_step=step,
        version=version,
    )
