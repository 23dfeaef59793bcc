"""A request for completions, the completions it has received, and where a completion ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.checks import check_count, check_range
from lgrpo.engines.recovery import EngineFailure
from lgrpo.kept import Kept, join_kept
from lgrpo.types import Completion, Prompt, Span

OnGroup: TypeAlias = Callable[[int, list[Completion]], None]
"""Callback that receives the index of a prompt among the requested ones, and all its completions."""


@dataclass(kw_only=True, frozen=True)
class Sampling:
    """How completions are drawn."""

    temperature: float = 1.0
    """Temperature of the softmax, above 0. Every log-probability of the run is taken at it."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0: all. When training, ratios are over the tokens drawn from."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens to draw from; 1: all. When training with vLLM, set top_k too."""
    min_p: float = 0.0
    """Lowest probability to draw from, as a share of the likeliest token's; 0: all. When training with vLLM, set top_k
    too."""
    max_tokens: int = 256
    """Longest completion."""
    stop: list[str] | None = None
    """Strings that end a completion. Their tokens are trained on; the text that is scored ends before them."""

    def __post_init__(self) -> None:
        check_range("sampling.temperature", self.temperature, above=0)
        check_count("sampling.top_k", self.top_k, at_least=0, reason="0 turns it off")
        check_range("sampling.top_p", self.top_p, above=0, at_most=1)
        check_range("sampling.min_p", self.min_p, at_least=0, below=1)
        check_count("sampling.max_tokens", self.max_tokens, at_least=1)
        if any(not s for s in self.stop or []):
            raise ValueError("sampling.stop has an empty string, which would end every completion at once")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def returns_kept(self) -> bool:
        """Whether completions come with the tokens that could have been drawn (``Completion.kept``)."""
        return False

    def with_kept(self) -> Sampling:
        """Return settings for completions to train on: with ``kept``, if tokens are left out of the draw."""
        return _KeptSampling(**{f.name: getattr(self, f.name) for f in fields(self)}) if self.is_truncated else self


@dataclass(kw_only=True, frozen=True)
class _KeptSampling(Sampling):
    """A class of its own, so that the choice is no setting of users, and survives ``replace`` and pipes."""

    @property
    def returns_kept(self) -> bool:
        return True


@dataclass(slots=True)
class Generation:
    """One call of ``RolloutEngine.generate``: its arguments, the weights it samples from, and the completed groups.

    A partial one (``RolloutEngine.generate_part``) also has completions that earlier calls began, and ends when enough
    groups are whole; the others are then in ``unfinished``.
    """

    prompts: Sequence[Prompt]
    num_samples: int
    sampling: Sampling
    seed: int
    tokenizer: PreTrainedTokenizerBase
    on_group: OnGroup | None
    step: int
    version: int
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """Completions by the index of their prompt."""
    begun: Mapping[int, list[Completion]] = field(default_factory=dict)
    """Completions to continue by the index of their prompt; some of a group may be finished."""
    needed: int | None = None
    """Number of whole groups after which it ends; None: all."""
    required: frozenset[int] = frozenset()
    """Indices of prompts whose groups are among the needed ones."""
    unfinished: dict[int, list[Completion]] = field(default_factory=dict)
    """Groups that were not whole when it ended, by the index of their prompt."""
    is_partial: bool = False
    """Whether it may end before all groups are whole."""
    is_stopped: bool = False
    """Whether it was stopped from outside (``RolloutEngine.stop``)."""

    @property
    def unanswered(self) -> list[int]:
        """Indices of the prompts without completions."""
        return [i for i in range(len(self.prompts)) if i not in self.groups and i not in self.unfinished]

    @property
    def is_enough(self) -> bool:
        """Whether it should end: as many groups are whole as are needed, with the required ones among them."""
        if self.is_stopped or self.needed is None:
            return self.is_stopped
        others = len(self.groups.keys() - self.required)
        return others >= self.needed - len(self.required) and self.groups.keys() >= self.required

    def max_tokens_of(self, index: int) -> int:
        """Return the upper limit of the length of a prompt's completions, including what was begun before."""
        limit, own = self.sampling.max_tokens, self.prompts[index].max_tokens
        return limit if own is None else min(limit, own)

    def begun_of(self, index: int) -> list[Completion]:
        """Return the completions of a prompt as they were when the generation began; new ones have no tokens."""
        new = Completion(
            token_ids=[], logprobs=[], text="", finish_reason=None, behaviour_step=self.step, version=self.version
        )
        return list(self.begun.get(index) or [new] * self.num_samples)

    def keep(self, index: int, group: list[Completion]) -> None:
        """Add the completions of a prompt."""
        self.groups[index] = group
        if self.on_group is not None:
            self.on_group(index, group)

    def leave(self, index: int, group: list[Completion] | None = None) -> None:
        """Add the completions of a prompt that are not all finished; by default as they were at the beginning."""
        self.unfinished[index] = self.begun_of(index) if group is None else group

    def eos_ids(self, config: PretrainedConfig) -> list[int]:
        """Return every token that ends a sequence, according to the tokenizer and to the model's config."""
        named = config.eos_token_id
        ids = {self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
        return sorted(ids - {None})

    def stop_ids(self, config: PretrainedConfig) -> list[int]:
        """Return ``eos_ids``, and the stop strings that are special tokens."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        return sorted({*self.eos_ids(config), *(special[s] for s in self.sampling.stop or [] if s in special)})

    def completion(
        self,
        token_ids: list[int],
        logprobs: list[float],
        finish_reason: str | None,
        begun: Completion | None = None,
        kept: Kept | None = None,
    ) -> Completion:
        """Return a sampled completion, cut after the first stop string; raise an ``EngineFailure`` if incomplete.

        ``begun`` is the part that the tokens continue. In a partial generation a completion without a finish reason is
        unfinished. ``kept`` is required if ``sampling.returns_kept``.
        """
        if finish_reason not in ("stop", "length") and not (finish_reason is None and self.is_partial):
            raise EngineFailure(f"a completion was aborted ({finish_reason}) after {len(token_ids)} tokens")
        if len(logprobs) != len(token_ids):
            raise EngineFailure(f"a completion of {len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
        if self.sampling.returns_kept and len(kept or ()) != len(token_ids):
            raise EngineFailure(f"a completion of {len(token_ids)} tokens came with {len(kept or ())} sets of them")
        earlier: tuple[Span, ...] = ()
        step, version = self.step, self.version
        if begun is not None and begun.token_ids:
            if not token_ids:  # it may be finished all the same
                step, version = begun.behaviour_step, begun.version
            earlier = begun.earlier if begun.version == version else begun.spans
            kept = join_kept((len(begun.token_ids), begun.kept), (len(token_ids), kept))
            token_ids, logprobs = begun.token_ids + token_ids, begun.logprobs + logprobs
        stop, tokenizer = self.sampling.stop, self.tokenizer
        if (length := _length_with_stop(token_ids, stop or [], tokenizer)) is not None:
            token_ids, logprobs, finish_reason = token_ids[:length], logprobs[:length], "stop"
            kept = None if kept is None else kept.first(length)
        is_finished = finish_reason is not None
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=completion_text(token_ids, stop or [], tokenizer) if is_finished else "",
            finish_reason="stop" if finish_reason == "stop" else "length" if is_finished else None,
            behaviour_step=step,
            version=version,
            earlier=earlier,
            kept=kept,
        )


def completion_text(token_ids: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a completion before its stop string, without special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    if not _has_stop(token_ids, stop, tokenizer):
        return text
    starts = [start for s in stop if (start := text.find(s)) >= 0]  # none if the stop string is a special token
    return text[: min(starts)] if starts else text


def _has_stop(token_ids: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text has a stop string, which may be a special token and may not be split by one."""
    return bool(stop) and any(s in tokenizer.decode(token_ids) for s in stop)


def _length_with_stop(token_ids: list[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None if there is none."""
    if not _has_stop(token_ids, stop, tokenizer):
        return None
    if not _has_stop(token_ids[:-1], stop, tokenizer):  # the usual case of an engine that stops by itself
        return len(token_ids)
    return next(n for n in range(1, len(token_ids) + 1) if _has_stop(token_ids[:n], stop, tokenizer))
