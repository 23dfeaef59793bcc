"""Rules for the step: the learning rate by the effective sample size, and VCPO's baseline."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from lgrpo import GRPOModule
from lgrpo.advantages import ComposedAdvantage, LeastVariance, LengthWeighted, NoScale, SignedZeroVariance
from lgrpo.functional import completion_log_ratio
from lgrpo.policy import EffectiveSampleSize
from tests.helpers import build, fit, largest_difference, tiny_policy
from tests.losses.test_parts import scores
from tests.processes import two_step_rules


def sample_size(log_ratios):
    weights = [math.exp(value) for value in log_ratios]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def test_learning_rate_is_scaled_by_the_effective_sample_size():
    """With SGD the step is the learning rate times the gradient, so the scale can be read from the weights."""
    run = two_step_rules.run(rollouts=3)
    sizes = [row["train/effective_sample_size"] for row in run.logged]
    assert sizes[0] == pytest.approx(1, abs=1e-5)  # on-policy
    assert min(sizes) < 0.97
    assert all(row["train/learning_rate"] == pytest.approx(0.3) for row in run.logged)
    expected = {name: p.clone() for name, p in build().weights.items()}
    for size, gradients in zip(sizes, run.recorder.gradients, strict=True):
        for name, gradient in gradients.items():
            expected[name] -= 0.3 * math.sqrt(size) * gradient
    assert largest_difference(expected, run.weights) < 1e-6


def test_effective_sample_size_is_that_of_the_formula():
    run = two_step_rules.run(rollouts=2, v=2)
    before = build()
    gradients = run.recorder.gradients[0]
    with torch.no_grad():  # the policy at the second rollout: one step of size 1, up to rounding
        for name, p in before.module.policy.named_parameters():
            p -= 0.3 * gradients[name]
    batch = run.recorder.rollouts[1]
    logprobs, _ = before.module.policy(batch.tokens, batch.completion_mask, batch.temperature)
    log_ratios = completion_log_ratio(logprobs.detach() - batch.behaviour_logprobs, batch.completion_mask)
    assert run.logged[1]["train/effective_sample_size"] == pytest.approx(sample_size(log_ratios.tolist()), abs=1e-4)


@pytest.mark.slow("trains four times and starts two processes")
def test_micro_batches_and_ranks_do_not_change_the_scale(tmp_path):
    runs = [two_step_rules.run(accumulate_grad_batches=number) for number in (1, 2, 4)]
    for run in runs[1:]:
        assert largest_difference(runs[0].weights, run.weights) < 1e-5
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-m", "tests.processes.two_step_rules", str(out)], check=True, timeout=300)
    assert largest_difference(torch.load(out), runs[0].weights) < 1e-5


def test_rate_of_a_scheduler_is_not_scaled_twice():
    run = build(rollouts=4, v=4, learning_rate=0.3)
    run.module.step_rule = EffectiveSampleSize(power=3.0)
    run.module.scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    run.trainer.fit(run.module, datamodule=run.data)
    rates = [row["train/learning_rate"] for row in run.logged]
    assert rates == pytest.approx([0.3, 0.15, 0.075, 0.0375])


def test_bad_rules():
    with pytest.raises(ValueError, match="power is 0; it must be above 0"):
        EffectiveSampleSize(0)
    two = [EffectiveSampleSize(), EffectiveSampleSize(1.0)]
    with pytest.raises(ValueError, match=r"has 2 rules \(EffectiveSampleSize, EffectiveSampleSize\).*: keep one"):
        GRPOModule(tiny_policy(), step_rule=two)
    assert GRPOModule(tiny_policy(), step_rule=two[:1]).step_rule.power == 0.5
    with pytest.raises(ValueError, match="step_rule is 'vcpo'; it must be a StepRule"):
        GRPOModule(tiny_policy(), step_rule="vcpo")
    run = build(rollouts=1)
    batch = fit(rollouts=1).recorder.rollouts[0]
    batch.behaviour_logprobs[0] = math.nan
    with pytest.raises(ValueError, match="recorded completions have no log-probabilities"):
        EffectiveSampleSize().see(batch, torch.zeros_like(batch.behaviour_logprobs))
    assert run.module.step_rule is None


class TestLeastVariance:
    def test_formula(self):
        own = scores([1.0, 0.0, 0.5, 0.0, 0.25, 1.0, 1.0, 0.0])
        own.log_ratios = torch.tensor([0.5, -1.0, 0.2, 0.0, 300.0, 299.0, 0.0, -300.0], dtype=torch.float64)
        found = LeastVariance(NoScale())(own)
        for first in (0, 4):
            top = float(own.log_ratios[first : first + 4].max())
            weights = [float(own.lengths[i]) * math.exp(own.log_ratios[i] - top) ** 2 for i in range(first, first + 4)]
            baseline = sum(w * float(own.rewards[first + i]) for i, w in enumerate(weights)) / sum(weights)
            assert torch.allclose(found[first : first + 4], own.rewards[first : first + 4] - baseline, atol=1e-6)

    def test_on_policy_it_is_weighted_by_length_alone(self):
        own = scores([1.0, 0.0, 0.5, 0.0])
        own.log_ratios = torch.zeros(4)
        assert torch.allclose(LeastVariance(NoScale())(own), LengthWeighted()(own))

    def test_ratios_are_those_of_the_policy_before_the_updates(self):
        seen = []

        class Kept(ComposedAdvantage):
            needs_log_ratios = True

            def __call__(self, scores):
                seen.append(scores.log_ratios)
                return super().__call__(scores)

        for pieces in (1, 4):
            fit(rollouts=2, v=2, data={"advantage": Kept()}, trainer={"accumulate_grad_batches": pieces})
        assert seen[0].abs().max() < 1e-4  # the policy is still the one that sampled
        assert seen[1].abs().max() > 1e-3
        assert torch.allclose(seen[1], seen[3], atol=1e-5)

    def test_wrapped_advantages_pass_the_need_on(self):
        assert SignedZeroVariance(LeastVariance()).needs_log_ratios

    def test_recordings_without_log_probabilities(self, monkeypatch):
        run = build(rollouts=1, data={"advantage": LeastVariance()})
        nan = torch.tensor(math.nan)
        monkeypatch.setattr(type(run.module), "policy_logprobs", lambda self, batch: nan * batch.behaviour_logprobs)
        with pytest.raises(ValueError, match="LeastVariance compares the policy with the one that sampled, but"):
            run.trainer.fit(run.module, datamodule=run.data)
