"""Cosine of the gradients of consecutive steps."""

from __future__ import annotations

import itertools

import pytest
import torch

from lgrpo import ZeroVarianceMask
from lgrpo.callbacks import FiniteSteps, GradientAlignment
from tests.helpers import fit


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("pieces", [1, 3])
def test_cosine_equals_that_of_the_recorded_gradients(pieces):
    trainer = {"accumulate_grad_batches": pieces, "gradient_clip_val": 0.01}
    run = fit(rollouts=5, v=5, learning_rate=0.3, callbacks=[GradientAlignment()], trainer=trainer)
    gradients = [flat(own) for own in run.recorder.gradients]
    expected = [float(torch.cosine_similarity(a, b, 0)) for a, b in itertools.pairwise(gradients)]
    assert "train/gradient_cosine" not in run.logged[0]
    assert [row["train/gradient_cosine"] for row in run.logged[1:]] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 0.05


def test_it_does_not_change_the_run():
    plain, watched = (fit(rollouts=3, v=3, callbacks=callbacks) for callbacks in ([], [GradientAlignment()]))
    assert all(torch.equal(plain.weights[name], p) for name, p in watched.weights.items())


def test_skipped_steps_have_no_cosine():
    run = fit(rollouts=3, callbacks=[GradientAlignment(), ZeroVarianceMask(tolerance=9.0), FiniteSteps()])
    assert all("train/gradient_cosine" not in row for row in run.logged)
