"""The worker processes of a pool: start, weights and requests for all of them, and end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.pool.cuda_buffers import StagedChunk, StagingBuffers, write_file
from lgrpo.engines.pool.worker_process import WorkerProcess
from lgrpo.engines.processes import ENGINE_PRIORITY, MPS_PRIORITY, visible_devices
from lgrpo.engines.recovery import EngineFailure, for_each_healthy
from lgrpo.engines.weight_files import shared_memory
from lgrpo.functional import CHUNK_BYTES, chunks
from lgrpo.weights import PolicyWeights, whole_iteration

TRAINER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
)
"""Prefixes of environment variables that define a rank of the trainer, which workers must not inherit."""
_CHUNK_BYTES = CHUNK_BYTES
"""Size of a chunk of weights in the engine's precision; no less than an engine copies at once."""
_FILE_SPACE = 4 * 2**30
"""Bytes that must be free in shared memory for files to be written there."""


class Workers:
    """The running workers of a pool, and the buffers and files through which they receive weights.

    ``start`` starts a worker, which joins ``running`` once the pool adds it. A worker that fails is removed. After
    ``close`` none is running, no files are left, and workers can be started again.
    """

    def __init__(self, engine: RolloutEngine, num_processes: int) -> None:
        self.engine = engine
        self.num_processes = num_processes
        self.running: list[WorkerProcess] = []
        self._started: list[WorkerProcess] = []
        """All workers that have not been ended, also those that do not have their weights yet."""
        self.folder: Path | None = None
        """Folder of all files, while there are workers."""
        self._buffers = StagingBuffers()

    @property
    def is_complete(self) -> bool:
        """Whether as many workers are running as there should be."""
        return len(self.running) == self.num_processes

    def start(self) -> WorkerProcess:
        """Start a worker without weights."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="lgrpo-pool-", dir=shared_memory(_FILE_SPACE)))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(TRAINER_VARIABLES)}
        environment[MPS_PRIORITY] = ENGINE_PRIORITY
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if not torch.cuda.is_available():
            environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // self.num_processes))
        else:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices()[torch.cuda.current_device()]
        worker = WorkerProcess(self.engine, Path(tempfile.mkdtemp(dir=self.folder)), environment)
        self._started.append(worker)
        return worker

    def send_weights(
        self,
        workers: Sequence[WorkerProcess],
        weights: PolicyWeights,
        manifest: WeightManifest,
        step: int,
        version: int,
        timeout: float,
    ) -> list[EngineFailure]:
        """Send weights in chunks of a quarter of a gigabyte; end the workers that fail, and return their failures.

        While the workers read one chunk, the next is made. A worker that asks for the next chunk may still copy the
        last tensors it has read (``CHUNK_BYTES``), so each chunk is kept until the worker asks again. ``manifest``
        records what is sent, and ``timeout`` is the limit of each message in seconds.
        """
        failures: dict[WorkerProcess, EngineFailure] = {}
        files: list[Path] = []
        unrecorded: dict[str, Tensor] = {}

        def send(chunk: Path | StagedChunk) -> None:
            for_each_healthy(workers, failures, lambda worker: worker.send_chunk(chunk, timeout))

        def record() -> None:
            if unrecorded:
                manifest.record(unrecorded)
                unrecorded.clear()

        def wait_until_read() -> None:
            for_each_healthy(workers, failures, lambda worker: worker.expect("next", timeout))
            for path in files[:-1]:
                path.unlink(missing_ok=True)

        request = "receive_weights", weights.config, step, version
        for_each_healthy(workers, failures, lambda worker: worker.request(*request, timeout=timeout))
        try:
            with whole_iteration(weights.tensors) as tensors:
                for number, chunk in enumerate(chunks(tensors, _CHUNK_BYTES, manifest.dtype)):
                    staged = self._stage(number, chunk, manifest, files)
                    chunk.clear()  # release the tensors before more are made
                    if number:
                        wait_until_read()
                    send(staged)
                    if isinstance(staged, StagedChunk):  # recorded while it is read, two chunks at a time
                        unrecorded |= staged.tensors
                    if number % 2:
                        record()
            record()
            wait_until_read()
            for_each_healthy(workers, failures, lambda worker: worker.send(manifest.checksums, timeout))
            for_each_healthy(workers, failures, lambda worker: worker.answer(timeout))
        finally:
            for path in files:
                path.unlink(missing_ok=True)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # releases buffers that were too small
        for worker in failures:
            self.end(worker)
        return list(failures.values())

    def _stage(
        self, number: int, chunk: dict[str, Tensor], manifest: WeightManifest, files: list[Path]
    ) -> Path | StagedChunk:
        """Copy a chunk into a buffer if it is on a GPU, otherwise into a file, which is added to ``files``."""
        if all(tensor.is_cuda for tensor in chunk.values()):
            staged = self._buffers.fill(number, chunk, manifest.dtype)
            torch.cuda.synchronize()
            return staged
        assert self.folder is not None
        files.append(self.folder / f"weights-{number}.safetensors")
        return write_file(dict(manifest.stream(chunk.items())), files[-1])

    def call_all(self, *request: Any, send_timeout: float, answer_timeout: float) -> None:
        """Send a request to every worker, and wait. A worker that fails here is replaced on its next use."""
        failures: dict[WorkerProcess, EngineFailure] = {}
        for_each_healthy(self.running, failures, lambda worker: worker.request(*request, timeout=send_timeout))
        for_each_healthy(self.running, failures, lambda worker: worker.answer(answer_timeout))

    def remove_dead(self) -> None:
        """End the workers whose process has died."""
        for worker in [worker for worker in self.running if not worker.is_alive]:
            self.end(worker)

    def end(self, worker: WorkerProcess) -> None:
        """End a worker, running or just started."""
        if not worker.close():
            self._buffers.mark_leaked()
        for workers in (self.running, self._started):
            if worker in workers:
                workers.remove(worker)

    def close(self) -> None:
        """End all workers, release the buffers, and delete all files."""
        for worker in list(self._started):
            self.end(worker)
        self._buffers.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
