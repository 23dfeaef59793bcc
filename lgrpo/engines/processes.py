"""Processes started by an engine, which always end with the trainer, and the errors in their logs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MPS_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
"""Variable with the priority of a process on a GPU under NVIDIA's MPS: 0 is normal, 1 below. Unused without MPS."""
TRAINER_PRIORITY, ENGINE_PRIORITY = "1", "0"
"""Many small kernels of an engine would each wait for a large one of the trainer; so an engine's kernels go first."""

_parent_thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-parent")
"""Thread that starts all processes: the kernel signals a process when its parent thread ends, so this one stays."""


END_WITH_TRAINER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != {trainer}:  # it ended before that
    os.kill(os.getpid(), signal.SIGTERM)
"""
"""First lines of a program that receives SIGTERM when the trainer, the process with this id, ends.

They are not a ``preexec_fn``: Python would then fork this process, and the handlers that libraries register for a fork
may crash in a process with many threads.
"""


def start_process(command: list[str], **options: Any) -> subprocess.Popen:
    """Start a process in a new session, so that Ctrl-C reaches only the trainer."""
    starting = _parent_thread.submit(lambda: subprocess.Popen(command, start_new_session=True, **options))
    try:
        return starting.result()
    except BaseException:  # an interrupt: the caller will not get the process to kill it
        starting.add_done_callback(_kill_started)
        raise


def _kill_started(started: Future[subprocess.Popen]) -> None:
    if started.exception() is None:
        kill_process(started.result())


def kill_process(process: subprocess.Popen) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_excerpt(log: Path | None) -> str:
    """Return the lines of a log that show the error, to append to a message."""
    if log is None or not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "WARNING" not in line]
    memory = [line for line in errors[:-3] if "memory" in line.lower()]  # the cause comes before its consequences
    excerpt = memory[-1:] + errors[-3:] or lines[-5:]
    return ". Its log says:\n  " + "\n  ".join(line.strip()[:300] for line in excerpt) if excerpt else ""


def has_other_ranks() -> bool:
    """Return whether this is one of several training processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def visible_devices() -> list[str]:
    """Return CUDA's names of the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
