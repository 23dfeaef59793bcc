"""The PNG of a run's curves."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import pytest

from lgrpo.report import draw_curves


@pytest.fixture
def backend():
    """Matplotlib backend other than the one that draws the PNG, as in a notebook."""
    before = matplotlib.get_backend()
    plt.switch_backend("svg")
    yield "svg"
    plt.switch_backend(before)


def test_draw_curves_leaves_the_backend_unchanged(backend, tmp_path):
    draw_curves({"rollout/reward": [(0, 0.1), (1, 0.4)], "train/lag": [(0, 0.0), (1, 1.0)]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.get_backend() == backend
    assert not plt.get_fignums()
