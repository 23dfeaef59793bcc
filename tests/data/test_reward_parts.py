"""Check that each reward of a sum reaches the advantage (GDPO)."""

from __future__ import annotations

import pytest
import torch
from trl.trainer.utils import nanstd

from lgrpo.advantages import DecoupledWhitened
from lgrpo.data.collate import as_reward_parts
from lgrpo.recordings import ReplayEngine, RolloutRecorder
from lgrpo.rewards import NOT_YET, BatchReward, FailedScore, Reward, SumScore, WeightedSum
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, fit, largest_difference


class Large(Reward):
    """A reward whose range is a thousand times that of the other one."""

    is_inline = True

    def score(self, prompt, completion):
        return 1000.0 * (len(completion.token_ids) % 3)


class Late(BatchReward):
    is_inline = True

    def __call__(self, prompts, completions):
        return [NOT_YET] * len(completions)


class Fails(BatchReward):
    is_inline = True

    def __call__(self, prompts, completions):
        return [FailedScore(-1.0, "errors", "first"), *[0.0] * (len(completions) - 1)]


def task(reward=None):
    parts = WeightedSum({"low": LowDigits(), "large": Large()}, {"large": 0.5})
    return SortDigits(num_digits=2, num_held_out=20, reward=reward or parts)


def by_loop(rewards, weights, group_size, eps=1e-4):
    """Whiten each reward within its group, and their weighted sum over the rollout."""
    total = torch.zeros(len(rewards), dtype=rewards.dtype)
    for k in range(rewards.shape[1]):
        for first in range(0, len(rewards), group_size):
            own = rewards[first : first + group_size, k]
            total[first : first + group_size] += weights[k] * (own - own.nanmean()) / (nanstd(own) + eps)
    return (total - total.nanmean()) / (nanstd(total) + eps)


def test_each_reward_reaches_the_advantage():
    (batch,) = fit(rollouts=1, data={"task": task(), "advantage": DecoupledWhitened()}).recorder.rollouts
    rewards, weights = batch.reward_parts.unbind(1)
    assert torch.equal(weights, torch.tensor([[1.0, 0.5]]).expand(16, 2))
    assert torch.allclose((rewards * weights).sum(1), batch.rewards)
    own = batch.advantages[torch.arange(16), batch.attention_mask.sum(1) - 1]
    assert torch.allclose(own, by_loop(rewards, weights[0], 4), atol=1e-4)


def test_a_reward_that_is_not_a_sum_is_its_only_part():
    (batch,) = fit(rollouts=1, data={"advantage": DecoupledWhitened()}).recorder.rollouts
    assert batch.reward_parts is None
    own = batch.advantages[torch.arange(16), batch.attention_mask.sum(1) - 1]
    assert torch.allclose(own, by_loop(batch.rewards[:, None], [1.0], 4), atol=1e-4)


def test_micro_batches_and_passes_keep_the_parts():
    data = {"task": task(), "advantage": DecoupledWhitened()}
    runs = [fit(rollouts=3, v=2, i=2, data=data, trainer={"accumulate_grad_batches": n}) for n in (1, 4)]
    assert largest_difference(*(run.weights for run in runs)) < 1e-6


def test_scores_without_parts():
    assert as_reward_parts([1.0, 0.0]) is None
    assert as_reward_parts([NOT_YET]) is None
    assert as_reward_parts([SumScore(1.0, ((1.0, 1.0),)), 0.0]) is None
    reward = WeightedSum({"low": LowDigits(), "fails": Fails()})
    (batch,) = fit(rollouts=1, data={"task": task(reward)}).recorder.rollouts
    assert batch.failed.tolist() == [True, False, False, False] * 4
    assert batch.reward_parts[:, 0, 1].tolist() == [-1.0, 0.0, 0.0, 0.0] * 4


def test_scores_that_come_later_are_refused():
    reward = WeightedSum({"low": LowDigits(), "late": Late()})
    with pytest.raises(ValueError, match="returned NOT_YET, and DecoupledWhitened needs each reward"):
        fit(rollouts=1, data={"task": task(reward), "advantage": DecoupledWhitened()})


def test_a_recording_is_refused(tmp_path):
    fit(rollouts=1, data={"task": task()}, callbacks=[RolloutRecorder(path=str(tmp_path))])
    replay = {"task": task(), "engine": ReplayEngine(str(tmp_path)), "advantage": DecoupledWhitened()}
    with pytest.raises(ValueError, match="a recording has only the sum: have the task score"):
        fit(rollouts=1, data=replay)
    replay["engine"] = ReplayEngine(str(tmp_path), rewards="task")
    assert fit(rollouts=1, data=replay).recorder.rollouts[0].reward_parts is not None
