"""Interface of the ways in which weights reach vLLM servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.recovery import EngineFailure, for_each_healthy
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.vllm.layout import engine_layout
from lgrpo.engines.weight_files import write_folder
from lgrpo.weights import PolicyWeights

Failures = dict[VLLMServer, EngineFailure]
"""Failed servers and the reason of each."""


class PeerFailure(EngineFailure):
    """A healthy server is blocked because another one failed. Counts as part of that failure."""


class WeightTransfer(ABC):
    """Way in which weights reach vLLM servers.

    ``write`` puts the first weights into ``folder``, servers start from there, then ``on_connect`` is called. Every
    later sync calls ``send``. After each sync ``sent`` is set, to which all other methods refer. A server that failed
    is restarted inside ``files``, either from the folder, followed by ``on_connect``, or by ``reload`` if its process
    still runs. ``close`` comes last.
    """

    flags: Mapping[str, Any] = {}
    """Flags that servers must be started with."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that servers must be started with."""
    needs_separate_gpus = False
    """Whether trainer and servers must each have their own GPUs."""
    adapter_rank: int | None = None
    """Rank of the LoRA adapters it sends; None if it sends whole weights."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder = folder
        """Folder that trainer and servers share. Servers start from it."""
        self.timeout = timeout
        """Seconds each request may take."""
        self.model: str | None = None
        """Name of the model to request completions from; None for the one the servers were started with."""
        self.sent = WeightManifest()
        """Weights of the last sync."""

    def send(self, servers: Sequence[VLLMServer], weights: PolicyWeights, sent: WeightManifest) -> Failures:
        """Replace the weights of servers that have no requests in flight, and return the servers that failed.

        The weights are recorded in ``sent``, completely even if all servers failed.
        """
        failures: Failures = {}
        self.write(weights, sent)
        for_each_healthy(servers, failures, self.reload)
        return failures

    @abstractmethod
    def held_weights(self, servers: Sequence[VLLMServer]) -> dict[str, Tensor]:
        """Return the weights that these servers hold."""

    def write(self, weights: PolicyWeights, sent: WeightManifest) -> None:
        """Write the weights into the folder and record them in ``sent``."""
        write_folder(self.folder, sent.stream(weights))

    def reload(self, server: VLLMServer) -> None:
        """Make a running server load the weights from the folder."""
        server.rpc("reload_weights", self.timeout, weights_path=str(self.folder))

    def checksums(self, server: VLLMServer) -> dict[str, int]:
        """Return the checksums that a server computes of its weights."""
        return self._checksums(server, self.sent)

    @contextmanager
    def files(self, others: Sequence[VLLMServer]) -> Iterator[None]:
        """Keep the weights in the folder while a server is restarted; ``others`` hold the same weights."""
        yield

    def on_connect(self, servers: Sequence[VLLMServer]) -> None:  # noqa: B027
        """Finish the start of servers that answer for the first time."""

    def close(self) -> None:  # noqa: B027
        """Release all resources that are shared with servers."""

    def _checksums(self, server: VLLMServer, sent: WeightManifest) -> dict[str, int]:
        report = server.rpc("lgrpo_checksums", self.timeout, layout=engine_layout(sent.shapes))
        return parse_checksums(report)


def parse_checksums(report: Mapping[str, str]) -> dict[str, int]:
    """Return checksums as integers. JSON would round them, so servers report them in hexadecimal.

    >>> parse_checksums({"norm.weight": "00000000000000ff"})
    {'norm.weight': 255}
    """
    return {name: int(value, 16) for name, value in report.items()}
