"""Start of vLLM servers, and connection to servers that the user runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.engines.processes import visible_devices
from lgrpo.engines.recovery import EngineError, Timeouts
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.transfer.base import WeightTransfer
from lgrpo.engines.servers.transfer.nccl import check_separate_gpus
from lgrpo.engines.vllm.kept import MAX_LOGPROBS
from lgrpo.engines.vllm.runtime import BATCH_INVARIANT, WHOLE_PROMPTS, check_batch_invariance, import_vllm

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution that tokens are sampled from."""
WORKER_EXTENSION = "lgrpo.engines.vllm.worker_extension.WeightReport"


@dataclass(kw_only=True)
class ServerLauncher:
    """Starts servers with the settings of ``VLLMServerEngine``, or connects to ``urls``."""

    num_servers: int
    urls: Sequence[str] | None
    api_key_env: str
    served_model_name: str
    kv_cache_gib: float | None
    tensor_parallel_size: int
    devices: Sequence[Sequence[int]] | None
    seeded: bool | None
    batch_invariant: bool
    flags: Mapping[str, Any]
    """Flags of the server that are passed on as they are."""
    environment_variables: Mapping[str, str]
    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of the policy, once it is known."""

    def __post_init__(self) -> None:
        check_count("num_servers", self.num_servers, at_least=1)
        if self.urls is not None and not self.urls:
            raise ValueError("urls is an empty list: leave it out to start servers")
        if self.batch_invariant and self.urls is not None:
            raise ValueError(
                "batch_invariant applies to servers that are started here, and urls names running servers: start them "
                "with VLLM_BATCH_INVARIANT=1"
            )
        if self.devices is not None:
            self._check_devices(self.devices)

    @cached_property
    def is_on_cpu(self) -> bool:
        """Whether servers that are started here run on a CPU."""
        return import_vllm().platforms.current_platform.is_cpu()

    @property
    def is_seeded(self) -> bool:
        """Whether every request has a seed."""
        if self.seeded is not None:
            return self.seeded
        return self.urls is None and (self.batch_invariant or self.is_on_cpu)

    def connect(
        self, transfer: WeightTransfer, dtype: torch.dtype | None, timeouts: Timeouts
    ) -> tuple[list[VLLMServer], int]:
        """Start all servers, or find those of ``urls``, and wait until they answer. If one fails, all are ended.

        Returns the servers, and the most tokens of prompt and completion that all of them accept.
        """
        servers: list[VLLMServer] = []
        try:
            if self.urls is not None:
                key = os.environ.get(self.api_key_env)
                servers += [VLLMServer(url, key) for url in self.urls]
                timeout = min(10.0, timeouts.start)  # they should be running already
            else:
                if transfer.needs_separate_gpus:
                    self.check_separate_gpus()
                for index in range(self.num_servers):
                    servers.append(self.start(transfer, index, dtype))
                timeout = timeouts.start
            lengths = []
            for server in servers:
                server.wait_until_ready(timeout)
                lengths.append(self._check_model(server, timeouts.sync))
            transfer.on_connect(servers)
        except BaseException:
            for server in servers:
                server.close()
            raise
        return servers, min(lengths)

    def start(
        self,
        transfer: WeightTransfer,
        index: int,
        dtype: torch.dtype | None,
        predecessor: VLLMServer | None = None,
    ) -> VLLMServer:
        """Start one server from the transfer's folder. ``predecessor`` is one whose port and key it takes over."""
        cache = self.kv_cache_gib if self.kv_cache_gib is not None else (0.25 if self.is_on_cpu else None)
        flags = {
            "served_model_name": self.served_model_name,
            "dtype": str(dtype).removeprefix("torch."),
            "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.is_on_cpu,
            "logprobs_mode": LOGPROBS_MODE,
            "max_logprobs": MAX_LOGPROBS,
            "generation_config": "vllm",
            "worker_extension_cls": WORKER_EXTENSION,
            "middleware": "lgrpo.engines.servers.client.RequireKey",
            **(WHOLE_PROMPTS if self.is_on_cpu and self.is_seeded else {}),
            **transfer.flags,
            **self.flags,
        }
        environment = {"VLLM_NO_USAGE_STATS": "1", **transfer.environment}
        if self.batch_invariant:
            check_batch_invariance(self.is_on_cpu)
            environment |= BATCH_INVARIANT
        if self.is_on_cpu:
            environment |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "TORCHDYNAMO_DISABLE": "1",
            }
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices_of(index, visible_devices()))
        environment |= self.environment_variables
        log = transfer.folder / f"server-{index}.log"
        return VLLMServer.start(transfer.folder, log, flags, environment, predecessor)

    # GPUs

    def devices_of(self, index: int, visible: Sequence[str]) -> list[str]:
        """Return the GPUs of a server. By default servers take the last of the visible ones."""
        size, count = self.tensor_parallel_size, len(visible)
        if self.devices is not None:
            chosen = list(self.devices[index])
        else:
            chosen = [0] if count == 1 else list(range(count - (index + 1) * size, count - index * size))
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise EngineError(
                f"server {index} is assigned GPU {wrong[0]}, but this process sees {count} (0 to {count - 1}): correct "
                "devices, num_servers, tensor_parallel_size or CUDA_VISIBLE_DEVICES"
                if self.devices is not None
                else f"{self.num_servers} servers of {size} GPUs each need {self.num_servers * size}, and this process "
                f"sees {count}"
            )
        return [visible[number] for number in chosen]

    def check_separate_gpus(self) -> None:
        """Raise an error if a server shares a GPU with the trainer or with another server."""
        own_host = os.environ.get("NCCL_HOSTID")
        if self.environment_variables.get("NCCL_HOSTID", own_host) == own_host:  # otherwise NCCL sees two machines
            visible = visible_devices()
            servers = [self.devices_of(index, visible) for index in range(self.num_servers)]
            check_separate_gpus(visible[torch.cuda.current_device()], servers)

    def _check_devices(self, devices: Sequence[Sequence[int]]) -> None:
        """Raise an error if ``devices`` contradicts the other settings."""
        if self.urls is not None:
            raise ValueError("devices applies to servers that are started here, and urls names running servers")
        if len(devices) != self.num_servers:
            raise ValueError(f"devices lists the GPUs of {len(devices)} servers, but num_servers is {self.num_servers}")
        size = self.tensor_parallel_size
        for index, numbers in enumerate(devices):
            if len(numbers) != size:
                raise ValueError(
                    f"devices assigns {len(numbers)} GPUs to server {index}, but tensor_parallel_size is {size}"
                )
            if len(set(numbers)) < len(numbers) or min(numbers) < 0:
                raise ValueError(
                    f"devices assigns the GPUs {numbers} to server {index}: use each number at most once, 0 or above"
                )

    # Models and tokenizers

    def _check_model(self, server: VLLMServer, timeout: float) -> int:
        """Return the most tokens a server accepts, or raise an error if its completions cannot be used."""
        served = server.call("GET", "/v1/models", timeout)["data"]
        names = [model["id"] for model in served]
        if self.served_model_name not in names:
            raise EngineError(f"the vLLM server at {server.url} serves {names}, not {self.served_model_name!r}")
        if server.process is None and self.tokenizer is not None:
            self._check_tokenizer(server, self.tokenizer, timeout)
        check_logprobs_mode(server, timeout)
        return served[names.index(self.served_model_name)].get("max_model_len") or 0

    def _check_tokenizer(self, server: VLLMServer, tokenizer: PreTrainedTokenizerBase, timeout: float) -> None:
        """Raise an error if a server the user runs has another tokenizer: only token ids are exchanged."""

        def ids(text: str) -> list[int]:
            body = {"model": self.served_model_name, "prompt": text, "add_special_tokens": False}
            return server.call("POST", "/tokenize", timeout, json=body)["tokens"]

        try:
            if ids("<7>") == [7]:  # a server that another run of lgrpo started: see ``numbering_tokenizer``
                return
        except EngineError:  # it has no tokenizer
            return
        text = tokenizer.decode(range(min(200, len(tokenizer))), skip_special_tokens=True)
        own, other = tokenizer(text, add_special_tokens=False).input_ids, ids(text)
        if own != other:
            index = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), 0)
            raise EngineError(
                f"the vLLM server at {server.url} has another tokenizer than the policy: token {index} of one text is "
                f"{own[index : index + 1]} here and {other[index : index + 1]} there. Start it with the policy's "
                "tokenizer (--tokenizer)"
            )


def check_logprobs_mode(server: VLLMServer, timeout: float) -> None:
    """Raise an error if a server returns log-probabilities of another distribution than it samples from.

    vLLM's default is ``raw_logprobs``, those at temperature 1.
    """
    try:
        mode = server.rpc("lgrpo_logprobs_mode", timeout)["logprobs_mode"]
    except EngineError as error:
        raise EngineError(
            f"the vLLM server at {server.url} does not say which log-probabilities it returns. Start it with "
            f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {WORKER_EXTENSION} ({error})"
        ) from error
    if mode != LOGPROBS_MODE:
        raise EngineError(
            f"the vLLM server at {server.url} returns {mode}, not log-probabilities of the distribution that tokens "
            f"are sampled from, so ratios would be wrong. Start it with --logprobs-mode {LOGPROBS_MODE}"
        )
