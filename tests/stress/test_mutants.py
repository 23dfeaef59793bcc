"""The mutation script: which changes it makes, how it tests them, and its list of accepted survivors."""

from __future__ import annotations

import json
import sys

import pytest

from tests.stress import mutants

pytestmark = pytest.mark.slow("starts the tests of mutants")

SOURCE = '''"""Docstring 1."""

LIMIT: int = 3


def f(x, scale=2.0):
    """Docstring 2."""
    if x < LIMIT and not x == 0:
        print("called")
        return -x
    if x is None:
        raise ValueError(f"x is {x + 1}")
    x += 1
    return x * scale if x else None
'''


def test_every_kind_of_change():
    found = mutants.mutants("f.py", SOURCE.encode())
    assert sorted(mutant.change for mutant in found) == sorted(
        [
            "3 → (4)",
            "2.0 → (3.0)",
            "x < LIMIT and not x == 0 → (not (x < LIMIT and (not x == 0)))",
            "x < LIMIT and not x == 0 → (x < LIMIT or not x == 0)",
            "x < LIMIT → (x <= LIMIT)",
            "not x == 0 → (x == 0)",
            "x == 0 → (x != 0)",
            "0 → (1)",
            'print("called") → pass',
            "return -x → return None",
            "-x → (x)",
            "x is None → (x is not None)",
            "x += 1 → x -= 1",
            "1 → (2)",
            "return x * scale if x else None → return None",
            "x → (not x)",
            "x * scale → (x / scale)",
        ]
    )
    for mutant in found:
        changed = mutant.applied(SOURCE.encode()).decode()
        compile(changed, "f.py", "exec")
        assert changed != SOURCE
        assert mutant.line in SOURCE.splitlines()[mutant.number - 1]


def test_accepted_survivors_exist_and_have_reasons():
    """An entry whose line has changed must be read again."""
    assert not mutants.gone(mutants.all_mutants(mutants.ROOT))
    assert all(len(reason.split()) > 3 for reason in mutants.accepted().values())


def test_guards_name_files():
    paths = {*mutants.GUARDS, *mutants.paths_of([call for calls in mutants.GUARDS.values() for call in calls])}
    assert not [path for path in paths if not (mutants.ROOT / path).exists()]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a package of one function in place of the repository, whose test does not notice every change."""
    root = tmp_path / "repository"
    (root / "lgrpo").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "lgrpo" / "__init__.py").touch()
    (root / "lgrpo" / "double.py").write_text("def double(x):\n    return x + x\n\n\ndef hang():\n    return bool(0)\n")
    (root / "tests" / "test_double.py").write_text(
        "from lgrpo.double import double, hang\n\n\ndef test_double():\n    while hang():\n        pass\n"
        "    assert double(0) == 0\n"
    )
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setattr(mutants, "copied", lambda folder: root)
    monkeypatch.setattr(mutants, "GUARDS", {"lgrpo/": ("tests/test_double.py",)})
    monkeypatch.setattr(mutants, "ACCEPTED", root / "mutants.yaml")
    monkeypatch.setattr(mutants, "PRELOADED", ())
    (root / "mutants.yaml").write_text("[]")
    return root


def run(monkeypatch, capsys, root, *options):
    """Run the command and return its exit code, its output and its rows."""
    monkeypatch.setattr(sys, "argv", ["mutants", "--out", str(root / "rows.jsonl"), "--limit", "5", *options])
    code = 0
    try:
        mutants.main()
    except SystemExit as error:
        code = error.code
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    return code, capsys.readouterr().out, rows


def test_survivors_fail_the_command_until_they_are_accepted_or_tested(repository, monkeypatch, capsys):
    source = (repository / "lgrpo" / "double.py").read_bytes()
    code, printed, rows = run(monkeypatch, capsys, repository)
    assert "add a test for each survivor" in str(code)
    assert "survived: lgrpo/double.py:2: x + x → (x - x)" in printed
    assert {(row["change"], row["result"]) for row in rows} == {
        ("x + x → (x - x)", "survived"),
        ("return x + x → return None", "killed"),
        ("return bool(0) → return None", "survived"),
        ("0 → (1)", "killed"),
    }
    assert [row["test"] for row in rows if row["change"] == "0 → (1)"] == ["timeout"]
    assert (repository / "lgrpo" / "double.py").read_bytes() == source

    reason = "test_double cannot distinguish None from False"
    entry = {"file": "lgrpo/double.py", "line": "return bool(0)", "changes": ["return bool(0) → return None"]}
    (repository / "mutants.yaml").write_text(json.dumps([entry | {"reason": reason}]))
    test = repository / "tests" / "test_double.py"
    test.write_text(test.read_text().replace("double(0) == 0", "double(2) == 4"))
    code, printed, again = run(monkeypatch, capsys, repository)
    assert code == 0
    assert "1 accepted, 3 killed" in printed
    assert len(again) == len(rows) + 2, "only survivors are tested again after a change of the tests"

    (repository / "lgrpo" / "double.py").write_text("def double(x):\n    return 2 * x\n")
    code, _, _ = run(monkeypatch, capsys, repository)
    assert "lists mutants that no longer exist" in str(code)


def test_a_test_that_fails_anyway_kills_nothing(repository, monkeypatch, capsys):
    test = repository / "tests" / "test_double.py"
    test.write_text("def test_double():\n    assert False\n")
    (repository / "rows.jsonl").touch()
    code, _, rows = run(monkeypatch, capsys, repository, "--max", "1")
    assert "tests/test_double.py::test_double fails without a change" in code
    assert rows == []
