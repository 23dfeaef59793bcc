"""Weights to vLLM servers on other GPUs or machines: NCCL broadcasts, through vLLM's own weight-transfer engine."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lgrpo.engines.base import EngineError, EngineFailure
from lgrpo.engines.ledger import Sent
from lgrpo.engines.server import VLLMServer, free_port
from lgrpo.engines.vllm_process import first_line, import_vllm
from lgrpo.engines.vllm_transfer import Failures, MemoryTransfer, chunks, describe
from lgrpo.types import PolicyWeights


class LeftWaiting(EngineFailure):
    """Nothing ails the server, but it waits in a group whose other members will not come."""


class NCCLTransfer(MemoryTransfer):
    """Trainer and servers' workers are one group, apart from the ones that train. The trainer broadcasts to it.

    What a member does in a group waits for all the others. So every step has a deadline, and where one member fails all
    servers have: they are started again, and the next sync makes another group. vLLM is of the same version on both
    ends.
    """

    flags: dict[str, Any] = {"weight_transfer_config": '{"backend": "nccl"}'}  # noqa: RUF012

    def __init__(self, folder: Path, timeout: float, address: str | None = None) -> None:
        """
        Args:
            address: Of this machine, where the servers find the trainer; by default the one that faces them.
        """
        super().__init__(folder, timeout)
        self.address = address
        self._group: Any = None
        self._members: list[VLLMServer] = []
        self._has_joined = False

    def connected(self, servers: Sequence[VLLMServer]) -> None:
        for server in servers:
            self._check_version(server)
        if not self._has_joined:  # what will never work is an error now
            self._join(servers)
            self._has_joined = True
        super().connected(servers)

    def hand_over(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: Sent) -> Failures:
        failure = self._try(self._begin, servers)
        for _, alike in groupby(sent.through(weights), lambda named: named[1].dtype):  # vLLM packs a chunk unaligned
            for chunk in chunks(alike):
                if failure is None:
                    failure = self._try(self._broadcast, servers, chunk)
        failure = failure or self._try(self._finish, servers)
        if failure is None:
            return {}
        failures: Failures = {server: LeftWaiting(f"{server.url} was left waiting: {failure}") for server in servers}
        failures[servers[0]] = failure  # one failure, not one of each
        return failures

    def close(self) -> None:
        self._leave()

    # Inside

    def _check_version(self, server: VLLMServer) -> None:
        own, theirs = import_vllm().__version__, server.call("GET", "/version", self.timeout)["version"]
        if own != theirs:
            raise EngineError(
                f"the vLLM server at {server.url} is of version {theirs}, and vLLM here of {own}: transfer 'nccl' "
                "wants the same on both ends. Use 'file', or install one of them"
            )

    def _try(self, step: Callable[..., None], *arguments: Any) -> EngineFailure | None:
        """How a step failed. The group is no good after that."""
        try:
            step(*arguments)
        except EngineFailure as failure:
            self._leave()
            return failure
        except BaseException:
            self._leave()
            raise
        return None

    def _begin(self, servers: Sequence[VLLMServer]) -> None:
        self._join(servers)
        all_at_once(self._requests(servers, "/start_weight_update"), self.timeout)

    def _broadcast(self, servers: Sequence[VLLMServer], chunk: dict[str, Tensor]) -> None:
        tensors = {name: tensor.cuda() for name, tensor in chunk.items()}
        torch.cuda.current_stream().synchronize()  # they are sent on another stream
        group, device = self._group, torch.cuda.current_device()
        body = {"update_info": describe(tensors) | packed_at("update")}
        requests = self._requests(servers, "/update_weights", *[body] * len(servers))
        all_at_once([lambda: broadcast(group, tensors, device), *requests], self.timeout)

    def _finish(self, servers: Sequence[VLLMServer]) -> None:
        all_at_once(self._requests(servers, "/finish_weight_update"), self.timeout)

    def _requests(self, servers: Sequence[VLLMServer], path: str, *bodies: Any) -> list[Callable[[], Any]]:
        """One of each server."""
        asked = zip(servers, bodies or [None] * len(servers), strict=True)
        return [partial(server.call, "POST", path, self.timeout, json=body) for server, body in asked]

    def _join(self, servers: Sequence[VLLMServer]) -> None:
        """The group of these servers."""
        if self._group is not None and self._members == list(servers):
            return
        self._leave()
        sizes = [server.call("GET", "/get_world_size", self.timeout)["world_size"] for server in servers]
        address = self.address or own_address(server.url for server in servers)
        meeting = {"master_address": address, "master_port": self._port(address), "world_size": 1 + sum(sizes)}
        device = torch.cuda.current_device()
        offsets = list(accumulate(sizes[:-1], initial=1))
        bodies = [{"init_info": meeting | {"rank_offset": offset} | packed_at("init")} for offset in offsets]
        requests = self._requests(servers, "/init_weight_transfer_engine", *bodies)
        try:
            self._group = all_at_once([lambda: join(meeting, device), *requests], self.timeout)[0]
        except EngineFailure as failure:
            raise EngineFailure(
                f"trainer and servers did not find together in an NCCL group at {address}: {failure}. Each needs a GPU "
                "of its own (on the trainer's, use transfer 'ipc'), and servers must reach that address "
                "(transfer_address); NCCL_DEBUG=INFO tells more"
            ) from failure
        self._members = list(servers)

    def _port(self, address: str) -> int:
        try:
            return free_port(address)
        except OSError as error:
            raise EngineError(f"{address} is no address of this machine ({error}): mend transfer_address") from error

    def _leave(self) -> None:
        """Ends the group, and what of ours still waits in it."""
        group, self._group, self._members = self._group, None, []
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it takes a thread, which there is none of at the very end
                group.destroy()


def join(meeting: dict[str, Any], device: int) -> Any:
    """Makes the group, as its rank 0. Waits for the others."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    torch.cuda.set_device(device)  # a thread begins with the first one
    group = trainer_init(meeting)
    if group.disabled:
        raise EngineError("vLLM here cannot use NCCL: libnccl.so.2 is missing, or VLLM_DISABLE_PYNCCL is set")
    return group


def broadcast(group: Any, tensors: dict[str, Tensor], device: int) -> None:
    """Tensors to every other member of the group, in one piece. Waits until they are there."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    torch.cuda.set_device(device)
    packed_nccl_broadcast_producer(iter(tensors.items()), group, src=0, post_iter_func=lambda named: named[1])
    torch.cuda.synchronize()  # vLLM 0.26 does not wait by itself


def packed_at(stage: str) -> dict[str, bool]:
    """Servers are told that tensors come packed: at every update by vLLM 0.26, when the group is made by later ones."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    is_early = "packed" in {field.name for field in fields(NCCLWeightTransferInitInfo)}
    return {"packed": True} if is_early == (stage == "init") else {}


def all_at_once(acts: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """The results of things that wait for each other. An error as soon as one fails, or at the deadline.

    Who waits still is left behind: no pool, whose threads would be waited for when Python ends.

    >>> met = threading.Barrier(2)
    >>> sorted(all_at_once([met.wait, met.wait], 5.0))
    [0, 1]
    """
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(index: int, act: Callable[[], Any]) -> None:
        try:
            done.put((index, act(), None))
        except BaseException as error:
            done.put((index, None, error))

    for index, act in enumerate(acts):
        threading.Thread(target=run, args=(index, act), name="nccl-transfer", daemon=True).start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(acts):
        try:
            index, result, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineFailure(f"trainer and servers did not all do their part within {timeout:g} s") from None
        if error is not None:
            raise error if isinstance(error, EngineError) else EngineFailure(f"NCCL failed: {first_line(error)}")
        results[index] = result
    return [results[index] for index in range(len(acts))]


def own_address(urls: Iterable[str]) -> str:
    """The address of this machine that faces servers: a network's, where one of them is on another machine.

    >>> own_address(["http://127.0.0.1:8000"])
    '127.0.0.1'
    """
    found = []
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
            try:
                probe.connect((urlsplit(url).hostname, urlsplit(url).port or 80))
            except OSError as error:
                raise EngineError(
                    f"no way from this machine to {url} was found ({error}): say by transfer_address where servers "
                    "find the trainer"
                ) from error
            found.append(probe.getsockname()[0])
    return next((address for address in found if not ipaddress.ip_address(address).is_loopback), found[0])


def check_apart(own: str, servers: Sequence[Sequence[str]]) -> None:
    """NCCL wants a GPU of its own for every member of a group, and says so in riddles.

    >>> check_apart("0", [["6"], ["7"]])
    """
    owners = {own: "the trainer"}
    for index, devices in enumerate(servers):
        for device in devices:
            if device in owners:
                raise EngineError(
                    f"GPU {device} is to have {owners[device]} and server {index}, and NCCL wants each on a GPU of its "
                    "own: choose others (devices), or transfer 'ipc', which is for servers on the trainer's GPU"
                )
            owners[device] = f"server {index}"
