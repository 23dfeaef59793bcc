"""Check README, CONTRIBUTING and the pages against the code: examples, links, file names, the package tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = [ROOT / "README.md", *sorted((ROOT / "tutorials" / "pages").glob("*.md"))]


def test_the_python_example(tmp_path, monkeypatch, capsys):
    """Run the example of the README, with fewer rollouts."""
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


@pytest.mark.parametrize("source", [ROOT / "CONTRIBUTING.md", *SOURCES], ids=lambda path: path.name)
def test_links_lead_somewhere(source):
    for target in re.findall(r"\]\(([^)#]+)\)", source.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (source.parent / target).exists(), target


def test_contributing_shows_every_package():
    packages = {path.name for path in (ROOT / "lgrpo").iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert packages == set(re.findall(r"[├└]── ([\w.]+?)/?\s", CONTRIBUTING))


@pytest.mark.parametrize("source", [ROOT / "CONTRIBUTING.md", *SOURCES], ids=lambda path: path.name)
def test_mentioned_files_exist(source):
    paths = re.findall(r"\b(?:lgrpo|tests|configs|tutorials)/[\w./-]+\.(?:py|md|yaml|js)\b", source.read_text("utf-8"))
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_the_two_paths_name_modules_that_exist():
    section = CONTRIBUTING.partition("## Two paths")[2].partition("## How to add")[0]
    modules = re.findall(r"[\w/]+\.py", section)
    assert len(modules) >= 10
    assert [module for module in modules if not (ROOT / "lgrpo" / module).exists()] == []
