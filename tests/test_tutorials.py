"""Every notebook runs without an error, and its stored outputs are those of its code."""

import re

import nbformat
import pytest

from tests.notebooks import FOLDER, NOTEBOOKS, digest, execute_all

ROOT = FOLDER.parent
EXPECTED = {101, 102, 103, 201, 202, 203, 204, 205, 206, 207, 301, 302, 303, 304}


@pytest.fixture(scope="module")
def executed():
    return execute_all(NOTEBOOKS)


def test_all_notebooks_exist_and_are_linked():
    assert {int(path.name[:3]) for path in NOTEBOOKS} == EXPECTED
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        assert f"tutorials/{path.name}" in readme


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow("runs every notebook")
def test_notebook_runs(executed, path):
    notebook, _, error = executed[path]
    assert error is None, error
    kept = nbformat.read(path, as_version=4)
    plots = [sum("image/png" in str(cell.get("outputs", "")) for cell in one.cells) for one in (kept, notebook)]
    assert plots[0] == plots[1] > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_current(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["lgrpo"]["code"] == digest(notebook), "run: make notebooks"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"], "a tutorial shows no warnings"
    assert not re.search(r"/(root|home|work|tmp)/", str(outputs)), "a path of the machine that produced them"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_structure(path):
    """Each starts with what you will see and ends with something to try; its links exist."""
    notebook = nbformat.read(path, as_version=4)
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert text[0].startswith(f"# {path.name[:3]}: ")
    assert "**What you will see.**" in text[0]
    assert notebook.cells[-1].cell_type == "markdown"
    assert "## Try" in text[-1]
    for link in re.findall(r"\]\(([^)#]+)\)", "\n".join(text)):
        assert link.startswith("https://") or (FOLDER / link).exists(), link
