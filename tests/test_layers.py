"""Check which package may import which (CONTRIBUTING.md, section *Layout*)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lgrpo

ROOT = Path(lgrpo.__file__).parent
LAYERS = [
    {"types", "contexts", "kept", "partition", "weights", "checks"},
    {"functional", "run"},
    {"metrics", "rewards", "environments"},
    {"advantages", "losses", "teachers", "policy", "engines", "hooks", "tasks"},
    {"module", "data", "callbacks"},
    {"recordings"},
    {"report"},
    {"sweep"},
    {"commands"},
    {"cli"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
SEPARATE = [{"module", "data", "callbacks"}]  # they meet in the Trainer and never import each other


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return the subpackages of lgrpo and the other packages that a file imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {".".join(name.split(".")[:2]) if name.startswith("lgrpo") else name.split(".")[0] for name in found}


FILES = [path for path in ROOT.rglob("*.py") if package_of(path) != "__init__"]


def test_every_package_has_a_layer():
    assert {package_of(path) for path in FILES} == set(LEVEL)


def test_packages_import_only_lower_layers():
    wrong = []
    for path in FILES:
        package = package_of(path)
        for name in imports(path):
            if not name.startswith("lgrpo."):
                continue
            other = name.split(".")[1]
            if other == package:
                continue
            is_separate = any({package, other} <= group for group in SEPARATE)
            if other not in LEVEL or LEVEL[other] > LEVEL[package] or is_separate:
                wrong.append(f"{path.relative_to(ROOT)} imports lgrpo.{other}")
    assert not wrong


def test_vllm_is_imported_in_engines_alone():
    assert [path for path in FILES if "vllm" in imports(path) and package_of(path) != "engines"] == []


def test_the_package_works_without_vllm():
    block = "import sys; sys.modules['vllm'] = None; import lgrpo, lgrpo.cli; print(lgrpo.__version__)"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == lgrpo.__version__


def test_engines_do_not_import_lightning():
    """Processes of engines need none of it, and start earlier."""
    check = "import lgrpo.engines, sys; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
