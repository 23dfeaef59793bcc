"""Rules for the step: the learning rate by the effective sample size, VCPO's baseline, and GAC's projection."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import GRPOModule
from lgrpo.advantages import ComposedAdvantage, LeastVariance, LengthWeighted, NoScale, SignedZeroVariance
from lgrpo.callbacks import ExactResume, GradientAlignment
from lgrpo.functional import completion_log_ratio
from lgrpo.policy import EffectiveSampleSize, GradientProjection
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


@pytest.mark.parametrize("rule", two_step_rules.RULES.values())
@pytest.mark.slow("trains three times")
def test_micro_batches_do_not_change_the_update(rule):
    runs = [two_step_rules.run(i=2, rule=rule(), accumulate_grad_batches=number) for number in (1, 2, 4)]
    for run in runs[1:]:
        assert largest_difference(runs[0].weights, run.weights) < 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.slow("starts two processes")
def test_ranks_do_not_change_the_update(kind, tmp_path):
    command = [sys.executable, "-m", "tests.processes.two_step_rules", kind, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    plain = fit(rollouts=4, v=4, i=2, learning_rate=0.3)
    for name, rule in two_step_rules.RULES.items():
        alone = dict(two_step_rules.run(i=2, rule=rule()).module.policy_weights())
        assert largest_difference(torch.load(tmp_path / f"{name}.pt"), alone) < 1e-5
        assert largest_difference(dict(plain.module.policy_weights()), alone) > 1e-3
    straight, resumed = (torch.load(tmp_path / f"{name}-cosines.pt") for name in ("projection", "resumed"))
    assert resumed == straight[3:]
    assert largest_difference(*(torch.load(tmp_path / f"{name}.pt") for name in ("projection", "resumed"))) == 0


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
    with pytest.raises(ValueError, match="power is inf"):
        EffectiveSampleSize(math.inf)
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


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).double()


def projected(gradient, previous, limit):
    """Return the gradient that GAC's rule steps with, by a search for the multiple of ``previous`` to subtract."""
    cosine = torch.cosine_similarity(gradient, previous, 0)
    if cosine <= limit:
        return gradient
    low, high = 0.0, float((gradient @ previous) / (previous @ previous))
    for _ in range(60):
        middle = (low + high) / 2
        if torch.cosine_similarity(gradient - middle * previous, previous, 0) > limit:
            low = middle
        else:
            high = middle
    return gradient - high * previous


class TestGradientProjection:
    @pytest.mark.parametrize("pieces", [1, 4])
    @pytest.mark.parametrize("limit", [0.0, 0.2])
    def test_steps_are_those_of_the_formula(self, limit, pieces):
        """With SGD the step is the learning rate times the projected gradient."""
        run = two_step_rules.run(rollouts=3, v=6, i=2, rule=GradientProjection(limit), accumulate_grad_batches=pieces)
        gradients = [flat(own) for own in run.recorder.gradients]
        steps = [gradients[0], *(projected(g, h, limit) for h, g in itertools.pairwise(gradients))]
        start = build()
        expected = flat(start.weights) - 0.3 * sum(steps)
        assert (flat(run.weights) - expected).abs().max() < 1e-6
        cosines = [float(torch.cosine_similarity(a, b, 0)) for a, b in itertools.pairwise(gradients)]
        assert [row["train/gradient_cosine"] for row in run.logged[1:]] == pytest.approx(cosines, abs=1e-5)
        kept = [float(step.norm() / g.norm()) for step, g in zip(steps[1:], gradients[1:], strict=True)]
        assert [row["train/gradient_kept"] for row in run.logged[1:]] == pytest.approx(kept, abs=1e-5)
        assert min(kept) < 0.99
        assert "train/gradient_cosine" not in run.logged[0]
        assert run.logged[-1]["train/grad_norm"] == pytest.approx(float(steps[-1].norm()), rel=1e-4)

    def test_the_callback_does_not_count_the_cosine_twice(self):
        runs = [two_step_rules.run(rule=GradientProjection(), callbacks=own) for own in ([], [GradientAlignment()])]
        alone, watched = ([row["train/gradient_cosine"] for row in run.logged[1:]] for run in runs)
        assert watched == alone
        assert max(map(abs, alone)) > 0.01

    def test_skipped_steps_change_neither_weights_nor_moments(self):
        run = build(rollouts=3, v=6, i=2, learning_rate=0.3, optimizer=torch.optim.AdamW)
        run.module.step_rule = GradientProjection(0.0, skip_above=1e-9)
        run.trainer.fit(run.module, datamodule=run.data)
        skipped = [row["train/gradient_kept"] == 0 for row in run.logged[1:]]
        assert skipped == [row["train/gradient_cosine"] > 1e-9 for row in run.logged[1:]]
        assert any(skipped)
        state = next(iter(run.trainer.optimizers[0].state.values()))
        assert int(state["step"]) == 6 - sum(skipped)

    def test_steps_without_a_gradient_keep_the_previous_one(self):
        rule, weight = GradientProjection(0.0), torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.AdamW([weight])
        rule.attach(optimizer)
        metrics = []
        for gradient in ([1.0, 0.0], None, [math.inf, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]):
            rule.start()
            weight.grad = None if gradient is None else torch.tensor(gradient)
            metrics.append(rule.apply(optimizer, lambda products: products))
            if gradient and math.isfinite(gradient[0]):
                optimizer.step()
            rule.undo(optimizer)
            if gradient == [0.0, 0.0]:  # a zero is a gradient too
                assert not optimizer.state[weight]["previous_gradient"].any()
        assert metrics[:5] == [{}] * 5
        assert metrics[5] == pytest.approx({"train/gradient_cosine": 1.0, "train/gradient_kept": 0.0}, abs=1e-7)

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_resumed_runs_are_exact(self, optimizer, tmp_path):
        def train(ckpt_path=None):
            callbacks = [ExactResume()]
            if ckpt_path is None:
                callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
            trainer = {"accumulate_grad_batches": 2, "enable_checkpointing": ckpt_path is None}
            run = build(
                v=6, i=2, rollouts=3, learning_rate=0.1, optimizer=optimizer, callbacks=callbacks, trainer=trainer
            )
            run.module.step_rule = GradientProjection(0.0)
            run.trainer.fit(run.module, datamodule=run.data, ckpt_path=ckpt_path)
            return run

        straight = train()
        for step in (1, 3):
            resumed = train(tmp_path / f"step={step}.ckpt")
            assert largest_difference(resumed.weights, straight.weights) == 0
            assert resumed.logged[0]["train/gradient_cosine"] == straight.logged[step]["train/gradient_cosine"]
        assert min(row["train/gradient_kept"] for row in straight.logged[1:]) < 0.99

    def test_bad_settings(self):
        for limit in (-0.1, 1.0):
            with pytest.raises(ValueError, match=f"limit is {limit}; it must be at least 0 and below 1"):
                GradientProjection(limit)
        with pytest.raises(ValueError, match=r"skip_above is 0.1; it must be above 0.2 and at most 1"):
            GradientProjection(0.2, skip_above=0.1)
        with pytest.raises(ValueError, match=r"has 2 rules \(EffectiveSampleSize, GradientProjection\)"):
            GRPOModule(tiny_policy(), step_rule=[EffectiveSampleSize(), GradientProjection()])


def kept_ratios(pieces=1, **data):
    """Return the log-ratios that an advantage sees in each of two rollouts sampled from the same weights."""
    seen = []

    class Kept(ComposedAdvantage):
        needs_log_ratios = True

        def __call__(self, scores):
            seen.append(scores.log_ratios)
            return super().__call__(scores)

    fit(rollouts=2, v=2, data={"advantage": Kept(), **data}, trainer={"accumulate_grad_batches": pieces})
    return seen


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
        seen = kept_ratios()
        assert seen[0].abs().max() < 1e-4  # the policy is still the one that sampled
        assert seen[1].abs().max() > 1e-3
        assert torch.allclose(seen[1], kept_ratios(pieces=4)[1], atol=1e-5)

    def test_completions_that_are_in_no_loss_have_ratios(self):
        """Those of rollout 1 are older than max_lag, and still compared with their siblings."""
        assert torch.equal(kept_ratios(max_lag=0)[1], kept_ratios()[1])

    def test_wrapped_advantages_pass_the_need_on(self):
        assert SignedZeroVariance(LeastVariance()).needs_log_ratios

    def test_recordings_without_log_probabilities(self, monkeypatch):
        run = build(rollouts=1, data={"advantage": LeastVariance()})
        nan = torch.tensor(math.nan)
        monkeypatch.setattr(type(run.module), "policy_logprobs", lambda self, batch: nan * batch.behaviour_logprobs)
        with pytest.raises(ValueError, match="LeastVariance compares the policy with the one that sampled, but"):
            run.trainer.fit(run.module, datamodule=run.data)
