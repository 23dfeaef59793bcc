"""vLLM servers that hold the same weights: synced together, each restarted when it fails."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lgrpo.engines.manifest import WeightManifest, WeightSyncError, sync_errors
from lgrpo.engines.recovery import RESUME_ADVICE, EngineError, EngineFailure, FailureBudget, Timeouts, for_each_healthy
from lgrpo.engines.servers.client import ServerErrorResponse, VLLMServer
from lgrpo.engines.servers.launch import ServerLauncher
from lgrpo.engines.servers.transfer.base import Failures, PeerFailure, WeightTransfer
from lgrpo.engines.servers.transfer.settings import TransferSettings
from lgrpo.weights import PolicyWeights


class VersionMismatch(EngineFailure):
    """A server holds another version of the weights: it was restarted, or another client synced it."""


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """The model that all servers of a group hold, and how to request completions from it."""

    version: int = 0
    """Version of the weights."""
    name: str = ""
    """Name of the model in requests."""
    max_model_len: int = 0
    """Most tokens of prompt and completion together."""
    is_seeded: bool = False
    """Whether every request has a seed."""


class ServerGroup:
    """vLLM servers that hold the same weights.

    The first ``sync`` starts the servers or finds those of the user; every ``sync`` replaces their weights, and
    ``verify`` compares their checksums with what was sent. Then the ``available`` servers answer requests. A server
    that fails is passed to ``recover``, which restarts it with the weights of the last sync, or waits for a server the
    user runs. Restarts run in threads, and ``cancel`` ends all of them. ``close`` ends the servers and deletes the
    files; the next ``sync`` starts others.
    """

    def __init__(
        self,
        launcher: ServerLauncher,
        transfer: TransferSettings,
        budget: FailureBudget,
        timeouts: Timeouts,
        *,
        dtype: torch.dtype | None,
        verify: bool,
    ) -> None:
        self.launcher = launcher
        self.budget = budget
        self.timeouts = timeouts
        self.servers: list[VLLMServer] = []
        self.model = ServedModel()
        self.keeps_addresses = False
        """Whether a restarted server has the same port and key, because other processes use them."""
        self.cancelled = threading.Event()
        """Event that the next ``cancel`` sets. A generation or sync passes it to ``recover`` as it was at its start."""
        self._transfer_settings = transfer
        self._transfer: WeightTransfer | None = None
        self._dtype = dtype
        self._verify = verify
        self._sent_dtype: torch.dtype | None = None
        """Precision in which weights are sent; None: the policy's."""
        self._checksum: str | None = None
        """Checksum of the current version, if it was sent before."""
        self._lock = threading.Condition()
        self._num_restarting = 0
        self._starting: set[VLLMServer] = set()

    @property
    def transfer(self) -> WeightTransfer:
        """Transfer of the weights, from the first ``sync`` until ``close``."""
        if self._transfer is None:
            raise EngineError("no weights were sent to the servers yet")
        return self._transfer

    @property
    def available(self) -> list[VLLMServer]:
        """Servers that are not known to be unavailable."""
        return [server for server in self.servers if not server.is_unavailable]

    # Syncs

    def sync(self, weights: PolicyWeights, version: int, checksum: str | None = None) -> WeightManifest:
        """Replace the weights of all servers. Raise a ``WeightSyncError`` if more servers fail than can be restarted.

        ``checksum`` is that of this version, if it was sent before.
        """
        self.wait_for_restarts()  # a restarting server reads the weights of the last sync
        self.budget.reset()
        failures, max_model_len, have_weights = Failures(), self.model.max_model_len, False
        if not self.servers:
            have_weights = self.launcher.urls is None  # they start from these weights
            sent = self._write_first(weights)
            self.servers, max_model_len = self.launcher.connect(self.transfer, self._sent_dtype, self.timeouts)
        with sync_errors():
            if not have_weights:
                sent, failures = self._send(weights)
            for_each_healthy(self.available, failures, lambda server: self._set_version(server, version))
            self.transfer.sent, self._checksum = sent, checksum
            self.model = ServedModel(
                version=version,
                name=self.transfer.model or self.launcher.served_model_name,
                max_model_len=max_model_len,
                is_seeded=self.launcher.is_seeded,
            )
            self._recover_all(failures, self.cancelled)
        return sent

    def verify(self, sent: WeightManifest) -> None:
        """Compare the checksums of all servers with those of the policy, and restart servers that fail to report."""
        failures: Failures = {}
        with sync_errors():
            for_each_healthy(self.available, failures, lambda server: sent.compare(self.checksums(server)))
            self._recover_all(failures, self.cancelled)  # which compares their checksums too

    def checksums(self, server: VLLMServer) -> dict[str, int]:
        """Return the checksums that a server computes of its weights."""
        try:
            return self.transfer.checksums(server)
        except ServerErrorResponse as error:  # a restart would not help
            raise WeightSyncError(f"the server does not report checksums of its weights: {error}") from error

    def close(self) -> None:
        """End the servers that were started here, and delete the files."""
        self.cancel()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()
        for server in self.servers:
            server.close()
        self.servers = []
        if transfer is not None:
            shutil.rmtree(transfer.folder, ignore_errors=True)

    def _write_first(self, weights: PolicyWeights) -> WeightManifest:
        """Create the transfer if there is none, and write weights into its folder for servers to start from."""
        if self._transfer is None:
            self._transfer = self._transfer_settings.create(weights, self.timeouts.sync)
        self._sent_dtype = self._dtype or weights.compute_dtype
        sent = WeightManifest(dtype=self._sent_dtype)
        self._transfer.write(weights, sent)
        if self.launcher.urls is None:  # servers are started with an explicit precision
            self._sent_dtype = self._sent_dtype or next(iter(weights))[1].dtype
        return sent

    def _send(self, weights: PolicyWeights) -> tuple[WeightManifest, Failures]:
        """Replace the weights of all servers after their requests in flight, and empty their prefix caches."""
        for index, server in enumerate(self.servers):
            if server.is_unavailable and server.is_up():
                self.servers[index] = VLLMServer(server.url, server.api_key)
        sent, failures, timeout = WeightManifest(dtype=self._sent_dtype), Failures(), self.timeouts.sync
        for_each_healthy(self.available, failures, lambda server: server.call("POST", "/pause?mode=wait", timeout))
        healthy = [server for server in self.available if server not in failures]
        failures |= self.transfer.send(healthy, weights, sent)
        for_each_healthy(self.available, failures, self._resume)
        return sent, failures

    def _resume(self, server: VLLMServer) -> None:
        if not server.call("POST", "/reset_prefix_cache", self.timeouts.sync)["success"]:
            raise WeightSyncError(f"the prefix cache of the vLLM server at {server.url} is in use")
        server.call("POST", "/resume", self.timeouts.sync)

    def _set_version(self, server: VLLMServer, version: int) -> None:
        server.rpc("lgrpo_set_version", self.timeouts.sync, version=version)

    # Checks and restarts

    def check_version(self, server: VLLMServer, timeout: float) -> None:
        """Raise an ``EngineFailure`` if a server's worker does not answer, or holds another version."""
        held, version = server.rpc("lgrpo_version", timeout)["version"], self.model.version
        if held != version:
            raise VersionMismatch(f"the vLLM server at {server.url} holds version {held} of the weights, not {version}")

    def check_all(self) -> None:
        """Check every server, and restart those that fail."""
        cancelled, failures = self.cancelled, Failures()
        self.wait_for_restarts()
        for_each_healthy(self.available, failures, lambda server: self.check_version(server, self.timeouts.sync))
        self._recover_all(failures, cancelled)

    def recover(self, server: VLLMServer, failure: EngineFailure, cancelled: threading.Event) -> VLLMServer | None:
        """Return a server with the weights of the last sync in exchange for one that failed.

        Return None if it is unavailable and the others must continue without it.
        """
        with self.counted_restart():
            while True:
                check_not_cancelled(cancelled)
                self.budget.count_failure(failure, is_consequence=isinstance(failure, PeerFailure))
                try:
                    return self._restart(server, failure, cancelled)
                except EngineFailure as next_failure:
                    failure = next_failure

    def wait_for_restarts(self) -> None:
        """Wait until no server is being restarted. A server whose restart failed fails again on its next use."""
        with self._lock:
            self._lock.wait_for(lambda: self._num_restarting == 0)

    def cancel(self) -> None:
        """Make all restarts raise, and kill the servers that are starting."""
        with self._lock:
            self.cancelled.set()
            self.cancelled = threading.Event()
            starting, self._starting = self._starting, set()
        for server in starting:
            server.kill()

    @contextmanager
    def counted_restart(self) -> Iterator[None]:
        """Make ``wait_for_restarts`` wait for the code inside, and add its time to the faults."""
        with self._lock:
            self._num_restarting += 1
        try:
            with self.budget.timed():
                yield
        finally:
            with self._lock:
                self._num_restarting -= 1
                self._lock.notify_all()

    def exchange(self, server: VLLMServer, new: VLLMServer) -> None:
        """Put a restarted server at the index of its predecessor."""
        self.servers[self.servers.index(server)] = new
        self.budget.count_restarts()

    def _recover_all(self, failures: Failures, cancelled: threading.Event) -> None:
        """Restart all failed servers at the same time."""
        if not failures:
            return
        with ThreadPoolExecutor(len(failures), thread_name_prefix="vllm-restart") as pool:
            try:
                list(pool.map(self.recover, failures, failures.values(), [cancelled] * len(failures)))
            except BaseException:
                self.cancel()  # leaving the pool waits for its threads
                raise

    def _restart(self, server: VLLMServer, failure: EngineFailure, cancelled: threading.Event) -> VLLMServer | None:
        is_up = isinstance(failure, VersionMismatch)  # only its weights are wrong
        if server.process is None and not is_up and not self._is_up_again(server, failure):
            return None
        with self.transfer.files([other for other in self.available if other is not server]):
            if server.process is None or is_up:
                new = VLLMServer(server.url, server.api_key, server.process, server.log)
                self._reload(new)
            else:
                new = self._start_again(server, cancelled)
        with self._lock:
            check_not_cancelled(cancelled)
            self._starting.discard(new)
            self.exchange(server, new)
        return new

    def _start_again(self, server: VLLMServer, cancelled: threading.Event) -> VLLMServer:
        """Start another process from the folder in exchange for one that was started here."""
        server.kill()
        with self._lock:
            check_not_cancelled(cancelled)
            index, predecessor = self.servers.index(server), server if self.keeps_addresses else None
            new = self.launcher.start(self.transfer, index, self._sent_dtype, predecessor)
            self._starting.add(new)
        try:
            new.wait_until_ready(self.timeouts.start)
            self.transfer.on_connect([new])
            self._verify_reloaded(new)
        except BaseException:
            new.kill()
            with self._lock:
                self._starting.discard(new)
            raise
        return new

    def _reload(self, server: VLLMServer) -> None:
        """Restore the weights of a server that runs."""
        server.call("POST", "/pause?mode=abort", self.timeouts.sync)
        self.transfer.reload(server)
        self._resume(server)
        self._verify_reloaded(server)

    def _verify_reloaded(self, server: VLLMServer) -> None:
        """Set the version of a restarted server, and compare its checksums with those of the last sync."""
        self._set_version(server, self.model.version)
        if self._verify:
            checksum = self.transfer.sent.compare(self.checksums(server))
            if self._checksum not in (None, checksum):
                raise WeightSyncError(
                    f"the vLLM server at {server.url} holds weights with checksum {checksum}, but version "
                    f"{self.model.version} had {self._checksum}"
                )

    def _is_up_again(self, server: VLLMServer, failure: EngineFailure) -> bool:
        """Wait for a server the user runs. Raise an error if it does not answer in time and is the only one."""
        try:
            server.wait_until_ready(self.timeouts.reconnect)
        except EngineFailure:
            with self._lock:
                if self.available == [server]:
                    raise EngineError(
                        f"{failure}. It did not answer again within {self.timeouts.reconnect:g} s, and no other server "
                        f"is available: start it, then {RESUME_ADVICE}"
                    ) from failure
                server.is_unavailable = True
            warnings.warn(
                f"{server.url} does not answer: the run continues with the other servers, and the next sync tries it "
                "again",
                stacklevel=2,
            )
            return False
        return True


def check_not_cancelled(cancelled: threading.Event) -> None:
    """Raise an error if the generation or sync that needs a server was cancelled."""
    if cancelled.is_set():
        raise EngineError("the engine was closed, or its generation or sync was cancelled")
