"""Check that a loss that looks at a whole optimizer step does not depend on how the step is split."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lgrpo import ZeroVarianceMask
from lgrpo.functional import threshold_of_smallest
from lgrpo.losses import (
    ComposedLoss,
    CovariancePenalty,
    Importance,
    MaxTokenLag,
    MinClip,
    NoGate,
    PolicyLogprobs,
    SecondMoment,
)
from tests.helpers import build, fit, largest_difference
from tests.losses.test_parts import numbers
from tests.processes import two_surveys


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.slow("trains three times")
def test_number_of_micro_batches_does_not_change_m2po(pieces):
    whole, split = (two_surveys.run(accumulate_grad_batches=number) for number in (1, pieces))
    assert len(whole.recorder.gradients) == len(split.recorder.gradients) == 6
    for one, other in zip(whole.recorder.gradients, split.recorder.gradients, strict=True):
        assert largest_difference(one, other) < 1e-6
    dropped = [row["train/clip_fraction_low"] + row["train/clip_fraction_high"] for row in whole.logged]
    assert max(dropped) > 0.02  # the budget acts


@pytest.mark.slow("two processes")
def test_number_of_ranks_does_not_change_m2po(tmp_path):
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-m", "tests.processes.two_surveys", str(out)], check=True, timeout=300)
    two, one = torch.load(out), two_surveys.run(accumulate_grad_batches=2)
    assert largest_difference(two, one.weights) < 1e-6
    assert largest_difference(build().weights, one.weights) > 1e-3


def test_survey_holds_for_its_step_only():
    batch, policy, _, _ = numbers(rows=16, seed=1)
    loss = ComposedLoss(gate=SecondMoment(), weight=Importance())
    before = loss(batch, PolicyLogprobs(policy=policy, entropy=policy, step=3)).loss
    loss.survey([(batch, PolicyLogprobs(policy=batch.behaviour_logprobs, entropy=policy, step=3))], lambda v: v)
    during = loss(batch, PolicyLogprobs(policy=policy, entropy=policy, step=3)).loss  # nothing moved: nothing drops
    after = loss(batch, PolicyLogprobs(policy=policy, entropy=policy, step=4)).loss
    assert float(before) == float(after) != float(during)


def test_a_nested_gate_surveys_too():
    batch, policy, _, _ = numbers(rows=16, seed=1)
    plain, nested = (ComposedLoss(gate=gate) for gate in (SecondMoment(), MaxTokenLag(SecondMoment(), limit=99)))
    assert nested.surveys_step
    assert not ComposedLoss(gate=MaxTokenLag(MinClip())).surveys_step
    logprobs = PolicyLogprobs(policy=policy, entropy=policy)
    for loss in (plain, nested):
        loss.survey([(batch, logprobs)], lambda values: torch.cat([values, values + 9]))
    assert float(plain(batch, logprobs).loss) == float(nested(batch, logprobs).loss)


def test_a_step_without_signal_is_not_surveyed():
    loss = ComposedLoss(gate=SecondMoment(), weight=Importance())
    runs = [fit(rollouts=2, loss=loss, callbacks=callbacks) for callbacks in ([], [ZeroVarianceMask(tolerance=9.0)])]
    assert [run.module.loss.gate._surveyed for run in runs] == [(1, 1), None]


def test_the_smallest_of_equal_values():
    """At least as many as are asked for are below the threshold, also in float32."""
    for values in ([-2.0, -2.0, 0.0], [0.0, 0.0, 1.0], [3.0, 1.0, 2.0]):
        tensor = torch.tensor(values)
        assert int((tensor < threshold_of_smallest(tensor, 1)).sum()) == values.count(min(values))


def test_a_penalty_on_the_ratio_needs_the_behaviour_policy():
    assert ComposedLoss(gate=CovariancePenalty(NoGate())).needs_behaviour
