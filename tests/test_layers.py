"""Who may import whom. The picture in the README stays true because this holds it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lgrpo

ROOT = Path(lgrpo.__file__).parent
LAYERS = [
    {"types"},
    {"functional", "settings", "arguments"},
    {"metrics", "rewards"},
    {"advantages", "losses", "policy", "engines", "hooks", "tasks", "checkpoints", "loggers"},
    {"module", "data", "callbacks"},
    {"report", "plan", "simulation", "sweep", "export", "score", "run_folder"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
STRANGERS = [{"module", "data", "callbacks"}]  # these meet in the Trainer, and import each other never


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level rooms and outside packages a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {".".join(name.split(".")[:2]) if name.startswith("lgrpo") else name.split(".")[0] for name in found}


FILES = [path for path in ROOT.rglob("*.py") if room_of(path) != "__init__"]


def test_every_room_has_a_layer():
    assert {room_of(path) for path in FILES} == set(LEVEL)


def test_rooms_import_only_what_lies_below():
    wrong = []
    for path in FILES:
        room = room_of(path)
        for name in imports(path):
            if not name.startswith("lgrpo."):
                continue
            other = name.split(".")[1]
            if other == room:
                continue
            strangers = any({room, other} <= group for group in STRANGERS)
            if other not in LEVEL or LEVEL[other] > LEVEL[room] or strangers:
                wrong.append(f"{path.relative_to(ROOT)} imports lgrpo.{other}")
    assert not wrong


def test_vllm_is_imported_in_engines_alone():
    assert [path for path in FILES if "vllm" in imports(path) and room_of(path) != "engines"] == []


def test_the_package_works_without_vllm():
    block = "import sys; sys.modules['vllm'] = None; import lgrpo, lgrpo.cli; print(lgrpo.__version__)"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == lgrpo.__version__
