"""Execute the tutorials: ``python -m tests.notebooks [--write] [NAME …]``.

A notebook runs in the folder ``tutorials/``, in a new kernel of this environment. With ``--write`` (``make notebooks``)
the outputs are stored in the file, with a digest of the code, so that a test finds outdated outputs.
"""

import argparse
import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parent.parent / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))
NUM_PARALLEL = 2
LIMIT = 300  # time limit of a cell in seconds


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return a digest of the code cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(path: Path) -> tuple[nbformat.NotebookNode, float, str | None]:
    """Return the notebook with new outputs, the seconds it took, and its error if it failed."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("execution", None)
    start = time.monotonic()
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    )
    error = None
    try:
        client.execute()
    except CellExecutionError as failure:
        error = str(failure)
    notebook.metadata["lgrpo"] = {"code": digest(notebook)}
    return notebook, time.monotonic() - start, error


def execute_all(paths: list[Path]) -> dict[Path, tuple[nbformat.NotebookNode, float, str | None]]:
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        return dict(zip(paths, pool.map(execute, paths), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description="Execute the tutorials.")
    parser.add_argument("names", nargs="*", help="prefixes of names, such as 101 (default: all)")
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    args = parser.parse_args()
    paths = [path for path in NOTEBOOKS if not args.names or path.name.startswith(tuple(args.names))]
    if not paths:
        parser.error(f"no notebook starts with {' or '.join(args.names)}: {', '.join(p.stem for p in NOTEBOOKS)}")
    failed = 0
    for path, (notebook, seconds, error) in execute_all(paths).items():
        print(f"{path.stem}: {seconds:.0f} s" + (f"\n{error}" if error else ""), flush=True)
        failed += error is not None
        if args.write and error is None:
            nbformat.write(notebook, path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
