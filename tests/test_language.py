"""Keep private words out of names, docstrings, messages, pages and help texts (CONTRIBUTING.md, section *Language*).

``python -m tests.test_language [PATH …]`` lists every line to rewrite.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTEAD = {
    r"at hand": "current",
    r"mend(s|ed|ing)?": "fix, repair",
    r"parcels?|trays?": "message, chunk, buffer",
    r"nurser(y|ies)": "fork server",
    r"fleets?": "server group",
    r"bur(y|ies|ied)|obituar(y|ies)|vouch(es|ed)?": "kill, exit message, verify",
    r"ails?|riddles?|dull|strangers?": "what is wrong; plain words; zero-variance; unknown",
    r"wants": "requires, needs",
    r"figures": "metrics, numbers",
    r"whoever|of one's own|who fails": "the process, your own, the worker that fails",
    r"spread over (the )?(processes|ranks|workers|GPUs)": "sharded over",
    r"brought back|bring(s|ing)? back": "restart",
    r"knobs?|rooms?": "setting; package, module or memory",
    r"told (so|of|whether|which)|tells? of": "reported, describes",
    r"goes wrong|go wrong|went wrong": "fails",
    r"what is (there|in it|meant)": "name the thing",
    r"in other hands|for nobody|nobody's": "name the owner",
}
"""Words that a reader of PyTorch's documentation would stumble over, and what to write instead."""
PATTERNS = {re.compile(rf"\b({words})\b", re.IGNORECASE): instead for words, instead in INSTEAD.items()}
PATTERNS[re.compile(r'"""(Of|What|Who|Whose|Told)\b')] = "a docstring begins with the thing or an imperative"
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".ipynb", ".js", ".css", ".html", ""}
LEFT_OUT = (
    "tests/test_language.py",
    "tests/benchmarks/results/",
    "tests/parity/verl/",
    "tests/versions.txt",
    "LICENSE",
)
LEFT_OUT += ("lgrpo/report/assets/uPlot",)
LISTS = {"CONTRIBUTING.md": '| "', "CHANGELOG.md": "| `"}
"""Beginning of the table rows that list these words: the words to avoid, and names before their renaming."""


def found_in(path: Path) -> list[str]:
    """Lines of a file with a word to avoid."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > 2000 or (path.name in LISTS and line.startswith(LISTS[path.name])):  # a picture
            continue
        lines += [
            f"{path.relative_to(ROOT)}:{number}: {match[0]!r} ({instead}): {line.strip()[:120]}"
            for pattern, instead in PATTERNS.items()
            if (match := pattern.search(line))
        ]
    return lines


def files(*paths: str) -> list[Path]:
    """Text files of the repository, those below ``paths`` or all."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\n") if name and not name.startswith(LEFT_OUT)]
    return [ROOT / name for name in names if (ROOT / name).suffix in SUFFIXES and (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", ["lgrpo", "configs", "tests", "tutorials", "top"])
def test_no_private_words(folder):
    paths = [path for path in files() if path.parent == ROOT] if folder == "top" else files(folder)
    assert paths
    lines = [line for path in paths for line in found_in(path)]
    assert not lines, "\n".join(lines)


def test_contributing_lists_the_words():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith('| "')]
    for words, instead in INSTEAD.items():
        assert any(re.search(rf'"({words})"', row) and instead.split(",")[0] in row for row in rows), words


if __name__ == "__main__":
    found = [line for path in files(*sys.argv[1:]) for line in found_in(path)]
    print("\n".join(found) or "nothing found")
