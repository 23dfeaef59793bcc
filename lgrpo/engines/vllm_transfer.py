"""How weights get into a vLLM server: as files it reads, or from memory to memory."""

from __future__ import annotations

import base64
import os
import pickle
import secrets
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from lgrpo.engines.base import EngineError, EngineFailure, each
from lgrpo.engines.ledger import Sent
from lgrpo.engines.server import VLLMServer
from lgrpo.engines.vllm_adapter import adapter_flags, read_adapter, write_adapter
from lgrpo.engines.vllm_layout import Layout, engine_layout
from lgrpo.functional import chunks
from lgrpo.types import PolicyWeights

Failures = dict[VLLMServer, EngineFailure]
"""Servers that failed, and of what."""


class FileTransfer:
    """Safetensors files in a folder that trainer and servers share. They stay there: they are the behaviour policy."""

    flags: dict[str, Any] = {}  # noqa: RUF012
    environment: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder = folder
        self.timeout = timeout
        self.model: str | None = None
        """The name to ask for, where it is not that of the servers' model."""

    def connected(self, servers: Sequence[VLLMServer]) -> None:
        """The servers have started, from this folder."""

    def send(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: Sent) -> Failures:
        """Other weights for servers that are drained. Which of them failed."""
        self.write(weights, sent)
        failures: Failures = {}
        each(servers, failures, self.read)
        return failures

    def read(self, server: VLLMServer) -> None:
        """Has a server read the weights in the folder."""
        server.rpc("reload_weights", self.timeout, weights_path=str(self.folder))

    @contextmanager
    def files(self, others: Sequence[VLLMServer], layout: Layout) -> Iterator[None]:
        """As long as it lasts the folder holds the weights as they were last sent: a server starts from them."""
        yield

    def held_weights(self, servers: Sequence[VLLMServer], layout: Layout) -> dict[str, Tensor]:
        """What the servers hold."""
        return read_folder(self.folder)

    def report(self, server: VLLMServer, layout: Layout) -> dict[str, str]:
        """A server's own checksums."""
        return server.rpc("lgrpo_checksums", self.timeout, layout=layout)

    def write(self, weights: PolicyWeights, sent: Sent) -> None:
        """The weights as files, each there whole or not at all."""
        write_folder(self.folder, sent.through(weights))

    def close(self) -> None:
        """Lets go of the servers."""


class AdapterTransfer(FileTransfer):
    """Adapters alone, as files, through vLLM's own routes; the weights below them once, when a server starts."""

    environment: dict[str, str] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # noqa: RUF012

    def __init__(self, folder: Path, timeout: float, rank: int) -> None:
        super().__init__(folder, timeout)
        self.flags = adapter_flags(rank)
        self._base = Sent()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._number = 0

    def connected(self, servers: Sequence[VLLMServer]) -> None:
        layout = engine_layout(self._base.shapes)
        for server in servers:
            report = server.rpc("lgrpo_checksums", self.timeout, layout=layout)
            self._base.compare({name: int(value, 16) for name, value in report.items()})
            self.read(server)

    def read(self, server: VLLMServer) -> None:
        body = {"lora_name": self.model, "lora_path": str(self._adapter), "load_inplace": True}
        server.call("POST", "/v1/load_lora_adapter", self.timeout, plain=True, json=body)
        for name in server.adapters - {self.model}:
            server.call("POST", "/v1/unload_lora_adapter", self.timeout, plain=True, json={"lora_name": name})
        server.adapters = {self.model}

    def report(self, server: VLLMServer, layout: Layout) -> dict[str, str]:
        return server.rpc("lgrpo_adapter_checksums", self.timeout, shapes=self._shapes)

    def held_weights(self, servers: Sequence[VLLMServer], layout: Layout) -> dict[str, Tensor]:
        return read_adapter(self._adapter)

    def write(self, weights: PolicyWeights, sent: Sent) -> None:
        assert weights.adapter is not None
        if not self._base.shapes:
            self._base = Sent(dtype=sent.dtype)
            write_folder(self.folder, self._base.through(weights.adapter.base()))
        before = self._adapter
        self._number += 1
        write_adapter(self._adapter, weights.adapter.rank, sent.through(weights.adapter.tensors()))
        self._shapes, self.model = dict(sent.shapes), f"policy-{secrets.token_hex(4)}"  # never the name of another one
        shutil.rmtree(before, ignore_errors=True)

    @property
    def _adapter(self) -> Path:
        return self.folder / f"adapter-{self._number}"


class MemoryTransfer(FileTransfer, ABC):
    """Weights that servers alone hold, in their memory. A server starts from files, which are there for that long."""

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(folder, timeout)
        self._lock = threading.Lock()
        self._num_users = 0
        """Of the files: servers that start from them, at the same time as others may."""

    @abstractmethod
    def hand_over(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: Sent) -> Failures:
        """From memory to memory. Which servers failed; what was sent is noted whole in any case."""

    def connected(self, servers: Sequence[VLLMServer]) -> None:
        with self._lock:
            if not self._num_users:
                self._delete_files()

    def send(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: Sent) -> Failures:
        self._delete_files()  # of a sync before this one, whose servers did not come back
        if not servers:
            self.write(weights, sent)
            return {}
        failures = self.hand_over(servers, weights, sent)
        if len(failures) == len(servers):  # no server has them to start another one from
            self.write(weights, Sent(dtype=sent.dtype))
        return failures

    def held_weights(self, servers: Sequence[VLLMServer], layout: Layout) -> dict[str, Tensor]:
        with self.files(servers, layout):
            return read_folder(self.folder)

    @contextmanager
    def files(self, others: Sequence[VLLMServer], layout: Layout) -> Iterator[None]:
        with self._lock:
            if not any(self.folder.glob("*.safetensors")):
                self._write_out(others, layout)
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._delete_files()

    def _write_out(self, servers: Sequence[VLLMServer], layout: Layout) -> None:
        """The weights as a server holds them."""
        why = ""
        for server in servers:
            try:
                server.rpc("lgrpo_write_weights", self.timeout, folder=str(self.folder), layout=layout)
                return
            except EngineFailure as failure:
                self._delete_files()  # half of them may be there
                why = f" ({failure})"
        raise EngineError(
            "the behaviour policy was in the memory of servers alone, and none that holds it is left, or can write it "
            f"into {self.folder}{why}: go on from the last checkpoint. With transfer 'file' a server that fails is "
            "given it again"
        )

    def _delete_files(self) -> None:
        for path in self.folder.glob("*.safetensors"):
            path.unlink()


class IPCTransfer(MemoryTransfer):
    """Handles of CUDA memory, through vLLM's own weight-transfer routes: servers copy from the trainer's GPU.

    A server must be on the very GPU the weights are on.
    """

    flags: dict[str, Any] = {"weight_transfer_config": '{"backend": "ipc"}'}  # noqa: RUF012
    environment: dict[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # noqa: RUF012 # handles travel pickled

    def connected(self, servers: Sequence[VLLMServer]) -> None:
        for server in servers:
            server.call("POST", "/init_weight_transfer_engine", self.timeout, json={"init_info": {}})
        super().connected(servers)

    def hand_over(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: Sent) -> Failures:
        failures: Failures = {}
        each(servers, failures, lambda server: server.call("POST", "/start_weight_update", self.timeout))
        for chunk in chunks(sent.through(weights)):
            on_device = {name: tensor.cuda().contiguous() for name, tensor in chunk.items()}
            torch.cuda.synchronize()

            def update(server: VLLMServer, tensors: dict[str, Tensor] = on_device) -> None:
                body = {"update_info": describe(tensors) | handles(tensors)}  # a handle is for one reader
                server.call("POST", "/update_weights", self.timeout, json=body)

            each(servers, failures, update)
        each(servers, failures, lambda server: server.call("POST", "/finish_weight_update", self.timeout))
        torch.cuda.ipc_collect()
        return failures


def describe(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors as vLLM's weight-transfer routes want to hear of them.

    >>> describe({"norm.weight": torch.zeros(4, dtype=torch.bfloat16)})
    {'names': ['norm.weight'], 'dtype_names': ['bfloat16'], 'shapes': [[4]]}
    """
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def handles(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Where on which GPU they are."""
    found = []
    for tensor in tensors.values():
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        found.append({uuid: reduce_tensor(tensor)[1]})
    return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(found)).decode()}


def write_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Safetensors files of a gigabyte, each there whole or not at all, and no others."""
    names = set()
    for count, chunk in enumerate(chunks(tensors)):
        path = folder / f"model-{count:05d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in chunk.items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        names.add(path.name)
    for path in folder.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()


@contextmanager
def folder_in_memory(num_bytes: int = 0) -> Iterator[Path]:
    """A folder for a while, in shared memory where there is any and it has the room; containers may have little."""
    has_room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > num_bytes
    shared = "/dev/shm" if has_room else None
    with tempfile.TemporaryDirectory(prefix="lgrpo-weights-", dir=shared) as folder:
        yield Path(folder)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


TRANSFERS = {"file": FileTransfer, "ipc": IPCTransfer}
