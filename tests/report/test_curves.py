"""The picture of a run."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import pytest

from lgrpo.report import draw_curves


@pytest.fixture
def backend():
    """Some backend that is not the one pictures are drawn with, as a notebook has."""
    before = matplotlib.get_backend()
    plt.switch_backend("svg")
    yield "svg"
    plt.switch_backend(before)


def test_a_notebook_goes_on_showing_its_figures(backend, tmp_path):
    draw_curves({"rollout/reward": [(0, 0.1), (1, 0.4)], "train/lag": [(0, 0.0), (1, 1.0)]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.get_backend() == backend
    assert not plt.get_fignums()
