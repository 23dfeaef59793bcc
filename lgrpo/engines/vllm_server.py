"""vLLM as one or more servers over HTTP: token ids in, token ids out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, final

import torch
from transformers import PreTrainedTokenizerBase

from lgrpo.engines.base import EngineError, OnGroup, Sampling
from lgrpo.engines.children import visible_devices
from lgrpo.engines.completions import completion_from, eos_ids
from lgrpo.engines.dispatch import Dispatch
from lgrpo.engines.server import VLLMServer
from lgrpo.engines.shared_fleet import SharedFleet
from lgrpo.engines.vllm_nccl import NCCLTransfer, check_apart
from lgrpo.engines.vllm_process import WHOLE_PROMPTS, check_lengths, import_vllm
from lgrpo.engines.vllm_transfer import FileTransfer
from lgrpo.functional import stream_seed
from lgrpo.types import Completion, PolicyWeights, Prompt


@final
class VLLMServerEngine(SharedFleet):
    """vLLM servers, started and stopped here or already running. The next rollout is sampled while this one trains.

    Weights travel as safetensors files in shared memory, which the servers read: trainer and servers share a machine,
    or a file system. ``transfer: ipc`` spares the files where they share a GPU, ``transfer: nccl`` where they do not.

    A server that ends, hangs or answers with an error is started again with the weights it held, and the prompts it
    left unanswered are asked again; meanwhile the others go on.
    """

    can_overlap = True
    follows_precision = True

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
        devices: list[list[int]] | None = None,
        seeded: bool | None = None,
        requests_at_a_time: int = 64,
        transfer: Literal["file", "ipc", "nccl"] = "file",
        transfer_address: str | None = None,
        weights_dir: str | None = None,
        start_timeout: float = 600.0,
        sync_timeout: float = 300.0,
        timeout: float = 1800.0,
        hang_timeout: float = 60.0,
        return_timeout: float = 120.0,
        max_failures: int = 3,
        adapters: bool = True,
        verify: bool = True,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            num_servers: How many to start, where no ``urls`` are given.
            urls: Servers that run already. Each needs ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
                lgrpo.engines.vllm_weights.WeightReport``.
            api_key_env: Environment variable with the key of those servers. Ones started here have keys of their own.
            served_model_name: Under which the servers answer.
            dtype: Of the servers' weights; by default what the trainer computes in, bfloat16 on a GPU where its
                precision is bf16-mixed; else the policy's. Servers of yours must have the same.
            max_model_len: Most tokens of prompt and completion together; by default the model's.
            max_num_seqs: Completions a server decodes at a time.
            gpu_memory_utilization: Share of its GPU's memory a server takes.
            kv_cache_gib: Size of a server's key-value cache; on a CPU 0.25 by default.
            tensor_parallel_size: GPUs a server is spread over.
            devices: Numbers of the GPUs of each server, such as [[6], [7]], as this process counts them. By default the
                last ones: the first are for training.
            seeded: Each request has a seed of its own, so that runs repeat. By default on CPUs only.
            requests_at_a_time: Prompts in flight at each server.
            transfer: How weights travel: as files; ``ipc``, as CUDA memory of the one GPU that trainer and servers
                share; or ``nccl``, from the trainer's GPU to servers on other GPUs or machines. vLLM before 0.28 wants
                ``ray`` installed for ``ipc``; servers of your own want ``--weight-transfer-config '{"backend":
                "ipc"}'``, or ``"nccl"``.
            transfer_address: With ``nccl``, the IPv4 address of rank 0's machine where servers find it; by default
                the one that faces them, for servers started here the loopback address.
            weights_dir: Folder for the weights' files; by default one in shared memory. Servers start from it, and
                with ``ipc`` and ``nccl`` write into it what a checkpoint keeps of them.
            start_timeout: Seconds until a server must answer.
            sync_timeout: Seconds each step of a sync may take; a server that takes longer has failed.
            timeout: Seconds a generation may take, from the last time a server was replaced on.
            hang_timeout: Seconds after which a server that says nothing while it generates has failed.
            return_timeout: Seconds to wait until one of ``urls`` that failed is up again. After that the others go on
                without it, and the next sync looks for it.
            max_failures: Failures of servers a generation, or a sync, recovers from; the next one stops the run.
            adapters: Of a policy with LoRA, only the adapters travel at a sync, and the servers apply them. Servers of
                your own want ``--enable-lora --max-loras 1 --max-lora-rank …``, the policy's model, and
                ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. Without it, the merged weights travel.
            verify: Compare the servers' own checksums with the policy's after every sync.
            options: Any other flag of the server, by its name.
            environment: Variables for servers that are started here, beside those of this process.
        """
        super().__init__(
            transfer=transfer,
            transfer_address=transfer_address,
            weights_dir=weights_dir,
            dtype=None if dtype is None else getattr(torch, dtype),
            start_timeout=start_timeout,
            sync_timeout=sync_timeout,
            timeout=timeout,
            return_timeout=return_timeout,
            max_failures=max_failures,
            adapters=adapters,
            verify=verify,
        )
        if num_servers < 1:
            raise ValueError(f"num_servers is {num_servers}; at least 1 is needed")
        if urls is not None and not urls:
            raise ValueError("urls is an empty list: leave it out to have servers started")
        if devices is not None:
            check_devices(devices, num_servers, tensor_parallel_size, urls)
        if transfer_address is not None and transfer != "nccl":
            raise ValueError(f"transfer_address is for transfer 'nccl', and transfer is {transfer!r}")
        if max_failures < 0:
            raise ValueError(f"max_failures is {max_failures}; 0 stops at the first failure")
        if hang_timeout <= 0:
            raise ValueError(f"hang_timeout is {hang_timeout}; a server needs some seconds to answer")
        self.num_servers = num_servers
        self.urls = urls
        self.api_key_env = api_key_env
        self.served_model_name = served_model_name
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.tensor_parallel_size = tensor_parallel_size
        self.devices = devices
        self.seeded = seeded
        self.requests_at_a_time = requests_at_a_time
        self.hang_timeout = hang_timeout
        self.options = options or {}
        self.environment = environment or {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        self._tokenizer = tokenizer

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
        eos = sorted(eos_ids(self.held_config(), tokenizer))
        groups: dict[int, list[Completion]] = {}
        self._settle()
        self._num_failures, epoch = 0, self._epoch

        def ask(server: VLLMServer, place: int) -> list[Completion]:
            prompt = prompts[place]
            body = {
                "model": self._model or self.served_model_name,
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
            choices = server.call("POST", "/v1/completions", self.timeout, json=body)["choices"]
            check(server)  # now: before it answered, it may have been started again
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

        def check(server: VLLMServer) -> None:
            """Through to the worker: a server whose worker hangs is still in good health."""
            self._check_version(server, version, self.hang_timeout)

        def keep(place: int, group: list[Completion]) -> None:
            groups[place] = group
            if on_group is not None:
                on_group(place, group)

        dispatch = Dispatch[VLLMServer, list[Completion]](
            len(prompts),
            ask=ask,
            check=check,
            replace=lambda server, failure: self._recover(server, failure, epoch),
            at_a_time=self.requests_at_a_time,
            period=min(5.0, self.hang_timeout),
            timeout=self.timeout,
        )
        try:
            with self._used():
                dispatch.run(self._present(), keep)
        except BaseException:
            self._call_off()
            raise
        return [groups[place] for place in range(len(prompts))]

    # Inside

    def _connect(self, transfer: FileTransfer, weights: PolicyWeights) -> list[VLLMServer]:
        servers: list[VLLMServer] = []
        try:
            if self.urls is not None:
                key = os.environ.get(self.api_key_env)
                self._is_seeded = bool(self.seeded)
                servers += [VLLMServer(url, key) for url in self.urls]
                patience = min(10.0, self.start_timeout)  # they should be running already
            else:
                vllm = import_vllm()
                self._on_cpu = vllm.platforms.current_platform.is_cpu()
                self._is_seeded = self._on_cpu if self.seeded is None else self.seeded
                self._server_dtype = self._server_dtype or next(iter(weights))[1].dtype
                if isinstance(transfer, NCCLTransfer):
                    self._check_apart()
                for index in range(self.num_servers):
                    servers.append(self._start(transfer, index))
                patience = self.start_timeout
            for server in servers:
                server.wait_until_ready(patience)
                self._check_model(server)
            transfer.connected(servers)
        except BaseException:
            for server in servers:
                server.close()
            raise
        return servers

    def _start(self, transfer: FileTransfer, index: int) -> VLLMServer:
        on_cpu = self._on_cpu
        cache = self.kv_cache_gib if self.kv_cache_gib is not None else (0.25 if on_cpu else None)
        flags = (
            {
                "served_model_name": self.served_model_name,
                "dtype": str(self._server_dtype).removeprefix("torch."),
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
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices_of(index, visible_devices()))
        environment |= self.environment
        folder = transfer.folder
        before = self.servers[index] if self._line is not None and self.servers else None  # other ranks know it
        return VLLMServer.start(folder, folder / f"server-{index}.log", flags, environment, before)

    def _check_apart(self) -> None:
        own_host = os.environ.get("NCCL_HOSTID")
        if self.environment.get("NCCL_HOSTID", own_host) == own_host:  # else NCCL takes them for two machines
            visible = visible_devices()
            servers = [self._devices_of(index, visible) for index in range(self.num_servers)]
            check_apart(visible[torch.cuda.current_device()], servers)

    def _devices_of(self, index: int, visible: list[str]) -> list[str]:
        """The GPUs of a server, of those this process sees."""
        size, count = self.tensor_parallel_size, len(visible)
        if self.devices is not None:
            wanted = self.devices[index]
        elif count == 1:
            wanted = [0]
        elif self.transfer == "ipc":
            wanted = [torch.cuda.current_device()]
        else:
            wanted = list(range(count - (index + 1) * size, count - index * size))
        if wrong := [number for number in wanted if not 0 <= number < count]:
            raise EngineError(
                f"server {index} is to run on GPU {wrong[0]}, but this process sees {count} (0 to {count - 1}): mend "
                "devices, num_servers, tensor_parallel_size or CUDA_VISIBLE_DEVICES"
                if self.devices is not None
                else f"{self.num_servers} servers of {size} GPUs each need {self.num_servers * size}, and this process "
                f"sees {count}"
            )
        return [visible[number] for number in wanted]

    def _check_model(self, server: VLLMServer) -> None:
        served = server.call("GET", "/v1/models", self.sync_timeout)["data"]
        names = [model["id"] for model in served]
        if self.served_model_name not in names:
            raise EngineError(f"the vLLM server at {server.url} serves {names}, not {self.served_model_name!r}")
        if server.process is None and self._tokenizer is not None:
            self._check_tokenizer(server, self._tokenizer)
        longest = served[names.index(self.served_model_name)].get("max_model_len") or 0
        self._longest = min(self._longest or longest, longest)

    def _check_tokenizer(self, server: VLLMServer, tokenizer: PreTrainedTokenizerBase) -> None:
        """A server of the user's must have the policy's: ids are all that travels, and would mean other text."""

        def ids(text: str) -> list[int]:
            body = {"model": self.served_model_name, "prompt": text, "add_special_tokens": False}
            return server.call("POST", "/tokenize", self.sync_timeout, json=body)["tokens"]

        try:
            if ids("<7>") == [7]:  # one that lgrpo started spells ids, and knows no text
                return
        except EngineError:  # it has none
            return
        text = tokenizer.decode(range(min(200, len(tokenizer))), skip_special_tokens=True)
        own, theirs = tokenizer(text, add_special_tokens=False).input_ids, ids(text)
        if own != theirs:
            place = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), 0)
            raise EngineError(
                f"the vLLM server at {server.url} has another tokenizer than the policy: of one text, token {place} is "
                f"{own[place : place + 1]} here and {theirs[place : place + 1]} there, so ids would mean other text. "
                "Start it with the policy's (--tokenizer)"
            )


def check_devices(devices: list[list[int]], num_servers: int, size: int, urls: list[str] | None) -> None:
    """Refuses GPUs that do not go with the other settings.

    >>> check_devices([[6], [7]], 2, 1, None)
    """
    if urls is not None:
        raise ValueError("devices is for servers that are started here, and urls names servers that run already")
    if len(devices) != num_servers:
        raise ValueError(f"devices names the GPUs of {len(devices)} servers, but num_servers is {num_servers}")
    for index, numbers in enumerate(devices):
        if len(numbers) != size:
            raise ValueError(f"devices gives server {index} {len(numbers)} GPUs, but tensor_parallel_size is {size}")
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise ValueError(f"devices gives server {index} the GPUs {numbers}: each is a number from 0 on, named once")
