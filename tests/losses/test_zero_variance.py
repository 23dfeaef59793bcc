"""Methods that learn from groups whose rewards are all equal, against loops over their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from lgrpo import ZeroVarianceMask
from lgrpo.advantages import (
    ComposedAdvantage,
    DecoupledWhitened,
    GroupStd,
    LengthWeighted,
    MajorityStd,
    Scores,
    SignedZeroVariance,
)
from lgrpo.losses import ComposedLoss, EntropyGuided, LagDecay, MasteredHinge, MinClip, PolicyLogprobs, SequenceMean
from tests.helpers import fit
from tests.losses.test_parts import numbers, scores

ZVP = ComposedLoss(gate=MinClip(), weight=EntropyGuided())
MCPO = ComposedLoss(gate=MinClip(0.2, 0.28), regularisers=[MasteredHinge()], aggregation=SequenceMean())


def a_rollout():
    """Return rows of groups that are all correct, all wrong, and mixed, with entropies that vary."""
    batch, policy, _, _ = numbers(rows=12, seed=2, noise=0.05)
    batch.rewards = torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0, 0.0, 0.0, 1.0])
    batch.zero_variance = torch.arange(12) < 8
    entropy = torch.rand(policy.shape, generator=torch.Generator().manual_seed(3)) * 2
    advantages = SignedZeroVariance(ComposedAdvantage(scale=GroupStd()))(scores(batch.rewards))
    batch.advantages = torch.where(batch.completion_mask, advantages[:, None].float(), 0.0)
    return batch, policy, entropy


def gradient_of(loss, batch, policy, entropy):
    leaf = policy.clone().requires_grad_()
    logprobs = PolicyLogprobs(policy=torch.where(batch.completion_mask, leaf, 0.0), entropy=entropy)
    loss(batch, logprobs).loss.backward()
    return leaf.grad


def test_rl_zvp_equals_its_formula():
    """A = 0.1 H for correct groups, -0.1 (max H - H) for wrong ones, whitened rewards for the others; clipped."""
    batch, policy, entropy = a_rollout()
    gradient = gradient_of(ZVP, batch, policy, entropy)
    total, seen = float(batch.completion_mask.sum()), set()
    for i, t in batch.completion_mask.nonzero().tolist():
        own = entropy[i][batch.completion_mask[i]]
        if i < 4:
            advantage = 0.1 * float(entropy[i, t])
        elif i < 8:
            advantage = -0.1 * float(own.max() - entropy[i, t])
        else:
            advantage = (1 if i in (8, 11) else -1) * 0.5 / math.sqrt(0.25 + 1e-4)
        ratio = math.exp(float(policy[i, t] - batch.behaviour_logprobs[i, t]))
        kept = ratio <= 1.2 if advantage > 0 else ratio >= 0.8
        assert abs(float(gradient[i, t]) + advantage * ratio * kept / total) < 1e-6
        seen.add((i // 4, kept))
    assert len(seen) >= 3


def test_mcpo_equals_its_formula():
    """φ(d) = k3(d) - k3(±δ) beyond δ = 0.01, for the mastered group only, a mean over completions."""
    batch, policy, entropy = a_rollout()
    batch.advantages[:] = 0
    gradient = gradient_of(MCPO, batch, policy, entropy)
    value = float(MCPO(batch, PolicyLogprobs(policy=policy, entropy=entropy)).loss)
    expected, inside = 0.0, 0
    for i, t in batch.completion_mask.nonzero().tolist():
        d, share = float(policy[i, t] - batch.behaviour_logprobs[i, t]), 12 * int(batch.completion_mask[i].sum())
        acts = i < 4 and abs(d) > 0.01
        inside += i < 4 and not acts
        edge = math.copysign(0.01, d)
        expected += acts * ((math.exp(d) - d - 1) - (math.exp(edge) - edge - 1)) / share
        assert abs(float(gradient[i, t]) - acts * (math.exp(d) - 1) / share) < 1e-6
    assert inside > 0
    assert abs(value - expected) < 1e-6


def test_majority_std_weights_most_correct_groups_as_half_correct_ones():
    """The sum of |A| is √(p (1 - p)) up to p = ½ and constant above."""
    for successes in range(1, 8):
        p = successes / 8
        advantages = ComposedAdvantage(scale=MajorityStd())(scores([1.0] * successes + [0.0] * (8 - successes), 8))
        assert float(advantages.abs().mean()) / 2 == pytest.approx(
            math.sqrt(p * (1 - p)) if p <= 0.5 else 0.5, abs=1e-4
        )


def test_length_weighted_equals_its_formula():
    own = scores([1.0, 0.0, 0.5, 0.0, 0.25, 1.0, 1.0, 0.0])
    found = LengthWeighted()(own)
    for first in (0, 4):
        rows = range(first, first + 4)
        baseline = sum(own.lengths[i] * own.rewards[i] for i in rows) / sum(own.lengths[i] for i in rows)
        assert torch.allclose(found[first : first + 4], own.rewards[first : first + 4] - baseline, atol=1e-6)
    empty = Scores(rewards=torch.tensor([1.0, 0.0]), lengths=torch.zeros(2), draws=torch.zeros(2), group_size=2)
    assert LengthWeighted()(empty).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("part", [{"weight": LagDecay(weight=EntropyGuided())}, {"regularisers": [MasteredHinge()]}])
def test_a_mask_of_these_groups_is_refused(part):
    with pytest.raises(ValueError, match=r"has a part for these groups .* set zero_variance_mask: null"):
        fit(rollouts=1, loss=ComposedLoss(gate=MinClip(), **part), callbacks=[ZeroVarianceMask()])


def test_unknown_variance_is_an_error():
    batch, policy, entropy = a_rollout()
    batch.zero_variance = None
    with pytest.raises(ValueError, match="not known which groups have equal rewards"):
        gradient_of(ZVP, batch, policy, entropy)


def test_groups_without_variance_are_marked_before_the_rollout_is_split():
    data = {"advantage": SignedZeroVariance(success_reward=0.2)}
    runs = [fit(rollouts=4, v=2, loss=ZVP, data=data, trainer={"accumulate_grad_batches": n}) for n in (1, 4)]
    for batch in runs[0].recorder.rollouts:
        groups = batch.rewards.view(-1, 4)
        equal = (groups.amax(1) - groups.amin(1) <= 1e-6).repeat_interleave(4)
        assert torch.equal(batch.zero_variance, equal)
    for one, other in zip(*(run.recorder.gradients for run in runs), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("advantage", [SignedZeroVariance(), DecoupledWhitened()])
def test_the_mask_is_refused_with_an_advantage_of_these_groups(advantage):
    with pytest.raises(ValueError, match=f"with data.advantage {type(advantage).__name__}: set zero_variance_mask"):
        fit(rollouts=1, data={"advantage": advantage}, callbacks=[ZeroVarianceMask()])
