"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example(tmp_path, monkeypatch, capsys):
    """The very lines, on fewer rollouts."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "trainer.fit" in block]
    monkeypatch.chdir(tmp_path)
    shorter = code.replace("num_rollouts=100", "num_rollouts=3").replace("max_epochs=8", "max_epochs=1")
    assert shorter != code
    exec(compile(shorter, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("tensor(").removesuffix(")")) > 0.2
    assert not (tmp_path / "completions.jsonl").exists()


@pytest.mark.parametrize("page", sorted((ROOT / "tutorials" / "pages").glob("*.md")), ids=lambda path: path.name)
def test_every_page_is_linked(page):
    assert f"tutorials/pages/{page.name}" in README


@pytest.mark.parametrize(
    "source", [ROOT / "README.md", *sorted((ROOT / "tutorials" / "pages").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(source):
    for target in re.findall(r"\]\(([^)#]+)\)", source.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (source.parent / target).exists(), target


def test_the_tree_names_every_room():
    rooms = {path.name for path in (ROOT / "lgrpo").iterdir() if not path.name.startswith(("_", "py.typed"))}
    shown = set(re.findall(r"[├└]── ([\w.]+?)/?\s", README))
    assert rooms == shown
