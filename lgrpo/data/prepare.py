"""From a sampled rollout to a trainable one.

:class:`RolloutPreparation` runs these steps, in this order, before the first optimizer step on a rollout:

1. ``RolloutSchedule.get`` waits until the rollout is sampled and scored.
2. ``LateGroups.join`` adds earlier groups whose scores have arrived and takes out groups that lack scores.
3. ``Curriculum.record`` adds the pass rates of its groups to those of their prompts, if ``data.difficulty`` asks.
4. Completions that are too old (``data.max_lag``), or could not be scored, are taken out of the loss.
5. ``set_advantages`` computes advantages from the rewards of all ranks.
6. ``call_rollout_end`` lets callbacks shrink the loss mask further.
7. ``set_totals`` sums the denominators of the loss and the rollout's metrics over all ranks: the masks are final.
8. ``recompute_logprobs`` replaces the engine's log-probabilities by the policy's, if ``data.behaviour_logprobs`` asks.

Before each further pass over the rollout, ``next_pass`` takes out completions that have become too old since.

``micro_batches`` then cuts the rollout for training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lgrpo.advantages import Advantage
from lgrpo.data.advantages import set_advantages
from lgrpo.data.curriculum import Curriculum
from lgrpo.data.late import LateGroups, Rescore, padded_to
from lgrpo.data.micro_batches import TokenBudget, micro_batches
from lgrpo.data.schedule import RolloutSchedule
from lgrpo.engines import RolloutEngine
from lgrpo.functional import has_reward_variance
from lgrpo.hooks import call_rollout_end, policy_owner
from lgrpo.losses import PolicyLoss
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.types import RolloutBatch, StepTotals


@dataclass(kw_only=True)
class RolloutPreparation:
    """Makes rollouts trainable; called once for each rollout, in order, when its training is about to begin."""

    trainer: L.Trainer
    schedule: RolloutSchedule
    rescore: Rescore
    advantage: Advantage
    seed: int
    behaviour_logprobs: Literal["engine", "policy"]
    max_lag: int | None
    mask_failures: bool
    budget: TokenBudget | None = None
    curriculum: Curriculum | None = None
    success_reward: float = 1.0
    """Lowest reward of a completion that passes, for the curriculum."""
    started: float = field(default_factory=time.perf_counter)
    """Beginning of the fit, from which the clock of ``time/clock`` counts."""
    busy_seconds: Callable[[], float] = lambda: 0.0
    """Function that returns the seconds for which the engine has been sampling so far."""
    _last_busy: float = field(default=0.0, init=False)
    _last_end: float | None = field(default=None, init=False)
    _period: float | None = field(default=None, init=False)  # seconds from the previous rollout to this one

    def __call__(self, rollout: int, late: LateGroups) -> tuple[RolloutBatch, LateGroups]:
        """Return rollout k, ready for training, and the groups that wait for scores from then on."""
        trainer, start = self.trainer, time.perf_counter()
        batch, sync_seconds = self.schedule.get(trainer, rollout)
        oldest_step = 0 if self.max_lag is None else trainer.global_step - self.max_lag
        batch, late = late.join(batch, self.rescore, oldest_step, self.schedule.is_sampled_early, self.budget)
        batch = even_out(batch, late, trainer)
        if late.is_active and self.behaviour_logprobs == "policy":
            raise ValueError(
                "a reward returned NOT_YET and data.behaviour_logprobs is 'policy': when a late group is trained, the "
                "policy has changed since it was sampled. Use 'engine'"
            )
        if late.is_active and self.advantage.needs_parts:
            raise ValueError(
                f"a reward returned NOT_YET, and {type(self.advantage).__name__} needs each reward of a sum with the "
                "rollout: use another advantage, or rewards that are known at once"
            )
        if self.curriculum is not None:
            measured = self.curriculum.measure(batch, self.success_reward)
            self.curriculum.record(rollout, chain.from_iterable(gather_ranks(trainer, measured)))
            batch.metrics |= self.curriculum.metrics()
        self._mask_old(batch)
        if self.mask_failures:
            batch.loss_mask &= ~batch.failed[:, None]
        set_advantages(batch, self.advantage, self.seed, trainer, self.budget)
        call_rollout_end(trainer, batch)
        batch.metrics |= {"time/sync": sync_seconds} | self._idle_times(start)
        set_totals(batch, trainer)
        if self._period is not None:
            batch.metrics["time/tokens_per_second"] = batch.totals.all_tokens / self._period
        if self.behaviour_logprobs == "policy":
            recompute_logprobs(batch, self.schedule.ready(), trainer, self.budget)
        return batch, late

    def next_pass(self, pieces: Sequence[RolloutBatch]) -> None:
        """Take completions out of the loss that have become too old since the last pass over their rollout.

        Only micro-batches change, not the rollout: a resumed run splits it as before, and every rank keeps its pieces.
        """
        if self.max_lag is None:
            return
        for piece in pieces:
            self._mask_old(piece)
        counts = [live_counts(piece) for piece in pieces]
        local = {name: torch.stack([count[name] for count in counts]).sum() for name in counts[0]}
        total = _summed(local, self.trainer)
        for piece in pieces:
            piece.totals = replace(piece.totals, **total)

    def _mask_old(self, batch: RolloutBatch) -> None:
        if self.max_lag is not None:
            # a token at a time; False for recorded ones, whose lag is NaN
            batch.loss_mask &= ~(batch.token_lag(self.trainer.global_step) > self.max_lag)

    def _idle_times(self, start: float) -> dict[str, float]:
        """Return the time the trainer waited for this rollout; from the second on, also shares of the time between."""
        now, busy = time.perf_counter(), self.busy_seconds()
        times = {"time/wait": now - start, "time/clock": now - self.started}
        if self._last_end is not None:
            self._period = now - self._last_end
            times["time/trainer_idle_share"] = (now - start) / self._period
            times["time/engine_idle_share"] = max(0.0, 1 - (busy - self._last_busy) / self._period)
        self._last_end, self._last_busy = now, busy
        return times


def even_out(batch: RolloutBatch, late: LateGroups, trainer: L.Trainer) -> RolloutBatch:
    """Pad the rollouts of all ranks to one size, and add the metrics of late groups if any rank has some."""
    largest = torch.tensor([len(batch), int(late.is_active)], device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        largest = trainer.strategy.reduce(largest, reduce_op="max")
    size, is_active = largest.tolist()
    if is_active:
        counts = {"waiting": len(late.waiting), "joined": late.num_joined, "dropped": late.num_dropped}
        batch.metrics |= {f"rollout/late_{name}": float(count) for name, count in counts.items()}
        if "reward/failures" in batch.metrics:  # late scores may fail too
            batch.metrics["reward/failures"] = float(batch.failed[batch.is_known].sum())
    return padded_to(batch, size)


def set_totals(batch: RolloutBatch, trainer: L.Trainer) -> None:
    """Set ``batch.totals`` and complete ``batch.metrics`` with one collective; the masks must be final."""
    known = batch.is_known
    sampled, rewards = batch.completion_mask[known], batch.rewards[known].double()
    group_rewards = rewards.view(-1, batch.group_size).mean(1)
    local = {
        "all_tokens": sampled.sum(),
        "all_sequences": known.sum(),
        **live_counts(batch),
        "reward": rewards.sum(),
        "reward_squared": rewards.square().sum(),
        "groups": torch.tensor(len(group_rewards)),
        "group_reward_squared": group_rewards.square().sum(),
        "zero_variance": (~has_reward_variance(batch.rewards[known], batch.group_size)).sum(),
        "truncated": batch.truncated[known].sum(),
        "recorded": batch.is_recorded[known].sum(),
        "ranks": torch.tensor(1),
        **{name: torch.tensor(value) for name, value in _as_mean_squares(batch.metrics).items()},
    }
    total = _summed(local, trainer)
    batch.totals = StepTotals(**{name: total[name] for name in StepTotals.__slots__})
    averaged = _as_deviations({name: total[name] / total["ranks"] for name in batch.metrics})
    count = max(total["all_sequences"], 1)  # 0 if every score is late
    mean, groups = total["reward"] / count, total["groups"]
    between = max(total["group_reward_squared"] / max(groups, 1) - mean**2, 0.0)
    batch.metrics = {
        "rollout/reward": mean,
        "rollout/reward_std": max(total["reward_squared"] / count - mean**2, 0.0) ** 0.5,
        "rollout/reward_stderr": (between / max(groups - 1, 1)) ** 0.5,
        "rollout/zero_variance_fraction": total["zero_variance"] / count,
        "rollout/completion_length": total["all_tokens"] / count,
        "rollout/truncated_fraction": total["truncated"] / count,
        "rollout/live_fraction": total["live_sequences"] / count,
        **averaged,
    }
    if total["recorded"]:
        batch.metrics["rollout/recorded_fraction"] = total["recorded"] / count


def live_counts(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """Return this rank's part of the totals that depend on the loss mask."""
    mask = batch.loss_mask
    return {
        "live_tokens": mask.sum(),
        "live_sequences": mask.any(1).sum(),
        "signal_tokens": (mask & (batch.advantages != 0)).sum(),
    }


def _summed(counts: dict[str, torch.Tensor], trainer: L.Trainer) -> dict[str, float]:
    """Return the sums over ranks, with one collective."""
    vector = torch.stack([value.double() for value in counts.values()]).to(trainer.strategy.root_device)
    summed = trainer.strategy.reduce(vector, reduce_op="sum")
    assert isinstance(summed, torch.Tensor)
    return dict(zip(counts, summed.tolist(), strict=True))


def _as_mean_squares(metrics: dict[str, float]) -> dict[str, float]:
    """Replace standard deviations by mean squares, which can be averaged over ranks."""
    return {
        name: value**2 + metrics[name.removesuffix("_std")] ** 2 if _is_deviation(name, metrics) else value
        for name, value in metrics.items()
    }


def _as_deviations(metrics: dict[str, float]) -> dict[str, float]:
    """Invert ``_as_mean_squares``."""
    return {
        name: max(value - metrics[name.removesuffix("_std")] ** 2, 0.0) ** 0.5
        if _is_deviation(name, metrics)
        else value
        for name, value in metrics.items()
    }


def _is_deviation(name: str, metrics: dict[str, float]) -> bool:
    return name.endswith("_std") and name.removesuffix("_std") in metrics


def recompute_logprobs(
    batch: RolloutBatch, ready: Sequence[RolloutBatch], trainer: L.Trainer, budget: TokenBudget | None
) -> None:
    """Compute log π_α by the policy, for this rollout and for ready ones sampled from the same weights.

    The rollout is split as it will be for training, so that its ratio starts at exactly 1.
    """
    step = trainer.global_step
    sampled_at = int(batch.first_step.min())
    if batch.logprobs_from != "policy" and sampled_at != step:
        raise ValueError(
            f"data.behaviour_logprobs is 'policy', but rollout {batch.rollout} was sampled with the weights of "
            f"step {sampled_at} and the policy is already at step {step}. Use 'engine'"
        )
    for rollout in {other.rollout: other for other in (*ready, batch)}.values():
        if rollout.logprobs_from == "policy" or int(rollout.first_step.min()) != step:
            continue  # computed before, or sampled from weights that the policy no longer has
        for piece in micro_batches(rollout, trainer, budget):
            width = piece.tokens.shape[1]
            rollout.behaviour_logprobs[piece.rows, :width] = policy_owner(trainer).policy_logprobs(piece)
        rollout.logprobs_from = "policy"


def check_logprobs(engine: RolloutEngine, source: Literal["engine", "policy"], loss: PolicyLoss) -> None:
    """Raise an error if the engine's recorded completions lack the log-probabilities that the loss needs."""
    if engine.replays and source == "policy":
        raise ValueError(
            "data.behaviour_logprobs is 'policy', but recorded completions were not sampled by this policy, which "
            "cannot know their log π_α. Use 'engine', which takes it from the recording"
        )
    if engine.num_without_logprobs and loss.needs_behaviour:
        gate = getattr(loss, "gate", None)
        reader = f"gate {type(gate).__name__}" if getattr(gate, "needs_behaviour", False) else type(loss).__name__
        raise ValueError(
            f"{engine.num_without_logprobs} recorded completions have no log-probabilities, and model.loss ({reader}) "
            "compares the policy with the one that sampled (π_θ/π_α): record them (lgrpo.recordings.RolloutRecorder "
            "does), or choose a loss that needs none, such as configs/algorithms/reinforce.yaml, red_drop.yaml, "
            "red_weight.yaml, opmd.yaml, asymre.yaml, or rec_oneside_nois.yaml with "
            "model.loss.init_args.ratio.init_args.over=proximal"
        )


def rows_per_rank(num_prompts: int, group_size: int, trainer: L.Trainer) -> int:
    """Return the completions of a rank in a rollout; raise an error if they cannot be divided as configured."""
    if num_prompts % trainer.world_size:
        raise ValueError(
            f"data.num_prompts is {num_prompts}, which is not divisible by the {trainer.world_size} ranks: groups are "
            "never split, and every rank takes the same number of prompts"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "GradientAccumulationScheduler changes the number of micro-batches during a fit, and a rollout is split "
            "into a constant number: set trainer.accumulate_grad_batches, or data.micro_batch_tokens"
        )
    num_rows = num_prompts // trainer.world_size * group_size
    if trainer.accumulate_grad_batches > num_rows:
        raise ValueError(
            f"each rank has {num_rows} completions in a rollout (data.num_prompts × data.group_size), which cannot be "
            f"split into trainer.accumulate_grad_batches = {trainer.accumulate_grad_batches} micro-batches"
        )
    return num_rows
