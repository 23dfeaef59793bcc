"""A part of a benchmark in a process of its own, so that its failure stops no other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self


class Apart:
    """The process ``python -m MODULE --inside PART OPTIONS``, which writes its figures to ``options.figures``.

    It starts at once; what it does behind :func:`wait_for_turn` it does in :meth:`measure`. When the context ends, so
    does the process.

    Args:
        module: Of the benchmark.
        part: What of it is to be measured.
        options: Its own, and where the figures go.
        threads: Of torch; by default a thread for each core.
    """

    def __init__(self, module: str, part: str, options: argparse.Namespace, threads: int | None = None) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._folder = tempfile.TemporaryDirectory()
        self._figures, given = (Path(self._folder.name) / name for name in ("figures.json", "options.json"))
        given.write_text(json.dumps(vars(options) | {"figures": str(self._figures)}, default=str))
        command, pipe = [sys.executable, "-m", module, "--inside", part, str(given)], subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def measure(self, limit: float) -> tuple[Any, dict[str, Any]]:
        """Its figures, None if it wrote none, and its failure. It may take ``limit`` seconds from now."""
        failure: dict[str, Any] = {}
        try:
            _, errors = self.process.communicate("it is your turn\n", timeout=limit)
            if self.process.returncode:
                lines = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()
                failure = {"error": [line[:300] for line in lines[-3:]] or f"it ended with {self.process.returncode}"}
        except subprocess.TimeoutExpired:
            self._end()
            failure = {"error": f"not finished after {limit:g} s"}
        return json.loads(self._figures.read_text()) if self._figures.exists() else None, failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        with self.process:  # which waits for its end and closes its pipes
            self.process.kill()


def measure_apart(
    module: str, part: str, options: argparse.Namespace, limit: float, threads: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """What a process of :class:`Apart` measures that has its turn at once."""
    with Apart(module, part, options, threads) as process:
        return process.measure(limit)


def inside() -> tuple[str, argparse.Namespace] | None:
    """In such a process, the part to be measured and the options; elsewhere None."""
    if sys.argv[1:2] != ["--inside"]:
        return None
    part, given = sys.argv[2:]
    return part, argparse.Namespace(**json.loads(Path(given).read_text()))


def wait_for_turn() -> None:
    """In such a process, returns when it is to measure; ends it where the one that started it is gone."""
    if not sys.stdin.readline():
        sys.exit("the benchmark that started this process has ended")
