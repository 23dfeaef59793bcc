"""NCCL broadcasts to vLLM servers on other GPUs or machines, through vLLM's weight-transfer engine."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.recovery import EngineError, EngineFailure
from lgrpo.engines.servers.client import VLLMServer, free_port
from lgrpo.engines.servers.transfer.base import Failures, PeerFailure, WeightTransfer
from lgrpo.engines.vllm.layout import engine_layout
from lgrpo.engines.vllm.runtime import first_line, import_vllm
from lgrpo.engines.weight_files import read_folder
from lgrpo.functional import chunks
from lgrpo.weights import PolicyWeights


@final
class NCCLTransfer(WeightTransfer):
    """Broadcasts in a process group of the trainer and the workers of all servers, separate from the training group.

    Every collective waits for all ranks. So each step has a timeout, and if one rank fails, all servers count as
    failed: they are restarted, and the next sync creates another group. Trainer and servers must run the same version
    of vLLM.

    Between syncs the weights exist only in the servers' memory. Files exist only while a server starts from them.
    """

    flags: Mapping[str, Any] = {"weight_transfer_config": '{"backend": "nccl"}'}
    needs_separate_gpus = True

    def __init__(self, folder: Path, timeout: float, address: str | None = None) -> None:
        super().__init__(folder, timeout)
        self.address = address
        """Address of this machine that servers can reach; None: the one of the route to them."""
        self._group: Any = None
        self._members: list[VLLMServer] = []
        self._has_joined = False
        self._lock = threading.Lock()
        self._num_readers = 0
        """Number of servers that start from the files at the moment."""

    def on_connect(self, servers: Sequence[VLLMServer]) -> None:
        for server in servers:
            self._check_vllm_version(server)
        if not self._has_joined:  # a configuration that cannot work must fail at the start
            self._join(servers)
            self._has_joined = True
        with self._lock:
            if not self._num_readers:
                self._delete_files()

    def send(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: WeightManifest) -> Failures:
        self._delete_files()  # left by a sync whose servers never restarted
        failures = self._broadcast_all(servers, weights, sent) if servers else {}
        if len(failures) == len(servers):  # no server holds the weights, so the next one must start from files
            self.write(weights, sent if not servers else WeightManifest(dtype=sent.dtype))
        return failures

    def held_weights(self, servers: Sequence[VLLMServer]) -> dict[str, Tensor]:
        with self.files(servers):
            return read_folder(self.folder)

    @contextlib.contextmanager
    def files(self, others: Sequence[VLLMServer]) -> Iterator[None]:
        with self._lock:
            if not any(self.folder.glob("*.safetensors")):
                self._write_from_server(others)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_readers -= 1
                if not self._num_readers:
                    self._delete_files()

    def close(self) -> None:
        self._leave()

    # Files

    def _write_from_server(self, servers: Sequence[VLLMServer]) -> None:
        """Make the first server that can do it write its weights into the folder."""
        reason, layout = "", engine_layout(self.sent.shapes)
        for server in servers:
            try:
                server.rpc("lgrpo_write_weights", self.timeout, folder=str(self.folder), layout=layout)
                return
            except EngineFailure as failure:
                self._delete_files()  # part of them may have been written
                reason = f" ({failure})"
        raise EngineError(
            "no server is left that holds the behaviour policy and can write it into "
            f"{self.folder}{reason}: resume from the last checkpoint. With transfer 'file' the weights are kept in "
            "files, and a failed server reads them again"
        )

    def _delete_files(self) -> None:
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    # Broadcasts

    def _broadcast_all(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: WeightManifest) -> Failures:
        failure = self._try(self._start_update, servers)
        for _, same_dtype in groupby(sent.stream(weights), lambda named: named[1].dtype):  # vLLM does not align chunks
            for chunk in chunks(same_dtype):
                if failure is None:
                    failure = self._try(self._broadcast, servers, chunk)
        failure = failure or self._try(self._finish_update, servers)
        if failure is None:
            return {}
        failures: Failures = {server: PeerFailure(f"{server.url} is blocked: {failure}") for server in servers}
        failures[servers[0]] = failure  # counted once, not once per server
        return failures

    def _try(self, step: Callable[..., None], *arguments: Any) -> EngineFailure | None:
        """Run one step. Leave the group if it fails, and return the failure."""
        try:
            step(*arguments)
        except BaseException as error:
            self._leave()
            if isinstance(error, EngineFailure):
                return error
            raise
        return None

    def _start_update(self, servers: Sequence[VLLMServer]) -> None:
        self._join(servers)
        run_concurrently(self._requests(servers, "/start_weight_update"), self.timeout)

    def _broadcast(self, servers: Sequence[VLLMServer], chunk: dict[str, Tensor]) -> None:
        tensors = {name: tensor.cuda() for name, tensor in chunk.items()}
        torch.cuda.current_stream().synchronize()  # they are sent on another stream
        group, device = self._group, torch.cuda.current_device()
        body = {"update_info": describe(tensors) | packed_at("update")}
        requests = self._requests(servers, "/update_weights", *[body] * len(servers))
        run_concurrently([lambda: broadcast(group, tensors, device), *requests], self.timeout)

    def _finish_update(self, servers: Sequence[VLLMServer]) -> None:
        run_concurrently(self._requests(servers, "/finish_weight_update"), self.timeout)

    def _requests(self, servers: Sequence[VLLMServer], path: str, *bodies: Any) -> list[Callable[[], Any]]:
        """Return one request per server, with one body each or none."""
        pairs = zip(servers, bodies or [None] * len(servers), strict=True)
        return [partial(server.call, "POST", path, self.timeout, json=body) for server, body in pairs]

    # The process group

    def _check_vllm_version(self, server: VLLMServer) -> None:
        own, other = import_vllm().__version__, server.call("GET", "/version", self.timeout)["version"]
        if own != other:
            raise EngineError(
                f"the vLLM server at {server.url} has version {other}, and the trainer's vLLM is {own}: transfer "
                "'nccl' requires the same version on both sides. Use 'file', or install the same version"
            )

    def _join(self, servers: Sequence[VLLMServer]) -> None:
        """Create the group of the trainer and these servers, unless it exists."""
        if self._group is not None and self._members == list(servers):
            return
        self._leave()
        sizes = [server.call("GET", "/get_world_size", self.timeout)["world_size"] for server in servers]
        address = self.address or own_address(server.url for server in servers)
        rendezvous = {"master_address": address, "master_port": self._port(address), "world_size": 1 + sum(sizes)}
        device = torch.cuda.current_device()
        offsets = list(accumulate(sizes[:-1], initial=1))
        bodies = [{"init_info": rendezvous | {"rank_offset": offset} | packed_at("init")} for offset in offsets]
        requests = self._requests(servers, "/init_weight_transfer_engine", *bodies)
        try:
            self._group = run_concurrently([lambda: join(rendezvous, device), *requests], self.timeout)[0]
        except EngineFailure as failure:
            raise EngineFailure(
                f"trainer and servers could not form an NCCL group at {address}: {failure}. Each needs a separate GPU "
                "(on the trainer's GPU, use transfer 'file'), and servers must reach that address (transfer_address). "
                "NCCL_DEBUG=INFO logs the details"
            ) from failure
        self._members = list(servers)

    def _port(self, address: str) -> int:
        try:
            return free_port(address)
        except OSError as error:
            raise EngineError(
                f"{address} is not an address of this machine ({error}): correct transfer_address"
            ) from error

    def _leave(self) -> None:
        """Destroy the group, which also ends collectives of this process that still wait in it."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it starts a thread, which fails while Python shuts down
                group.destroy()


def join(rendezvous: dict[str, Any], device: int) -> Any:
    """Create the group as its rank 0 and wait for all other ranks."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    torch.cuda.set_device(device)  # a new thread starts with device 0
    group = trainer_init(rendezvous)
    if group.disabled:
        raise EngineError("vLLM here cannot use NCCL: libnccl.so.2 is missing, or VLLM_DISABLE_PYNCCL is set")
    return group


def broadcast(group: Any, tensors: dict[str, Tensor], device: int) -> None:
    """Broadcast tensors to every other rank of the group, packed into one, and wait until they have arrived."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    torch.cuda.set_device(device)
    packed_nccl_broadcast_producer(iter(tensors.items()), group, src=0, post_iter_func=lambda named: named[1])
    torch.cuda.synchronize()  # vLLM 0.26 does not wait


def describe(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return names, dtypes and shapes of tensors, in the form of vLLM's weight-transfer routes.

    >>> describe({"norm.weight": torch.zeros(4, dtype=torch.bfloat16)})
    {'names': ['norm.weight'], 'dtype_names': ['bfloat16'], 'shapes': [[4]]}
    """
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def packed_at(stage: str) -> dict[str, bool]:
    """Return the field that announces packed tensors: vLLM 0.26 expects it in each update, later ones in the init."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    is_in_init = "packed" in {field.name for field in fields(NCCLWeightTransferInitInfo)}
    return {"packed": True} if is_in_init == (stage == "init") else {}


def run_concurrently(functions: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Run functions that wait for each other and return their results.

    Raise an error as soon as one of them fails, or after ``timeout`` seconds. Threads that still wait are abandoned: a
    thread pool would join them when Python exits.

    >>> barrier = threading.Barrier(2)
    >>> sorted(run_concurrently([barrier.wait, barrier.wait], 5.0))
    [0, 1]
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, function: Callable[[], Any]) -> None:
        try:
            done.put((index, function(), None))
        except BaseException as error:
            done.put((index, None, error))

    for index, function in enumerate(functions):
        threading.Thread(target=run, args=(index, function), name="nccl-transfer", daemon=True).start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(functions):
        try:
            index, result, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineFailure(f"trainer and servers did not complete this step within {timeout:g} s") from None
        if error is not None:
            raise error if isinstance(error, EngineError) else EngineFailure(f"NCCL failed: {first_line(error)}")
        results[index] = result
    return [results[index] for index in range(len(functions))]


def own_address(urls: Iterable[str]) -> str:
    """Return this machine's address on the route to the servers: not loopback if one is on another machine.

    >>> own_address(["http://127.0.0.1:8000"])
    '127.0.0.1'
    """
    found = []
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            try:
                probe.connect((urlsplit(url).hostname, urlsplit(url).port or 80))
            except OSError as error:
                raise EngineError(
                    f"this machine has no route to {url} ({error}): set transfer_address to an address that servers "
                    "can reach"
                ) from error
            found.append(probe.getsockname()[0])
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), found[0])


def check_separate_gpus(own: str, servers: Sequence[Sequence[str]]) -> None:
    """Raise an error if two ranks of the NCCL group are on one GPU. NCCL's own message does not name it.

    >>> check_separate_gpus("0", [["6"], ["7"]])
    """
    owners = {own: "the trainer"}
    for index, devices in enumerate(servers):
        for device in devices:
            if device in owners:
                raise EngineError(
                    f"GPU {device} is assigned to {owners[device]} and to server {index}, and NCCL requires a separate "
                    "GPU for each: choose other devices, or transfer 'file', which also works on the trainer's GPU"
                )
            owners[device] = f"server {index}"
