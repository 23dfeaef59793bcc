"""Runs one part of a benchmark in a separate process, so that a failure does not stop the other parts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self


class IsolatedPart:
    """The process ``python -m MODULE --inside PART OPTIONS``, which writes its results to ``options.results``.

    The process starts with the object and pauses in :func:`wait_for_start` until :meth:`measure` is called. It is
    killed when the context ends.

    Args:
        module: Module of the benchmark.
        part: Name of the part to measure.
        options: Options of the benchmark; the path of the results is added.
        threads: Number of torch threads; one per core by default.
    """

    def __init__(self, module: str, part: str, options: argparse.Namespace, threads: int | None = None) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._folder = tempfile.TemporaryDirectory()
        self._results, self._options = (Path(self._folder.name) / name for name in ("results.json", "options.json"))
        self._write(vars(options) | {"results": str(self._results)})
        command, pipe = [sys.executable, "-m", module, "--inside", part, str(self._options)], subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def measure(self, limit: float, **changes: Any) -> tuple[Any, dict[str, Any]]:
        """Start the measurement; return its results (None if it wrote none) and its error after ``limit`` seconds.

        ``changes`` replace options that the process reads after its start.
        """
        failure: dict[str, Any] = {}
        self._write(json.loads(self._options.read_text()) | changes)
        try:
            _, errors = self.process.communicate("start\n", timeout=limit)
            if self.process.returncode:
                lines = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()
                failure = {"error": [line[:300] for line in lines[-3:]] or f"exit status {self.process.returncode}"}
        except subprocess.TimeoutExpired:
            self._kill()
            failure = {"error": f"not finished after {limit:g} s"}
        return json.loads(self._results.read_text()) if self._results.exists() else None, failure

    def _write(self, options: dict[str, Any]) -> None:
        self._options.write_text(json.dumps(options, default=str))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        with self.process:  # waits for the process and closes its pipes
            self.process.kill()


def measure_isolated(
    module: str, part: str, options: argparse.Namespace, limit: float, threads: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Start an :class:`IsolatedPart` and measure at once."""
    with IsolatedPart(module, part, options, threads) as process:
        return process.measure(limit)


def isolated_part() -> tuple[str, argparse.Namespace] | None:
    """Return the part to measure and the options in the process of an :class:`IsolatedPart`; elsewhere None."""
    if sys.argv[1:2] != ["--inside"]:
        return None
    part, given = sys.argv[2:]
    return part, argparse.Namespace(**json.loads(Path(given).read_text()))


def wait_for_start() -> argparse.Namespace:
    """Return the options when the measurement is to start; exit if the parent process has ended."""
    if not sys.stdin.readline():
        sys.exit("the benchmark that started this process has ended")
    return argparse.Namespace(**json.loads(Path(sys.argv[3]).read_text()))
