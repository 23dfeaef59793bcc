"""Processes an engine starts: they end with it, whatever ends it, and their logs tell what they died of."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_parent_thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-parent")
"""A child is told of the end of the thread that started it, not of the process: this one lives as long as that."""


def start_process(command: list[str], **options: Any) -> subprocess.Popen:
    """In a session of its own, so that Ctrl-C is for the trainer alone."""
    starting = _parent_thread.submit(
        lambda: subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent, **options)
    )
    try:
        return starting.result()
    except BaseException:  # an interrupt: whoever asked will never know of it
        starting.add_done_callback(_kill_started)
        raise


def _kill_started(started: Future[subprocess.Popen]) -> None:
    if started.exception() is None:
        kill_process(started.result())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def kill_process(process: subprocess.Popen) -> None:
    """Ends it, and what it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def telling_lines(log: Path | None) -> str:
    """The lines of a log that say what went wrong, to be put behind an error."""
    if log is None or not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "WARNING" not in line]
    of_memory = [line for line in errors[:-3] if "memory" in line.lower()]  # what it dies of, it says first
    telling = of_memory[-1:] + errors[-3:] or lines[-5:]
    return ". Its log says:\n  " + "\n  ".join(line.strip()[:300] for line in telling) if telling else ""


def visible_devices() -> list[str]:
    """The GPUs this process sees, as CUDA names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
