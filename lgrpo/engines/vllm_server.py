"""vLLM as one or more servers over HTTP: token ids in, token ids out."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, final

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lgrpo.engines.base import EngineError, NoWeightsError, OnGroup, RolloutEngine, Sampling, completion_from, eos_ids
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.engines.server import VLLMServer
from lgrpo.engines.vllm import WHOLE_PROMPTS, check_lengths, import_vllm
from lgrpo.engines.vllm_transfer import TRANSFERS, FileTransfer
from lgrpo.engines.vllm_weights import Layout, engine_layout
from lgrpo.functional import stream_seed
from lgrpo.types import Completion, PolicyWeights, Prompt


def numbering_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A server wants a tokenizer even where it is given ids and asked for ids: this one spells 7 as ``<7>``."""
    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<0>")


@final
class VLLMServerEngine(RolloutEngine):
    """vLLM servers, started and stopped here or already running. The next rollout is sampled while this one trains.

    Weights travel as safetensors files in shared memory, which the servers read: trainer and servers share a machine,
    or a file system. Where they share a GPU, ``transfer: ipc`` spares the files.
    """

    can_overlap = True

    def __init__(
        self,
        num_servers: int = 1,
        urls: list[str] | None = None,
        api_key_env: str = "LGRPO_VLLM_API_KEY",
        served_model_name: str = "policy",
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        gpu_memory_utilization: float = 0.9,
        kv_cache_gib: float | None = None,
        tensor_parallel_size: int = 1,
        seeded: bool | None = None,
        requests_at_a_time: int = 64,
        transfer: Literal["file", "ipc"] = "file",
        weights_dir: str | None = None,
        start_timeout: float = 600.0,
        sync_timeout: float = 300.0,
        timeout: float = 1800.0,
        verify: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            num_servers: How many to start, where no ``urls`` are given.
            urls: Servers that run already. Each needs ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
                lgrpo.engines.vllm_weights.WeightReport``.
            api_key_env: Environment variable with the key of those servers. Ones started here have keys of their own.
            served_model_name: Under which the servers answer.
            dtype: Of the servers' weights; by default the policy's.
            max_model_len: Most tokens of prompt and completion together; by default the model's.
            max_num_seqs: Completions a server decodes at a time.
            gpu_memory_utilization: Share of its GPU's memory a server takes.
            kv_cache_gib: Size of a server's key-value cache; on a CPU 0.25 by default.
            tensor_parallel_size: GPUs a server is spread over.
            seeded: Each request has a seed of its own, so that runs repeat. By default on CPUs only.
            requests_at_a_time: Prompts in flight at each server.
            transfer: How weights travel: as files, or as CUDA memory of the one GPU that trainer and servers share.
                vLLM before 0.28 wants ``ray`` installed for ``ipc``; servers of your own want
                ``--weight-transfer-config '{"backend": "ipc"}'``.
            weights_dir: Folder for the weights' files; by default one in shared memory.
            start_timeout: Seconds until a server must answer.
            sync_timeout: Seconds each step of a sync may take.
            timeout: Seconds a generation may take.
            verify: Compare the servers' own checksums with the policy's after every sync.
            options: Any other flag of the server, by its name.
        """
        super().__init__()
        if num_servers < 1:
            raise ValueError(f"num_servers is {num_servers}; at least 1 is needed")
        if urls is not None and not urls:
            raise ValueError("urls is an empty list: leave it out to have servers started")
        self.num_servers = num_servers
        self.urls = urls
        self.api_key_env = api_key_env
        self.served_model_name = served_model_name
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.tensor_parallel_size = tensor_parallel_size
        self.seeded = seeded
        self.requests_at_a_time = requests_at_a_time
        self.transfer: Literal["file", "ipc"] = transfer
        self.weights_dir = weights_dir
        self.start_timeout = start_timeout
        self.sync_timeout = sync_timeout
        self.timeout = timeout
        self.verify = verify
        self.options = options or {}
        self.servers: list[VLLMServer] = []
        self._transfer: FileTransfer | None = None
        self._config: PretrainedConfig | None = None
        self._layout: Layout = {}
        self._longest = 0

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        sent = Sent(dtype=self.dtype)
        transfer = self._prepare(weights)
        try:
            if self.servers:
                self._replace_weights(transfer, weights, sent)
            else:
                transfer.write(weights, sent)
                self._connect(transfer, next(iter(weights))[1].dtype)
                if self.urls is not None:
                    self._replace_weights(transfer, weights, sent)
            for server in self.servers:
                server.rpc("lgrpo_set_version", self.sync_timeout, version=version)
        except EngineError as error:
            if not self.servers:  # it did not even start
                raise
            raise WeightSyncError(f"the sync failed: {error}") from error
        self._config = weights.config
        self._layout = engine_layout(sent.shapes)
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        if not self.verify:
            return sent.checksums
        held: dict[str, int] = {}
        for server in self.servers:
            try:
                report = server.rpc("lgrpo_checksums", self.sync_timeout, layout=self._layout)
            except EngineError as error:
                raise WeightSyncError(f"the server does not tell which weights it holds: {error}") from error
            held = {name: int(value, 16) for name, value in report.items()}
            sent.compare(held)
        return held

    def held_weights(self) -> dict[str, Tensor]:
        if self._transfer is None or self._config is None:
            raise NoWeightsError
        return self._transfer.held_weights(self.servers, self._layout)

    def held_config(self) -> PretrainedConfig:
        if self._config is None:
            raise NoWeightsError
        return self._config

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        step, version = self.holds()
        check_lengths(prompts, sampling, self._longest)
        self._check_versions(version)
        deadline = time.monotonic() + self.timeout
        eos = sorted(eos_ids(self.held_config(), tokenizer))
        busy = [0] * len(self.servers)
        turn = threading.Lock()

        def answer(place: int, prompt: Prompt) -> list[Completion]:
            with turn:  # the server with the fewest prompts in flight
                least = busy.index(min(busy))
                busy[least] += 1
            try:
                group = ask(prompt, self.servers[least])
            finally:
                with turn:
                    busy[least] -= 1
            if on_group is not None:
                on_group(place, group)
            return group

        def ask(prompt: Prompt, server: VLLMServer) -> list[Completion]:
            body = {
                "model": self.served_model_name,
                "prompt": prompt.token_ids,
                "n": num_samples,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "max_tokens": sampling.max_tokens,
                "seed": stream_seed(seed, prompt.position) if self._is_seeded else None,
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": eos,
                "cache_salt": f"v{version}",
            }
            remaining = max(1.0, deadline - time.monotonic())
            choices = server.call("POST", "/v1/completions", remaining, json=body)["choices"]
            return [
                completion_from(
                    choice["token_ids"],
                    choice["logprobs"]["token_logprobs"],
                    choice["finish_reason"],
                    sampling,
                    tokenizer,
                    step,
                    version,
                )
                for choice in sorted(choices, key=lambda choice: choice["index"])
            ]

        workers = min(len(prompts), self.requests_at_a_time * len(self.servers))
        with ThreadPoolExecutor(workers, thread_name_prefix="vllm-request") as pool:
            try:
                groups = list(pool.map(answer, range(len(prompts)), prompts))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._check_versions(version)
        return groups

    def close(self) -> None:
        self.forget()
        for server in self.servers:
            server.close()
        self.servers = []
        atexit.unregister(self.close)
        if self._transfer is not None:
            shutil.rmtree(self._transfer.folder, ignore_errors=True)
            self._transfer = None

    # Inside

    def _prepare(self, weights: PolicyWeights) -> FileTransfer:
        """The way weights take, and the folder a server starts from."""
        if self.transfer == "ipc" and not torch.cuda.is_available():
            raise EngineError("transfer 'ipc' shares the memory of a GPU, and there is none here: use 'file'")
        if self._transfer is None:
            shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
            folder = Path(tempfile.mkdtemp(prefix="lgrpo-weights-", dir=self.weights_dir or shared))
            folder.chmod(0o700)
            self._transfer = TRANSFERS[self.transfer](folder, self.sync_timeout)
            weights.config.save_pretrained(folder)
            numbering_tokenizer(weights.config.get_text_config().vocab_size).save_pretrained(folder)
        return self._transfer

    def _connect(self, transfer: FileTransfer, dtype: torch.dtype) -> None:
        """Starts the servers, or finds the ones the user runs."""
        if self.urls is not None:
            key = os.environ.get(self.api_key_env)
            self._is_seeded = bool(self.seeded)
            servers = [VLLMServer(url, key) for url in self.urls]
        else:
            vllm = import_vllm()
            on_cpu = vllm.platforms.current_platform.is_cpu()
            self._is_seeded = on_cpu if self.seeded is None else self.seeded
            atexit.register(self.close)  # whatever ends the run ends its servers
            servers = [self._start(transfer, dtype, on_cpu, index) for index in range(self.num_servers)]
        try:
            for server in servers:
                server.wait_until_ready(self.start_timeout)
                self._check_model(server)
            transfer.connected(servers)
        except BaseException:
            for server in servers:
                server.close()
            raise
        self.servers = servers

    def _start(self, transfer: FileTransfer, dtype: torch.dtype, on_cpu: bool, index: int) -> VLLMServer:
        cache = self.kv_cache_gib if self.kv_cache_gib is not None else (0.25 if on_cpu else None)
        flags = (
            {
                "served_model_name": self.served_model_name,
                "dtype": str(self.dtype or dtype).removeprefix("torch."),
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
                "tensor_parallel_size": self.tensor_parallel_size,
                "enforce_eager": on_cpu,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "worker_extension_cls": "lgrpo.engines.vllm_weights.WeightReport",
                "middleware": "lgrpo.engines.server.RequireKey",
            }
            | (WHOLE_PROMPTS if on_cpu and self._is_seeded else {})
            | transfer.flags
            | self.options
        )
        environment = {"VLLM_NO_USAGE_STATS": "1"} | transfer.environment
        if on_cpu:
            environment |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "TORCHDYNAMO_DISABLE": "1",
            }
        elif (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) and "," in visible:
            devices = visible.split(",")
            first = len(devices) - (index + 1) * self.tensor_parallel_size  # the last ones: the first are for training
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + self.tensor_parallel_size])
        folder = transfer.folder
        return VLLMServer.start(folder, folder / f"server-{index}.log", flags, environment)

    def _check_model(self, server: VLLMServer) -> None:
        served = server.call("GET", "/v1/models", self.sync_timeout)["data"]
        names = [model["id"] for model in served]
        if self.served_model_name not in names:
            raise EngineError(f"the vLLM server at {server.url} serves {names}, not {self.served_model_name!r}")
        longest = served[names.index(self.served_model_name)].get("max_model_len") or 0
        self._longest = min(self._longest or longest, longest)

    def _replace_weights(self, transfer: FileTransfer, weights: PolicyWeights, sent: Sent) -> None:
        """Drains every server, gives it the weights, and empties its prefix cache."""
        for server in self.servers:
            server.call("POST", "/pause?mode=wait", self.sync_timeout)
        transfer.send(self.servers, weights, sent)
        for server in self.servers:
            if not server.call("POST", "/reset_prefix_cache", self.sync_timeout)["success"]:
                raise WeightSyncError(f"the prefix cache of the vLLM server at {server.url} is in use")
            server.call("POST", "/resume", self.sync_timeout)

    def _check_versions(self, version: int) -> None:
        for server in self.servers:
            held = server.rpc("lgrpo_version", self.sync_timeout)["version"]
            if held != version:
                raise EngineError(
                    f"the vLLM server at {server.url} holds version {held} of the weights, not {version}: was it "
                    "restarted?"
                )
