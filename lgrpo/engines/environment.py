"""An engine that samples episodes: turns of the policy, answered by an environment."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.episode import Episode
from lgrpo.engines.episode_sampler import EpisodeSampler
from lgrpo.engines.observations import ObservationEncoder
from lgrpo.engines.partial_episodes import LiveEpisodes, PartialEpisodeSampler
from lgrpo.engines.recovery import EngineError
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.engines.wrapper import WrapperEngine
from lgrpo.environments.base import Environment
from lgrpo.environments.episodes import EpisodeLimits, Episodes
from lgrpo.environments.errors import ErrorCounts
from lgrpo.environments.failures import EpisodeFailures
from lgrpo.environments.local import LocalEpisodes
from lgrpo.environments.worker_episodes import WorkerEpisodes
from lgrpo.run.resume import ResumeSettings
from lgrpo.types import Prompt

MAX_CONTEXTS = 32
"""Largest value of ``max_contexts``: each context is a bit of a batch's ``contexts``."""


@final
class EnvironmentEngine(WrapperEngine):
    """Samples episodes: an inner engine samples the turns of the policy, and an environment answers each.

    A completion is a whole episode: sampled tokens, and between turns the tokens of observations, which are not trained
    on. Sampled tokens are kept as they are and never rendered or tokenised again. ``sampling.max_tokens`` limits an
    episode, observations included; an episode that reaches a limit is truncated. With ``max_contexts`` it limits each
    context instead: earlier observations are dropped, from the training on later turns too.

    The turns of all episodes that are ready are sampled together; an episode whose environment is slow joins a later
    call. Each turn has its own random stream, so this does not change what is sampled.

    In a partial generation (``generate_part``) episodes that are not over keep their tokens and their environments, and
    the next one continues them.
    """

    def __init__(
        self,
        environment: Environment | None = None,
        engine: RolloutEngine | None = None,
        max_turns: int = 8,
        max_tokens_per_turn: int | None = None,
        max_contexts: int = 1,
        dropped_text: str = "...",
        limits: EpisodeLimits | None = EpisodeLimits(),  # noqa: B008
    ) -> None:
        """
        Args:
            environment: Environment; by default the task's.
            engine: Engine that samples the turns; by default the embedded one.
            max_turns: Upper limit of turns in an episode.
            max_tokens_per_turn: Upper limit of tokens in a turn; by default ``sampling.max_tokens``.
            max_contexts: Largest number of contexts of an episode. Above 1, earlier observations are dropped when a
                turn of ``max_tokens_per_turn`` does not fit after the newest one; the episode continues in another
                context, which training reads in addition. At 1 it ends there, truncated.
            dropped_text: Text in place of a dropped observation. It may be empty.
            limits: Processes that run the environment, and their limits; null runs it in this process.
        """
        super().__init__(TransformersEngine() if engine is None else engine)
        if self.engine.replays:
            raise ValueError("an EnvironmentEngine cannot contain a ReplayEngine: put it inside, as data.engine.engine")
        check_count("data.engine.max_turns", max_turns, at_least=1)
        check_count("data.engine.max_tokens_per_turn", max_tokens_per_turn, at_least=1)
        check_count("data.engine.max_contexts", max_contexts, at_least=1, at_most=MAX_CONTEXTS)
        if max_contexts > 1 and max_tokens_per_turn is None:
            raise ValueError(
                f"data.engine.max_contexts is {max_contexts}, which needs max_tokens_per_turn: observations "
                "are dropped when a turn of that length does not fit"
            )
        self.environment = environment
        self.max_turns = max_turns
        self.max_tokens_per_turn = max_tokens_per_turn
        self.max_contexts = max_contexts
        self.dropped_text = dropped_text
        self.limits = limits
        self.can_continue = self.engine.can_continue
        self._episodes: Episodes | None = None
        self._live = LiveEpisodes()
        self._failures = EpisodeFailures("the environment")
        self._warned: set[str] = set()
        self._sampler: EpisodeSampler | None = None
        self._waited = 0.0  # by earlier samplers

    def set_environment(self, environment: Environment) -> bool:
        if self.environment is not None and type(self.environment) is not type(environment):
            raise ValueError(
                f"data.engine.environment is {type(self.environment).__name__}, but the task has "
                f"{type(environment).__name__}: leave the engine's out"
            )
        if self.environment is not environment:
            self.end_episodes()
        self.environment = environment
        return True

    @property
    def has_turns(self) -> bool:
        return True

    @property
    def environment_seconds(self) -> float:
        return self._waited + (0.0 if self._sampler is None else self._sampler.seconds_waited)

    def adopt(self, other: RolloutEngine) -> bool:
        if not super().adopt(other):
            return False
        other.end_episodes()
        return True

    def resume_settings(self) -> ResumeSettings:
        return self.engine.resume_settings() | {
            "environment": type(self.environment).__qualname__,
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            "max_contexts": self.max_contexts,
            "dropped_text": self.dropped_text,
        }

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [] if self.environment is None else self.environment.tool_schemas()

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        self._start(tokenizer)
        remaining = iter(prompts)
        first = list(islice(remaining, 1))
        if first:
            encoder = ObservationEncoder(tokenizer, first[0].chat)
            encoder.check()
            if self.max_contexts > 1:
                self._check_dropped_text(encoder)
        self.engine.prepare(tokenizer, chain(first, remaining), group_size, sampling)

    def _check_dropped_text(self, encoder: ObservationEncoder) -> None:
        """Raise an error if the tokenizer has no tokens for the text in place of dropped observations."""
        tokenizer, text = encoder.tokenizer, self.dropped_text
        if tokenizer.unk_token_id in tokenizer(text, add_special_tokens=False).input_ids:
            raise ValueError(
                f"data.engine.dropped_text {text!r} has characters the tokenizer cannot encode: set it to another text "
                "or to an empty one"
            )

    def _start(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Environment, Episodes]:
        """Return the environment, and the episodes of it."""
        if self.environment is None:
            raise EngineError(
                "an EnvironmentEngine needs an environment: set data.engine.environment, or use a task that has one, "
                "such as lgrpo.tasks.EnvironmentTask"
            )
        if self._episodes is None:
            environment, limits = self.environment, self.limits
            environment.use_chat_template(tokenizer.chat_template)
            self._episodes = LocalEpisodes(environment) if limits is None else WorkerEpisodes(environment, limits)
            self._failures = EpisodeFailures(type(environment).__name__)
        return self.environment, self._episodes

    def sample(self, generation: Generation) -> None:
        environment, episodes = self._start(generation.tokenizer)
        arguments: Any = self.engine, environment, episodes, generation
        names = ("max_turns", "max_tokens_per_turn", "max_contexts", "dropped_text")
        limits: Any = {name: getattr(self, name) for name in names}
        if generation.is_partial:
            sampler: EpisodeSampler = PartialEpisodeSampler(*arguments, live=self._live, **limits)
        else:
            sampler = EpisodeSampler(*arguments, **limits)
        self._waited, self._sampler = self.environment_seconds, sampler
        self._report(sampler.run(None if self.limits is None else self.limits.max_live))

    def stop(self) -> None:
        super().stop()
        self._live.answers.put(None)  # it may wait for the environment
        self.engine.stop()

    def _report(self, episodes: Sequence[Episode]) -> None:
        """Warn of the first failure of the environment and of the first mistake of each kind of the model.

        Also of the first episodes that the limit of turns has ended.
        """
        for episode in episodes:
            if episode.failure is None or episode.failure.method != "reset":
                self._failures.add_start()
            if episode.failure is not None:
                self._failures.add(episode.failure)
        self._failures.check()
        found = ErrorCounts()
        found.add(error for episode in episodes for error in episode.errors if error.kind not in self._warned)
        self._warned |= found.counts.keys()
        if lines := found.lines():
            warnings.warn(
                f"the model made mistakes that it sees as observations: {'; '.join(lines)}. From now on "
                "rollout/model_errors counts them",
                stacklevel=2,
            )
        cut = [one for one in episodes if one.finish_reason == "length" and not one.is_cut]
        endless = [one for one in cut if one.num_turns == self.max_turns]
        if endless and "endless" not in self._warned:
            self._warned.add("endless")
            warnings.warn(
                f"{len(endless)} of {len(episodes)} episodes did not end within max_turns ({self.max_turns}); the last "
                f"turn of one is {endless[0].text[:200]!r}. From now on rollout/truncated_fraction counts them",
                stacklevel=2,
            )

    def end_episodes(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None
        self._live = LiveEpisodes()

    def close(self) -> None:
        self.end_episodes()
        self.engine.close()
