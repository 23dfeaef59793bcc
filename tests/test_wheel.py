"""Build the wheel, install it into an empty environment, and use it there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_works_in_an_empty_environment(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [sys.executable, "tests/check_wheel.py", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the wheel" in done.stdout
    assert "papers/a_gsm8k" in done.stdout, "lgrpo configs"
    assert "v = 10, i = 1" in done.stdout, "lgrpo plan --config demo"
    assert "lgrpo report first writes an HTML page of it" in done.stdout, "lgrpo fit --config demo"
