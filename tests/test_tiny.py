"""Check that configs/tiny.yaml learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lgrpo.report import read_series


def test_tiny_learns(tmp_path):
    """Run the command as a user does, in its own process."""
    config = Path(__file__).parent.parent / "configs" / "tiny.yaml"
    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", f"--config={config}", f"--run={tmp_path / 'run'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    series = read_series(tmp_path / "run")
    scores = [score for _, score in series["val/pass@1"]]
    assert 0.2 <= scores[0] <= 0.5
    assert scores[-1] >= 0.75
    assert {lag for _, lag in series["train/lag"]} == set(range(10))
