"""From the index of a rollout to its scored completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from lgrpo.data.collate import as_rewards, collate_rollout, pair_up
from lgrpo.data.prompts import Prompts, prompts_at
from lgrpo.data.scorer import Scorer
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.functional import has_reward_variance
from lgrpo.rewards import Score
from lgrpo.types import Completion, Prompt, RolloutBatch

_ANOTHER_ROUND = 2**40 + 15  # odd, so that without shuffling it leads to another row
"""Replacements take prompts from far beyond the run's own positions, so that no prompt of a pass is used up by them."""


@dataclass(kw_only=True, frozen=True)
class DynamicSampling:
    """Groups whose rewards are all equal are sampled again, with other prompts (DAPO)."""

    max_rounds: int = 4
    """How often at most. Groups that still do not vary after that stay as they are: a rollout is always whole."""
    tolerance: float = 1e-6
    """Rewards that differ by no more than this are equal."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"dynamic_sampling.max_rounds is {self.max_rounds}; leave dynamic_sampling out for none")
        if self.tolerance < 0:
            raise ValueError(f"dynamic_sampling.tolerance is {self.tolerance}; it cannot be negative")


@dataclass(slots=True)
class Group:
    """A prompt, its completions and their scores."""

    prompt: Prompt
    completions: list[Completion]
    scores: list[Score]

    def varies(self, tolerance: float) -> bool:
        """Whether its rewards differ, or may do so once they are all there."""
        rewards = as_rewards(self.scores)
        return bool(rewards.isnan().any()) or bool(has_reward_variance(rewards, len(rewards), tolerance)[0])


class RolloutSampler:
    """Samples and scores rollouts of this rank: a function of the engine's weights, the seed and positions alone."""

    def __init__(
        self,
        prompts: Prompts,
        scorer: Scorer,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_prompts: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        dynamic: DynamicSampling | None,
        rank: int,
        world_size: int,
        on_stage: Callable[[Literal["generate", "score"]], None],
    ) -> None:
        self.prompts = prompts
        self.scorer = scorer
        self.engine = engine
        self.tokenizer = tokenizer
        self.num_prompts = num_prompts
        self.group_size = group_size
        self.sampling = sampling
        self.seed = seed
        self.dynamic = dynamic
        self.share = num_prompts // world_size
        self.first = rank * self.share
        self.on_stage = on_stage
        self._seconds: dict[str, float] = {}
        self._engine_figures = self._count_faults()

    def __call__(self, rollouts: range) -> list[RolloutBatch]:
        """Some rollouts, all in one call of the engine."""
        self._seconds = {"generate": 0.0, "score": 0.0}
        positions = [k * self.num_prompts + self.first + j for k in rollouts for j in range(self.share)]
        groups = self._groups(positions)
        replaced = self._replace_dull(groups, positions)
        with self._stage("score"):
            batches = [
                self._collate(rollout, groups[j * self.share : (j + 1) * self.share])
                for j, rollout in enumerate(rollouts)
            ]
        seconds = {f"time/{name}": seconds / len(batches) for name, seconds in self._seconds.items()}
        means = self.scorer.reward.report() | self._faults_since(len(batches))
        for j, batch in enumerate(batches):
            own_groups = groups[j * self.share : (j + 1) * self.share]
            batch.metrics = seconds | means | self.scorer.failures([group.scores for group in own_groups])
            if self.dynamic is not None:
                own = sum(replaced[j * self.share : (j + 1) * self.share])
                batch.metrics["rollout/resampled_fraction"] = own / self.share
        return batches

    def _groups(self, positions: Sequence[int]) -> list[Group]:
        prompts = prompts_at(self.prompts, positions)
        with self._stage("generate"):
            following = self.scorer.follow(prompts)
            answers = self.engine.generate(
                prompts, self.group_size, self.sampling, self.seed, self.tokenizer, following
            )
        with self._stage("score"):
            scores = following.result()
        return [Group(*group) for group in zip(prompts, answers, scores, strict=True)]

    def _replace_dull(self, groups: list[Group], positions: Sequence[int]) -> list[int]:
        """Puts others in the place of groups that do not vary. How often each place was sampled again."""
        replaced = [0] * len(groups)
        if self.dynamic is None:
            return replaced
        for again in range(1, self.dynamic.max_rounds + 1):
            dull = [place for place, group in enumerate(groups) if not group.varies(self.dynamic.tolerance)]
            if not dull:
                break
            others = self._groups([again * _ANOTHER_ROUND + positions[place] for place in dull])
            for place, other in zip(dull, others, strict=True):
                groups[place] = other
                replaced[place] += 1
        return replaced

    def _collate(self, rollout: int, groups: list[Group]) -> RolloutBatch:
        prompts, completions = pair_up([g.prompt for g in groups], [g.completions for g in groups])
        return collate_rollout(
            prompts,
            completions,
            [score for group in groups for score in group.scores],
            group_size=self.group_size,
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            rollout=rollout,
        )

    def _count_faults(self) -> dict[str, float]:
        return {
            "fault/engine_failures": float(self.engine.faults["failures"]),
            "time/engine_recovery": self.engine.recovery_seconds,
        }

    def _faults_since(self, num_rollouts: int) -> dict[str, float]:
        """Of the engine, since the rollouts before: a rollout's share."""
        before, self._engine_figures = self._engine_figures, self._count_faults()
        return {name: (value - before[name]) / num_rollouts for name, value in self._engine_figures.items()}

    @contextmanager
    def _stage(self, stage: Literal["generate", "score"]) -> Iterator[None]:
        """Announces a stage and adds up its time."""
        self.on_stage(stage)
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start
