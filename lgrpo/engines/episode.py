"""The state of an episode that is being sampled."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

from lgrpo.contexts import Dropped
from lgrpo.environments.base import Observation, TurnError
from lgrpo.environments.episodes import EpisodeFailure
from lgrpo.functional.random import stream_seed
from lgrpo.kept import Kept, join_kept
from lgrpo.types import Completion, Prompt, Span


@dataclass(slots=True, eq=False)
class Episode:
    """An episode that is being sampled.

    It waits for the environment or for the tokens of its next turn, until it has a ``finish_reason``. In a partial
    generation the tokens of a turn may come in several parts.
    """

    index: int
    """Index of its prompt in the generation."""
    sibling: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: Kept | None = None
    """Tokens that could have been drawn at each position; none where the environment wrote a token."""
    observed: list[tuple[int, int]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    """Observations as the environment returned them, one for each range of ``observed``."""
    dropped: list[Dropped] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """Its tokens by the weights that sampled them; observed tokens belong to the turn before them."""
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    is_cut: bool = False
    """Whether its last turn reached a limit."""
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    awaits_last_reward: bool = False
    """Whether only its last reward is missing."""
    errors: list[TurnError] = field(default_factory=list)
    failure: EpisodeFailure | None = None
    reset: Future[Observation | None] | None = None
    """Result of the environment's reset; None before it is requested."""
    is_waiting: bool = False
    """Whether the environment has to answer next."""
    part: Completion | None = None
    """First tokens of its next turn, if these were sampled already."""
    first_turn: Completion | None = None
    """Its first turn, once that is whole."""
    whole: Completion | None = None
    """All of it, if an earlier generation finished it."""

    def completion(self, step: int, version: int) -> Completion:
        """Return the episode so far. An episode without tokens has the given step and version of the weights."""
        if self.whole is not None:
            return self.whole
        part = self.part
        spans = self.spans if part is None else merged([*self.spans, *part.spans])
        *earlier, last = spans or [Span(0, step, version)]
        return Completion(
            token_ids=self.token_ids if part is None else self.token_ids + part.token_ids,
            logprobs=self.logprobs if part is None else self.logprobs + part.logprobs,
            text="" if self.finish_reason is None else self.text,
            finish_reason=self.finish_reason,
            behaviour_step=last.step,
            version=last.version,
            earlier=tuple(earlier),
            kept=self.kept if part is None else self._kept_with(len(part.token_ids), part.kept),
            observed=tuple(self.observed),
            turn_rewards=tuple(self.rewards),
            failure=None if self.failure is None else (self.failure.kind, str(self.failure)),
            num_errors=len(self.errors),
            dropped=tuple(self.dropped),
        )

    @property
    def num_contexts(self) -> int:
        """Number of contexts of its turns so far."""
        return 1 + len({one.turn for one in self.dropped})

    @property
    def in_context(self) -> list[int]:
        """Indices of the observations that are in the current context."""
        gone = {one.start for one in self.dropped}
        return [index for index, (start, _) in enumerate(self.observed) if start not in gone]

    @property
    def context_length(self) -> int:
        """Number of its tokens in the current context, without the prompt."""
        return len(self.token_ids) - sum(one.middle - one.start for one in self.dropped)

    def turn_prompt(self, seed: int, max_tokens: int) -> Prompt:
        """Return the context of its next turn, of at most ``max_tokens``, with a random stream of its own."""
        token_ids, start = list(self.prompt.token_ids), 0
        for one in self.dropped:
            token_ids += self.token_ids[start : one.start]
            start = one.middle
        token_ids += self.token_ids[start:]
        position = stream_seed(seed, self.prompt.position, self.sibling, self.num_turns)
        return replace(self.prompt, token_ids=token_ids, position=position, max_tokens=max_tokens)

    def add_turn(self, turn: Completion) -> None:
        """Add a sampled turn, which includes the ``part`` that it began with."""
        self.kept = self._kept_with(len(turn.token_ids), turn.kept)
        self.token_ids = self.token_ids + turn.token_ids
        self.logprobs = self.logprobs + turn.logprobs
        self.spans = merged([*self.spans, *turn.spans])
        self.num_turns += 1
        self.is_cut = turn.finish_reason == "length" or not turn.token_ids
        self.text = turn.text
        self.part = None
        self.first_turn = self.first_turn or turn

    def add_observation(self, token_ids: list[int], observation: Observation) -> None:
        """Add an observation and its tokens."""
        start = len(self.token_ids)
        self.observed.append((start, start))
        self.observations.append(observation)
        self._insert(len(self.observed) - 1, token_ids)

    def drop(self, index: int, replacement: list[int]) -> None:
        """Leave an observation out of the contexts from the next turn on; they have ``replacement`` in its place.

        Observations must be dropped in their order, so that ``dropped`` has it.
        """
        start, middle = self.observed[index]
        self._insert(index, replacement)
        self.dropped.append(Dropped(start, middle, middle + len(replacement), self.num_turns))

    def _insert(self, index: int, token_ids: list[int]) -> None:
        """Add tokens at the end of an observation, moving what follows."""
        count, (start, stop) = len(token_ids), self.observed[index]
        self.token_ids = self.token_ids[:stop] + token_ids + self.token_ids[stop:]
        self.logprobs = self.logprobs[:stop] + [0.0] * count + self.logprobs[stop:]
        self.kept = None if self.kept is None else self.kept.with_empty(stop, count)
        later = [(first + count, last + count) for first, last in self.observed[index + 1 :]]
        self.observed[index:] = [(start, stop + count), *later]
        end = 0
        for number, span in enumerate(self.spans):
            end += span.num_tokens
            if end >= stop:  # the span of the turn before the observation
                self.spans[number] = span._replace(num_tokens=span.num_tokens + count)
                break

    def _kept_with(self, num_tokens: int, kept: Kept | None) -> Kept | None:
        """Return ``kept`` with that of further tokens."""
        return join_kept((len(self.token_ids), self.kept), (num_tokens, kept))


def merged(spans: list[Span]) -> list[Span]:
    """Return spans without empty ones, with neighbours of the same version joined.

    >>> merged([Span(2, 0, 1), Span(0, 1, 2), Span(3, 0, 1), Span(1, 1, 2)])
    [Span(num_tokens=5, step=0, version=1), Span(num_tokens=1, step=1, version=2)]
    """
    found: list[Span] = []
    for span in spans:
        if found and found[-1].version == span.version:
            found[-1] = found[-1]._replace(num_tokens=found[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            found.append(span)
    return found
