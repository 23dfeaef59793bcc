"""vLLM servers that hold one behaviour policy: synced together, each replaced where it fails."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
import warnings
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from lgrpo.engines.base import GO_ON, EngineError, EngineFailure, NoWeightsError, RolloutEngine, bear, each
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.engines.server import AnsweredError, VLLMServer
from lgrpo.engines.vllm_layout import Layout, engine_layout
from lgrpo.engines.vllm_nccl import LeftWaiting, NCCLTransfer
from lgrpo.engines.vllm_transfer import TRANSFERS, AdapterTransfer, Failures, FileTransfer
from lgrpo.types import PolicyWeights


class StaleWeights(EngineFailure):
    """A server holds other weights than it was given: it was started again, or someone else gave it some."""


class Fleet(RolloutEngine):
    """The servers of an engine, and the weights they hold.

    A server of ours that fails is started again from the folder with the weights, which still holds them as they were
    sent; a server of the user's is waited for and given them again. Failures are counted, and bounded.
    """

    def __init__(
        self,
        *,
        transfer: Literal["file", "ipc", "nccl"],
        transfer_address: str | None,
        weights_dir: str | None,
        dtype: torch.dtype | None,
        start_timeout: float,
        sync_timeout: float,
        timeout: float,
        return_timeout: float,
        max_failures: int,
        adapters: bool,
        verify: bool,
    ) -> None:
        super().__init__()
        self.transfer: Literal["file", "ipc", "nccl"] = transfer
        self.transfer_address = transfer_address
        self.weights_dir = weights_dir
        self.dtype = dtype
        self.start_timeout = start_timeout
        self.sync_timeout = sync_timeout
        self.timeout = timeout
        self.return_timeout = return_timeout
        self.max_failures = max_failures
        self.adapters = adapters
        self.verify = verify
        self.servers: list[VLLMServer] = []
        self._server_dtype: torch.dtype | None = None
        """What weights are sent in; None: as they come."""
        self._transfer: FileTransfer | None = None
        self._config: PretrainedConfig | None = None
        self._layout: Layout = {}
        self._sent = Sent()
        self._sent_version = 0
        self._model: str | None = None
        """The name to ask for, where it is not that of the servers' model."""
        self._num_failures = 0
        """Of this generation, or sync."""
        self._lock = threading.Condition()
        """Servers are replaced in threads."""
        self._num_replacing = 0
        self._starting: set[VLLMServer] = set()
        self._longest = 0
        self._is_seeded = False
        self._epoch = 0
        """Counts how often replacing was called off: a server that comes up after that is not wanted any more."""

    @abstractmethod
    def _connect(self, transfer: FileTransfer, weights: PolicyWeights) -> list[VLLMServer]:
        """Starts the servers, or finds the ones the user runs."""

    @abstractmethod
    def _start(self, transfer: FileTransfer, index: int) -> VLLMServer:
        """Starts one, from the folder."""

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        self._settle()  # who is being started reads the weights from before
        if not self.servers:
            self._server_dtype = self.dtype or weights.computed_in
        transfer, failures, sent = self._prepare(weights), Failures(), Sent(dtype=self._server_dtype)
        self._num_failures = 0
        if not self.servers:
            transfer.write(weights, sent)
            self.servers = self._connect(transfer, weights)
            has_started_from_them = self.servers[0].process is not None
        else:
            has_started_from_them = False
        try:
            if not has_started_from_them:
                sent = Sent(dtype=self._server_dtype)
                failures = self._replace_weights(transfer, weights, sent)
            each(self._present(), failures, lambda server: self._set_version(server, version))
            self._config, self._layout = weights.config, engine_layout(sent.shapes)
            self._sent, self._sent_version, self._model = sent, version, transfer.model
            self._recover_all(failures)
        except EngineError as error:
            raise WeightSyncError(f"the sync failed: {error}") from error
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        if not self.verify:
            return sent.checksums
        failures: Failures = {}
        try:
            each(self._present(), failures, lambda server: sent.compare(self._report(server)))
            self._recover_all(failures)  # which compares them too
        except EngineError as error:
            raise WeightSyncError(f"the sync failed: {error}") from error
        return sent.checksums

    def held_weights(self) -> dict[str, Tensor]:
        if self._transfer is None or self._config is None:
            raise NoWeightsError
        return self._transfer.held_weights(self._present(), self._layout)

    def held_config(self) -> PretrainedConfig:
        if self._config is None:
            raise NoWeightsError
        return self._config

    def close(self) -> None:
        self.forget()
        self._call_off()
        if self._transfer is not None:
            self._transfer.close()
        for server in self.servers:
            server.close()
        self.servers = []
        atexit.unregister(self.close)
        if self._transfer is not None:
            shutil.rmtree(self._transfer.folder, ignore_errors=True)
            self._transfer = None

    # Syncs

    def _prepare(self, weights: PolicyWeights) -> FileTransfer:
        """The way weights take, and the folder a server starts from."""
        if self.transfer == "ipc" and not torch.cuda.is_available():
            raise EngineError("transfer 'ipc' shares the memory of a GPU, and there is none here: use 'file'")
        if self.transfer == "nccl" and not torch.cuda.is_available():
            raise EngineError("transfer 'nccl' goes from GPU to GPU, and there is none here: use 'file'")
        if self._transfer is None:
            shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
            folder = Path(tempfile.mkdtemp(prefix="lgrpo-weights-", dir=self.weights_dir or shared))
            folder.chmod(0o700)
            atexit.register(self.close)  # whatever ends the run ends its servers, and leaves no files
            if self.adapters and weights.adapter is not None:
                self.adapter_rank = weights.adapter.rank
                self._transfer = AdapterTransfer(folder, self.sync_timeout, weights.adapter.rank)
            elif self.transfer == "nccl":
                self._transfer = NCCLTransfer(folder, self.sync_timeout, self.transfer_address)
            else:
                self._transfer = TRANSFERS[self.transfer](folder, self.sync_timeout)
            weights.config.save_pretrained(folder)
            numbering_tokenizer(weights.config.get_text_config().vocab_size).save_pretrained(folder)
        return self._transfer

    def _present(self) -> list[VLLMServer]:
        """The servers that are there, as far as is known."""
        return [server for server in self.servers if not server.is_given_up]

    def _replace_weights(self, transfer: FileTransfer, weights: PolicyWeights, sent: Sent) -> Failures:
        """Drains every server, gives it the weights, and empties its prefix cache. Which servers failed at that."""
        for index, server in enumerate(self.servers):
            if server.is_given_up and server.is_up():
                self.servers[index] = VLLMServer(server.url, server.api_key)
        failures: Failures = {}
        each(self._present(), failures, lambda server: server.call("POST", "/pause?mode=wait", self.sync_timeout))
        failures |= transfer.send([server for server in self._present() if server not in failures], weights, sent)
        each(self._present(), failures, self._resume)
        return failures

    def _resume(self, server: VLLMServer) -> None:
        if not server.call("POST", "/reset_prefix_cache", self.sync_timeout)["success"]:
            raise WeightSyncError(f"the prefix cache of the vLLM server at {server.url} is in use")
        server.call("POST", "/resume", self.sync_timeout)

    def _set_version(self, server: VLLMServer, version: int) -> None:
        server.rpc("lgrpo_set_version", self.sync_timeout, version=version)

    def _check_version(self, server: VLLMServer, version: int, timeout: float) -> None:
        held = server.rpc("lgrpo_version", timeout)["version"]
        if held != version:
            raise StaleWeights(f"the vLLM server at {server.url} holds version {held} of the weights, not {version}")

    def _report(self, server: VLLMServer) -> dict[str, int]:
        """The server's own checksums."""
        try:
            assert self._transfer is not None
            report = self._transfer.report(server, self._layout)
        except AnsweredError as error:  # started again it would say the same
            raise WeightSyncError(f"the server does not tell which weights it holds: {error}") from error
        return {name: int(value, 16) for name, value in report.items()}

    # When a server fails

    def _recover_all(self, failures: Failures, epoch: int | None = None) -> None:
        """Replaces every server that failed, all at a time."""
        if not failures:
            return
        epochs = [self._epoch if epoch is None else epoch] * len(failures)
        with ThreadPoolExecutor(len(failures), thread_name_prefix="vllm-restart") as pool:
            try:
                list(pool.map(self._recover, failures, failures.values(), epochs))
            except BaseException:
                self._call_off()  # else it would be waited for
                raise

    def _recover(self, server: VLLMServer, failure: EngineFailure, epoch: int) -> VLLMServer | None:
        """A server in the place of one that failed, with the weights it held; None where the others must do.

        ``epoch`` is that of the generation or sync: one that was called off starts nothing any more.
        """
        start = time.perf_counter()
        with self._lock:
            self._num_replacing += 1
        try:
            return self._bring_back(server, failure, epoch)
        finally:
            with self._lock:
                self.recovery_seconds += time.perf_counter() - start
                self._num_replacing -= 1
                self._lock.notify_all()

    def _bring_back(self, server: VLLMServer, failure: EngineFailure, epoch: int) -> VLLMServer | None:
        while True:
            self._check_epoch(epoch)
            self._count(failure)
            try:
                return self._replace_server(server, failure, epoch)
            except EngineFailure as again:
                failure = again

    def _settle(self) -> None:
        """Waits until no server is being replaced. One that could not be is in its place still, and fails anew."""
        with self._lock:
            self._lock.wait_for(lambda: self._num_replacing == 0)

    def _count(self, failure: EngineFailure) -> None:
        """Notes a failure. An error where it is one too many."""
        with self._lock:
            if not isinstance(failure, LeftWaiting):
                self.faults["failures"] += 1
                self._num_failures += 1
            number = self._num_failures
        bear(failure, number, self.max_failures)

    def _replace_server(self, server: VLLMServer, failure: EngineFailure, epoch: int) -> VLLMServer | None:
        assert self._transfer is not None
        is_up = isinstance(failure, StaleWeights)  # then it lacks its weights, no more
        if server.process is None and not is_up and not self._comes_back(server, failure):
            return None
        others = [other for other in self._present() if other is not server]
        with self._transfer.files(others, self._layout):
            if server.process is None or is_up:
                new = VLLMServer(server.url, server.api_key, server.process, server.log)
                self._give_again(new, self._transfer)
            else:
                new = self._start_again(server, self._transfer, epoch)
        with self._lock:
            self._check_epoch(epoch)
            self._starting.discard(new)
            self.servers[self.servers.index(server)] = new
            self.faults["restarts"] += 1
        return new

    def _give_again(self, server: VLLMServer, transfer: FileTransfer) -> None:
        """The weights for a server that runs."""
        server.call("POST", "/pause?mode=abort", self.sync_timeout)
        transfer.read(server)
        self._resume(server)
        self._vouch(server)

    def _start_again(self, server: VLLMServer, transfer: FileTransfer, epoch: int) -> VLLMServer:
        """Another process in the place of one of ours, started from the folder."""
        server.kill()
        with self._lock:
            self._check_epoch(epoch)
            new = self._start(transfer, self.servers.index(server))
            self._starting.add(new)
        try:
            new.wait_until_ready(self.start_timeout)
            transfer.connected([new])
            self._vouch(new)
        except BaseException:
            new.kill()
            with self._lock:
                self._starting.discard(new)
            raise
        return new

    def _vouch(self, server: VLLMServer) -> None:
        """A server that was given the weights again holds what was sent, and what the ledger says was sent."""
        self._set_version(server, self._sent_version)
        if self.verify:
            checksum = self._sent.compare(self._report(server))
            recorded = {record.version: record.checksum for record in self.ledger}.get(self._sent_version, checksum)
            if checksum != recorded:
                raise WeightSyncError(
                    f"the vLLM server at {server.url} holds weights of checksum {checksum}, but version "
                    f"{self._sent_version} had {recorded}"
                )

    def _comes_back(self, server: VLLMServer, failure: EngineFailure) -> bool:
        """Whether a server of the user's is up again in time. If it is not, and no other is left, it is an error."""
        try:
            server.wait_until_ready(self.return_timeout)
        except EngineFailure:
            with self._lock:
                if self._present() == [server]:
                    raise EngineError(
                        f"{failure}. It was not up again within {self.return_timeout:g} s, and there is no other: "
                        f"start it, then {GO_ON}"
                    ) from failure
                server.is_given_up = True
            warnings.warn(
                f"{server.url} is not up again: the others go on, and the next sync looks for it", stacklevel=2
            )
            return False
        return True

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise EngineError("the engine was closed, or what it was at called off")

    def _call_off(self) -> None:
        """Nothing is replaced any more: what is being started ends."""
        with self._lock:
            self._epoch += 1
            starting, self._starting = self._starting, set()
        for server in starting:
            server.kill()


def numbering_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A server wants a tokenizer even where it is given ids and asked for ids: this one spells 7 as ``<7>``."""
    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<0>")
