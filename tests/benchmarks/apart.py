"""A part of a benchmark in a process of its own, so that its failure stops no other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def measure_apart(
    module: str, part: str, options: argparse.Namespace, limit: float, threads: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """What ``python -m MODULE --inside PART OPTIONS`` wrote to ``options.figures``, None if nothing; and its failure.

    Args:
        module: Of the benchmark.
        part: What of it is to be measured.
        options: Its own, and where the figures go.
        limit: Seconds it may take.
        threads: Of torch; by default a thread for each core.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    failure: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        figures, given = Path(name) / "figures.json", Path(name) / "options.json"
        given.write_text(json.dumps(vars(options) | {"figures": str(figures)}, default=str))
        command = [sys.executable, "-m", module, "--inside", part, str(given)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
                failure = {"error": [line[:300] for line in lines[-3:]] or f"it ended with {done.returncode}"}
        except subprocess.TimeoutExpired:
            failure = {"error": f"not finished after {limit:g} s"}
        return json.loads(figures.read_text()) if figures.exists() else None, failure


def inside() -> tuple[str, argparse.Namespace] | None:
    """In such a process, the part to be measured and the options; elsewhere None."""
    if sys.argv[1:2] != ["--inside"]:
        return None
    part, given = sys.argv[2:]
    return part, argparse.Namespace(**json.loads(Path(given).read_text()))
