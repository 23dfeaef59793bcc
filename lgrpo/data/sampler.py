"""Sampling and scoring of rollouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase

from lgrpo.data.collate import Group, collate_rollout, completions_of
from lgrpo.data.dynamic import DynamicSampling, may_vary
from lgrpo.data.episodes import episode_metrics
from lgrpo.data.kept import kept_metrics
from lgrpo.data.partial import PartialRollouts, PartialSampler
from lgrpo.data.prompts import Prompts, prompts_at
from lgrpo.data.scorer import GroupScores, Scorer
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.engines.completions import Generation, OnGroup
from lgrpo.engines.in_flight import SyncPause
from lgrpo.rewards import Score
from lgrpo.types import Completion, Prompt, RolloutBatch

Deliver: TypeAlias = Callable[[RolloutBatch], None]
"""Function that takes a rollout as soon as it is sampled and scored."""
_ROUND_OFFSET = 2**40 + 15  # odd, so that without shuffling another row is drawn
"""Distance between the positions of a prompt and of its replacement: far beyond the run's positions, so that
replacements do not use up prompts of a pass."""


@dataclass(kw_only=True)
class RolloutSampler:
    """Samples and scores this rank's part of rollouts.

    The result depends only on the engine's weights, the seed and the positions of the prompts in the run.
    """

    prompts: Prompts
    scorer: Scorer
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    num_prompts: int
    group_size: int
    sampling: Sampling
    seed: int
    dynamic: DynamicSampling | None
    rank: int
    world_size: int
    overlap: bool
    """Whether it is called in the background, and delivers each rollout while later ones are being sampled."""
    pause: SyncPause | None = None
    """Pause of a generation for a sync in flight, if the schedule allows that."""
    partial: PartialRollouts | None = None
    """Settings of partial rollouts; None: a rollout waits for all of its groups."""
    on_stage: Callable[[Literal["generate", "score"]], None]
    started: float = field(default_factory=time.perf_counter)
    """Beginning of the fit, from which the clock of ``time/sampled_at`` counts."""

    def __post_init__(self) -> None:
        if self.dynamic is not None and self.prompts.is_streamed:
            raise ValueError("data.dynamic_sampling draws prompts from any position, which a streamed set cannot give")
        if self.partial is not None and self.prompts.is_streamed:
            raise ValueError("data.partial returns to prompts of earlier rollouts, which a streamed set cannot give")
        self.share = self.num_prompts // self.world_size
        self.first = self.rank * self.share
        self._seconds: dict[str, float] = {}
        self._busy = 0.0
        self._busy_since: float | None = None  # start of the engine's current call
        self._waited_before = self._waited_elsewhere = self.engine.environment_seconds
        self._faults = self._engine_faults()
        self._partial = None if self.partial is None else PartialSampler(self, self.partial)

    def state_dict(self, rollout: int) -> dict[str, Any] | None:
        """Return what sampling needs beside the position, if ``rollout`` was the last one: unfinished groups."""
        return None if self._partial is None else self._partial.state_dict(rollout)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._partial is not None:
            self._partial.load_state_dict(state)

    def prepare_engine(self, num_rollouts: int) -> None:
        """Show the engine the prompts of a run, up to one pass, so that it can refuse what cannot work."""
        is_streamed = self.prompts.is_streamed
        num_positions = 0 if is_streamed else min(num_rollouts * self.num_prompts, len(self.prompts))
        first_pass = (self.prompts.at(position) for position in range(num_positions))
        self.engine.prepare(self.tokenizer, first_pass, self.group_size, self.sampling)

    def __call__(self, rollouts: range, deliver: Deliver) -> None:
        """Sample some rollouts in one call of the engine, and deliver them in order.

        If sampling overlaps with training, each is delivered as soon as it is whole. With dynamic sampling, whose
        rounds need the engine, each rollout then has its own calls. A partial rollout always has its own call.
        """
        if self._partial is not None:
            for rollout in rollouts:
                self._sample_partial(rollout, deliver)
        elif not self.overlap:
            self._sample_together(rollouts, deliver)
        elif self.dynamic is not None:
            for rollout in rollouts:
                self._sample_together(range(rollout, rollout + 1), deliver)
        else:
            prompts = self.prompts.draw(self._positions(rollouts))
            with _Stream(self, rollouts, prompts, deliver) as stream:
                self._generate(prompts, stream.on_group)

    def on_sync(self) -> None:
        if self.prompts.curriculum is not None:
            self.prompts.curriculum.freeze()

    def on_request(self, rollouts: range) -> None:
        if self.pause is not None and self.pause.is_allowed:  # otherwise they are sampled before the next sync
            self.prompts.draw(self._positions(rollouts))

    def busy_seconds(self) -> float:
        """Return the seconds for which the engine has been sampling so far."""
        since = self._busy_since
        return self._busy + (0.0 if since is None else time.perf_counter() - since)

    def generate_part(self, generation: Generation) -> None:
        """Have the engine sample a partial generation."""
        with self._timed():
            self.engine.generate_part(generation)

    def _generate(self, prompts: Sequence[Prompt], on_group: OnGroup) -> list[list[Completion]]:
        pause = self.pause
        generate = self.engine.generate if pause is None or not pause.is_allowed else pause.generate
        with self._timed():
            return generate(prompts, self.group_size, self.sampling, self.seed, self.tokenizer, on_group)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time inside to the engine's busy seconds."""
        self._busy_since = start = time.perf_counter()
        self._waited_elsewhere += self.engine.environment_seconds - self._waited_before
        try:
            yield
        finally:
            self._busy_since = None
            self._busy += time.perf_counter() - start
            self._waited_before = self.engine.environment_seconds

    def _waiting_seconds(self) -> float:
        """Return the seconds for which the engine waited for environments, without those of validations."""
        return self.engine.environment_seconds - self._waited_elsewhere

    def _positions(self, rollouts: range) -> list[int]:
        """Return the positions of this rank's prompts."""
        return [k * self.num_prompts + self.first + j for k in rollouts for j in range(self.share)]

    def _sample_together(self, rollouts: range, deliver: Deliver) -> None:
        """Sample rollouts in one call, and deliver them when all are scored."""
        self._seconds = {"generate": 0.0, "score": 0.0}
        positions = self._positions(rollouts)
        groups = self._sample_groups(positions)
        num_resampled = self._resample_zero_variance(groups, positions)
        sampled_at = time.perf_counter() - self._seconds["score"]
        shares = [slice(j * self.share, (j + 1) * self.share) for j in range(len(rollouts))]
        with self._stage("score"):
            batches = [self.collate(groups[own], k) for k, own in zip(rollouts, shares, strict=True)]
        seconds = {f"time/{name}": seconds / len(batches) for name, seconds in self._seconds.items()}
        means = self.scorer.reward.report() | self.new_faults(len(batches))
        for batch, own in zip(batches, shares, strict=True):
            batch.metrics |= seconds | means | {"time/sampled_at": sampled_at - self.started}
            if self.dynamic is not None:
                batch.metrics["rollout/resampled_fraction"] = sum(num_resampled[own]) / self.share
            deliver(batch)

    def _sample_partial(self, rollout: int, deliver: Deliver) -> None:
        """Sample a rollout until it has enough whole groups, and deliver it."""
        assert self._partial is not None
        self.on_stage("generate")
        start, busy = time.perf_counter(), self._busy
        groups, metrics = self._partial.sample(rollout)
        generate, total = self._busy - busy, time.perf_counter() - start
        batch = self.collate(groups, rollout)
        batch.metrics |= metrics | self.scorer.reward.report() | self.new_faults(1)
        batch.metrics |= {
            "time/generate": generate,
            "time/score": total - generate,
            "time/sampled_at": start + generate - self.started,
        }
        deliver(batch)

    def collate(self, groups: Sequence[Group], rollout: int) -> RolloutBatch:
        """Return the rollout of some groups, with the metrics of their scores."""
        batch = collate_rollout(groups, self.tokenizer.pad_token_id, self.sampling, rollout)
        batch.metrics = self.scorer.failures([group.scores for group in groups])
        completions = [completion for group in groups for completion in group.completions]
        if self.engine.has_turns:
            batch.metrics |= episode_metrics(completions, self.engine.max_contexts > 1)
        if self.sampling.returns_kept:
            batch.metrics |= kept_metrics(completions)
        if self._partial is not None or (self.pause is not None and self.pause.is_allowed):
            batch.metrics["rollout/continued_fraction"] = sum(bool(c.earlier) for c in completions) / len(completions)
        return batch

    def rescore(self, groups: Sequence[RolloutBatch]) -> list[list[Score]]:
        """Ask the reward again for the scores of groups that were sampled earlier."""
        prompts = prompts_at(self.prompts, [int(group.positions[0]) for group in groups])
        scores_of = GroupScores(self.scorer, prompts)
        for index, group in enumerate(groups):
            scores_of(index, completions_of(group, self.tokenizer, self.sampling))
        scores = scores_of.result()
        if not self.overlap:
            self.scorer.reward.report()  # drop their metrics, which were reported when they were first scored
        return scores

    def _sample_groups(self, positions: Sequence[int]) -> list[Group]:
        prompts = self.prompts.draw(positions)
        with self._stage("generate"):
            scores_of = GroupScores(self.scorer, prompts)
            answers = self._generate(prompts, scores_of)
        with self._stage("score"):
            scores = scores_of.result()
        return [Group(*group) for group in zip(prompts, answers, scores, strict=True)]

    def _resample_zero_variance(self, groups: list[Group], positions: Sequence[int]) -> list[int]:
        """Replace groups without reward variance in place; return how often each was resampled."""
        num_resampled = [0] * len(groups)
        if self.dynamic is None:
            return num_resampled
        for number in range(1, self.dynamic.max_rounds + 1):
            indices = [index for index, group in enumerate(groups) if not may_vary(group, self.dynamic.tolerance)]
            if not indices:
                break
            replacements = self._sample_groups([number * _ROUND_OFFSET + positions[index] for index in indices])
            for index, replacement in zip(indices, replacements, strict=True):
                groups[index] = replacement
                num_resampled[index] += 1
        return num_resampled

    def _engine_faults(self) -> dict[str, float]:
        return {
            "fault/engine_failures": float(self.engine.faults.num_failures),
            "time/engine_recovery": self.engine.faults.recovery_seconds,
            **({"time/environment": self._waiting_seconds()} if self.engine.has_turns else {}),
        }

    def new_faults(self, num_rollouts: int) -> dict[str, float]:
        """Return the engine's faults since the last call, divided by the number of rollouts."""
        before, self._faults = self._faults, self._engine_faults()
        return {name: (value - before[name]) / num_rollouts for name, value in self._faults.items()}

    @contextmanager
    def _stage(self, stage: Literal["generate", "score"]) -> Iterator[None]:
        """Announce a stage and add up its seconds."""
        self.on_stage(stage)
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start


class _Stream:
    """One call of the engine whose rollouts are delivered while it lasts, in order, each when it is scored.

    The engine calls ``on_group``, from any thread. A thread of its own waits for scores and delivers. Leaving the
    context waits for the last delivery, and raises the error of one that failed.

    Groups are scored one rollout after another, so that the reward's metrics belong to the rollout.
    """

    def __init__(self, sampler: RolloutSampler, rollouts: range, prompts: Sequence[Prompt], deliver: Deliver) -> None:
        self._sampler = sampler
        self._rollouts = rollouts
        self._prompts = prompts
        self._deliver = deliver
        self._scores_of = GroupScores(sampler.scorer, prompts)
        self._completions: dict[int, list[Completion]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deliver")
        self._deliveries: list[Future[None]] = []
        self._scored = 0
        """Number of the rollout whose groups are being scored."""
        self._last = time.perf_counter()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._thread.shutdown(wait=error is None, cancel_futures=error is not None)
        if error is None:
            for delivery in self._deliveries:
                delivery.result()

    def on_group(self, index: int, completions: list[Completion]) -> None:
        """Have a group scored, and the next rollouts delivered if it was the last one they waited for."""
        with self._lock:
            self._completions[index] = completions
            if index in self._own(self._scored):
                self._scores_of(index, completions)
            while (j := len(self._deliveries)) < len(self._rollouts) and self._completions.keys() >= set(self._own(j)):
                self._deliveries.append(self._thread.submit(self._finish, j, time.perf_counter()))
            for delivery in self._deliveries:
                if delivery.done():
                    delivery.result()  # ends the generation if a reward failed

    def _own(self, j: int) -> range:
        """Return the indices of the prompts of the j-th rollout."""
        return range(j * self._sampler.share, (j + 1) * self._sampler.share)

    def _finish(self, j: int, sampled_at: float) -> None:
        sampler, own = self._sampler, self._own(j)
        scores = self._scores_of.result(own)
        groups = [
            Group(self._prompts[index], self._completions.pop(index), score)
            for index, score in zip(own, scores, strict=True)
        ]
        batch = sampler.collate(groups, self._rollouts[j])
        batch.metrics |= sampler.scorer.reward.report() | sampler.new_faults(1)
        with self._lock:
            self._scored = j + 1
            for index in self._own(j + 1):
                if index in self._completions:
                    self._scores_of(index, self._completions[index])
        batch.metrics |= {
            "time/generate": sampled_at - self._last,
            "time/score": time.perf_counter() - sampled_at,
            "time/sampled_at": sampled_at - sampler.started,
        }
        self._last = sampled_at
        self._deliver(batch)
