"""Runs of ``lgrpo fit`` one after the other in one process, which share its engine and its compiled code.

The other end of the pipe is ``lgrpo.sweep.workers``. Every run starts as in a new process: what a run changes outside
its own objects is restored after it (``restored``), and its memory is released (``release``). What stays is the engine,
if the next run has equal settings of it (``EngineKeeper``), and what torch has compiled, which depends on the
architecture and not on the weights.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from lgrpo.commands import INTERRUPTED, fit
from lgrpo.commands.configs import with_config_paths
from lgrpo.commands.engine_keeper import EngineKeeper
from lgrpo.commands.user_errors import is_user_error

ENGINE_VARIABLES = ("VLLM_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "NCCL_")
"""Prefixes of environment variables that a run does not restore, because a kept engine may read them again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def serve(descriptor: int) -> None:
    """Run what comes through a pipe until it is closed: ``(arguments of lgrpo fit, log file)``; answer with its status.

    After a run that fails or is interrupted the process exits, so that the next one starts in a new process.
    """
    connection, keeper = Connection(descriptor), EngineKeeper()
    try:
        while True:
            try:
                arguments, log = connection.recv()
            except EOFError:
                break
            redirect_output(log)
            status = run_fit(arguments, keeper)
            connection.send(status)
            if status:
                raise SystemExit(status)
    except KeyboardInterrupt:  # between two runs
        raise SystemExit(INTERRUPTED) from None
    finally:
        keeper.close()


def run_fit(arguments: list[str], keeper: EngineKeeper) -> int:
    """Run ``lgrpo fit`` with these arguments and return the exit status it would have as a process."""
    command = with_config_paths(["fit", *arguments])
    with restored():
        sys.argv = [sys.argv[0], *command]
        # in a copy, because jsonargparse leaves objects of the run in the current context
        status = contextvars.copy_context().run(exit_status, lambda: fit.main(command, keeper))
        finish_loggers()
    release()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def exit_status(run: Callable[[], None]) -> int:
    """Call a function and return the exit status of a process that does only that; print its error."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if is_user_error(error) and not os.environ.get("LGRPO_TRACEBACK"):
            print(f"lgrpo: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
    return 0


def redirect_output(log: str) -> None:
    """Append all output of this process, also that of native code and of later children, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore after a run what it may have changed in the process. Random states are set by the next run's seed."""
    environment, arguments, paths = dict(os.environ), sys.argv, list(sys.path)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with warnings.catch_warnings(), _torch_settings():  # the first also shows again what has been shown once
        try:
            yield
        finally:
            sys.argv, sys.path[:] = arguments, paths
            for name in [name for name in os.environ if not name.startswith(ENGINE_VARIABLES)]:
                del os.environ[name]
            os.environ.update(environment)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _torch_settings() -> Iterator[None]:
    dtype, threads, anomaly = torch.get_default_dtype(), torch.get_num_threads(), torch.is_anomaly_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, matmul = torch.backends.cudnn.benchmark, None
    with contextlib.suppress(RuntimeError):  # torch cannot name a precision that was set through its newer interface
        matmul = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)


def finish_loggers() -> None:
    """End the run of W&B, which would otherwise continue until the process ends and receive the next run's metrics."""
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        wandb.finish()


def release() -> None:
    """Release the memory of the run's objects."""
    gc.unfreeze()  # vLLM in this process freezes all objects, also those of the run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
