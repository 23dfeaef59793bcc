"""Rollouts that end when enough groups are whole, while the other groups continue after the next sync."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from lgrpo.checks import check_count
from lgrpo.contexts import Dropped
from lgrpo.data.collate import Group
from lgrpo.data.kept import packed_kept, unpacked_kept
from lgrpo.data.scorer import GroupScores
from lgrpo.engines import EngineError, RolloutEngine
from lgrpo.engines.completions import Generation
from lgrpo.functional.sync_cycle import MAX_AHEAD
from lgrpo.run.resume import describe
from lgrpo.types import Completion, Span

if TYPE_CHECKING:
    from lgrpo.data.sampler import RolloutSampler


@dataclass(kw_only=True, frozen=True)
class PartialRollouts:
    """Rollouts that end when ``num_prompts`` groups are whole. Completions that are not finished keep their tokens and
    are continued in the next rollout, after its sync if there is one. Long completions then do not hold a rollout up.
    """

    extra_prompts: int | None = None
    """Groups in progress beyond ``num_prompts``, over all ranks; by default a quarter of ``num_prompts``."""
    max_spans: int = 4
    """Largest number of versions of the weights that tokens of one group may be sampled from."""
    at_limit: Literal["finish", "drop"] = "finish"
    """Treatment of a group at that limit: a rollout waits for it, or it is dropped if it is not whole then."""


def checked_partial(
    partial: bool | PartialRollouts, engine: RolloutEngine, behaviour_logprobs: str, has_dynamic_sampling: bool
) -> PartialRollouts | None:
    """Return the settings of partial rollouts, None if they are off; raise an error if something cannot be partial."""
    if partial is False:
        return None
    settings = PartialRollouts() if partial is True else partial
    extra = settings.extra_prompts
    check_count("data.partial.extra_prompts", extra, at_least=1, reason="without further groups, all are waited for")
    check_count("data.partial.max_spans", settings.max_spans, at_least=1, reason="a group has at least one version")
    if engine.replays:
        raise ValueError(
            f"data.partial is set, but {type(engine).__name__} cannot continue completions: those recorded are whole, "
            "and the others are sampled in whole groups beside them. Leave data.partial out"
        )
    if not engine.can_continue:
        raise ValueError(
            f"data.partial is set, but {type(engine).__name__} cannot continue completions from their tokens: use "
            "lgrpo.engines.VLLMEngine, an EnginePool of it, VLLMServerEngine, or TransformersEngine"
        )
    if behaviour_logprobs == "policy":
        raise ValueError(
            "data.partial is set and data.behaviour_logprobs is 'policy': the policy cannot compute log π_α of tokens "
            "that were sampled from earlier weights. Use 'engine'"
        )
    if has_dynamic_sampling:
        raise ValueError("data.partial and data.dynamic_sampling are both set: a partial rollout is not resampled")
    return settings


@dataclass(kw_only=True)
class GroupsInProgress:
    """Groups that are begun and not part of a rollout yet, after some rollout."""

    num_begun: int = 0
    """Number of prompts that this rank has begun so far."""
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """Completions by the number of their prompt; all of a group may be finished."""

    def restart(self) -> None:
        """Forget the tokens of all groups, which are then sampled from the beginning."""
        self.groups = {number: [_emptied(c) for c in group] for number, group in self.groups.items()}

    def state_dict(self, can_continue: bool) -> dict[str, Any]:
        """Return plain containers and tensors.

        Args:
            can_continue: Whether unfinished completions can be continued after a resume; if not, they have no tokens.
        """

        def packed(completion: Completion) -> dict[str, Any]:
            is_kept = can_continue or completion.finish_reason is not None
            return _packed(completion if is_kept else _emptied(completion))

        return {
            "num_begun": self.num_begun,
            "groups": {number: [packed(c) for c in group] for number, group in self.groups.items()},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> GroupsInProgress:
        groups = {number: [_unpacked(c) for c in group] for number, group in state["groups"].items()}
        return cls(num_begun=state["num_begun"], groups=groups)


class PartialSampler:
    """Samples partial rollouts of this rank, one call of the engine each.

    What is in progress after a rollout is kept for as long as the next one may have to be sampled again.
    """

    def __init__(self, sampler: RolloutSampler, settings: PartialRollouts) -> None:
        self._sampler = sampler
        self._settings = settings
        extra = settings.extra_prompts or max(1, sampler.num_prompts // 4)
        self._num_in_progress = sampler.share + -(-extra // sampler.world_size)
        self._after: dict[int, GroupsInProgress] = {}
        """Groups in progress by the rollout after which they are."""

    def sample(self, rollout: int) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of a rollout, scored, and its metrics."""
        sampler, version = self._sampler, self._sampler.engine.require_weights()[1]
        before = self._after.get(rollout - 1) or GroupsInProgress(num_begun=rollout * sampler.share)
        groups = {number: group for number, group in before.groups.items() if not self._is_dropped(group, version)}
        num_new = max(0, self._num_in_progress - len(groups))
        new = range(before.num_begun, before.num_begun + num_new)
        numbers = [*sorted(groups), *new]
        prompts = sampler.prompts.draw([self._position(number) for number in numbers])
        choice = _Choice(sampler.share, numbers, GroupScores(sampler.scorer, prompts))
        for number, group in sorted(groups.items()):
            if is_whole(group):
                choice.add(number, group)
        asked = [number for number in numbers if number not in choice.whole]
        required = [
            number
            for number in asked
            if self._settings.at_limit == "finish" and self._is_at_limit(groups.get(number, []), version)
        ]
        choice.reserve(required)
        generation = Generation(
            [prompts[numbers.index(number)] for number in asked],
            sampler.group_size,
            sampler.sampling,
            sampler.seed,
            sampler.tokenizer,
            lambda index, group: choice.add(asked[index], group),
            *sampler.engine.require_weights(),
            begun={asked.index(number): group for number, group in groups.items() if number in asked},
            needed=sampler.share - len(choice.chosen),
            required=frozenset(asked.index(number) for number in required),
            is_partial=True,
        )
        if not generation.is_enough:
            sampler.generate_part(generation)
        for index in generation.unanswered:
            generation.leave(index)
        if len(choice.chosen) < sampler.share:
            raise EngineError(f"{type(sampler.engine).__name__} ended a rollout with {len(choice.chosen)} whole groups")
        left = {asked[index]: group for index, group in generation.unfinished.items()} | choice.surplus
        self._after[rollout] = GroupsInProgress(num_begun=new.stop, groups=dict(sorted(left.items())))
        self._after = {k: progress for k, progress in self._after.items() if k > rollout - 2 * MAX_AHEAD - 2}
        sampler.on_stage("score")
        found = choice.result(prompts)
        return found, {
            "rollout/unfinished_groups": float(sum(not is_whole(group) for group in left.values())),
            "rollout/dropped_groups": float(len(before.groups) - len(groups)),
        }

    def state_dict(self, rollout: int) -> dict[str, Any] | None:
        """Return what is in progress after a rollout."""
        progress = self._after.get(rollout)
        if progress is None:
            return None
        can_continue = not self._sampler.engine.has_turns  # the state of an environment is never saved
        return {"rollout": rollout, **self._settings_of_tokens(), **progress.state_dict(can_continue)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._after = {}
        if state is not None:
            progress = GroupsInProgress.from_state_dict(state)
            if any(state.get(name) != value for name, value in self._settings_of_tokens().items()):
                progress.restart()  # their tokens were drawn from another distribution, or are too many
            self._after[state["rollout"]] = progress

    def _settings_of_tokens(self) -> dict[str, Any]:
        """Return the settings that the tokens of unfinished groups depend on."""
        engine = self._sampler.engine
        episodes = {"episodes": describe(engine.resume_settings())} if engine.has_turns else {}
        return {"sampling": describe(self._sampler.sampling), **episodes}

    def _position(self, number: int) -> int:
        """Return the position in the run of a prompt, by its number on this rank."""
        rollout, offset = divmod(number, self._sampler.share)
        return rollout * self._sampler.num_prompts + self._sampler.first + offset

    def _is_at_limit(self, group: Sequence[Completion], version: int) -> bool:
        """Return whether a group has as many versions as it may have if it is continued."""
        return len(versions_of(group) | {version}) >= self._settings.max_spans

    def _is_dropped(self, group: Sequence[Completion], version: int) -> bool:
        """Return whether a group is dropped, because continuing it would exceed the limit."""
        exceeds = len(versions_of(group) | {version}) > self._settings.max_spans
        return self._settings.at_limit == "drop" and exceeds and not is_whole(group)


class _Choice:
    """Which whole groups become the rollout: the required ones and those that are whole first. These are scored."""

    def __init__(self, size: int, numbers: Sequence[int], scores: GroupScores) -> None:
        self.chosen: set[int] = set()
        self.whole: dict[int, list[Completion]] = {}
        self._size = size
        self._indices = {number: index for index, number in enumerate(numbers)}
        self._scores = scores
        self._required: set[int] = set()
        self._lock = threading.Lock()

    @property
    def surplus(self) -> dict[int, list[Completion]]:
        """Whole groups that wait for the next rollout."""
        return {number: group for number, group in self.whole.items() if number not in self.chosen}

    def reserve(self, required: Collection[int]) -> None:
        """Keep places for the groups that the rollout waits for."""
        self._required = set(required)

    def add(self, number: int, group: list[Completion]) -> None:
        """Add a whole group, which is chosen if there is a place for it."""
        with self._lock:
            self.whole[number] = group
            reserved = 0 if number in self._required else len(self._required - self.chosen)
            if len(self.chosen) + min(reserved, self._size) < self._size:
                self.chosen.add(number)
                self._scores(self._indices[number], group)

    def result(self, prompts: Sequence[Any]) -> list[Group]:
        """Return the chosen groups in the order of their prompts, when they are scored."""
        numbers = sorted(self.chosen)
        scores = self._scores.result([self._indices[number] for number in numbers])
        return [
            Group(prompts[self._indices[number]], self.whole[number], score)
            for number, score in zip(numbers, scores, strict=True)
        ]


def is_whole(group: Sequence[Completion]) -> bool:
    """Return whether every completion of a group is finished."""
    return all(completion.finish_reason is not None for completion in group)


def versions_of(group: Sequence[Completion]) -> set[int]:
    """Return the versions of the weights that tokens of a group were sampled from."""
    return {span.version for completion in group for span in completion.spans if span.num_tokens}


def _emptied(completion: Completion) -> Completion:
    """Return a completion without tokens, which is sampled from the beginning."""
    return Completion(
        token_ids=[],
        logprobs=[],
        text="",
        finish_reason=None,
        behaviour_step=completion.behaviour_step,
        version=completion.version,
    )


def _packed(completion: Completion) -> dict[str, Any]:
    return {
        "token_ids": torch.tensor(completion.token_ids, dtype=torch.int64),
        "logprobs": torch.tensor(completion.logprobs, dtype=torch.float64),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "behaviour_step": completion.behaviour_step,
        "version": completion.version,
        "earlier": [tuple(span) for span in completion.earlier],
        "kept": packed_kept(completion.kept),
        "observed": completion.observed,
        "turn_rewards": completion.turn_rewards,
        "failure": completion.failure,
        "num_errors": completion.num_errors,
        "dropped": [tuple(one) for one in completion.dropped],
    }


def _unpacked(state: dict[str, Any]) -> Completion:
    tokens, logprobs = state["token_ids"].tolist(), state["logprobs"].tolist()
    earlier = tuple(Span(*span) for span in state["earlier"])
    kept, dropped = unpacked_kept(state.get("kept")), tuple(Dropped(*one) for one in state.get("dropped", ()))
    parts = {"token_ids": tokens, "logprobs": logprobs, "earlier": earlier, "kept": kept, "dropped": dropped}
    return Completion(**{**state, **parts})
