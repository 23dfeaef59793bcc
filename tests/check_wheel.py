"""Install the wheel of a folder into an empty environment and use it there: ``python tests/check_wheel.py dist``.

Dependencies come from the current environment through a path file, so that only the contents of the wheel are tested.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

CHECK = """
import lgrpo, pathlib
from importlib.metadata import version
root = pathlib.Path(lgrpo.__file__).parent
assert str(root).startswith({prefix!r}), root
assert version("lgrpo") == lgrpo.__version__, version("lgrpo")
assert (root / "py.typed").exists()
from lgrpo.report.page import page_html
assert "Leon Sorokin" in page_html({{"runs": []}})  # the licence of the chart library is included
print("lgrpo", lgrpo.__version__, "from the wheel")
"""

TWO_STEPS = [
    "--run=first",
    "--data.num_rollouts=2",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--data.evaluation.num_problems=4",
]


def main() -> None:
    (wheel,) = Path(sys.argv[1]).glob("lgrpo-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-c", CHECK.format(prefix=folder)], check=True, cwd=folder)
        empty = Path(folder) / "empty"
        empty.mkdir()
        for arguments in (["configs"], ["plan", "--config", "demo"], ["fit", "--config", "demo", *TWO_STEPS]):
            subprocess.run([Path(folder) / "bin" / "lgrpo", *arguments], check=True, cwd=empty)


if __name__ == "__main__":
    main()
