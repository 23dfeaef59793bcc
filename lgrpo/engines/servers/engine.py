"""vLLM servers over HTTP as an engine: token ids in, token ids out."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.manifest import SyncRecord, WeightManifest
from lgrpo.engines.recovery import FailureBudget, Faults, Timeouts
from lgrpo.engines.servers.balancer import LoadBalancer
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.group import ServerGroup
from lgrpo.engines.servers.launch import ServerLauncher
from lgrpo.engines.servers.rank_zero import Weights
from lgrpo.engines.servers.requests import ServerRequests, keep_or_leave
from lgrpo.engines.servers.shared import SharedServers
from lgrpo.engines.servers.transfer.settings import TransferSettings
from lgrpo.engines.vllm.runtime import check_context_length, check_vllm_installed
from lgrpo.types import Completion, Prompt
from lgrpo.weights import PolicyWeights

Result = TypeVar("Result")


@final
class VLLMServerEngine(RolloutEngine):
    """vLLM servers that the engine starts and stops, or that run already. They sample while the trainer updates.

    By default weights are sent as safetensors files in shared memory, so trainer and servers must share a machine or a
    file system. ``transfer: nccl`` sends them between GPUs instead.

    If a server ends, hangs or answers with an error, it is restarted with the weights it held, and its unanswered
    prompts are sent again; meanwhile the other servers continue. Several training ranks share the servers of rank 0.
    """

    can_overlap = True
    can_continue = True
    returns_kept = "with top_k"
    has_own_device = True
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
        batch_invariant: bool = False,
        requests_at_a_time: int = 64,
        transfer: Literal["file", "nccl"] = "file",
        transfer_address: str | None = None,
        weights_dir: str | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        max_failures: int = 3,
        adapters: bool = True,
        verify: bool = True,
        options: dict[str, Any] | None = None,
        environment_variables: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            num_servers: Number of servers to start if no ``urls`` are given.
            urls: Servers that are already running. Each needs ``VLLM_SERVER_DEV_MODE=1``, ``--logprobs-mode
                processed_logprobs`` and ``--worker-extension-cls
                lgrpo.engines.vllm.worker_extension.WeightReport``.
            api_key_env: Environment variable with the key of ``urls``. Servers started here get new keys.
            served_model_name: Name of the model in requests.
            dtype: Precision of the servers' weights; by default the trainer's compute precision (bfloat16 on a GPU with
                bf16-mixed), otherwise the policy's. Servers of ``urls`` must have the same.
            max_model_len: Most tokens of prompt and completion together; by default the model's limit.
            max_num_seqs: Completions that a server decodes at the same time.
            gpu_memory_utilization: Share of its GPU's memory that a server takes.
            kv_cache_gib: Size of a server's key-value cache in GiB; 0.25 by default on a CPU.
            tensor_parallel_size: Number of GPUs that each server is sharded over.
            devices: GPUs of each server, such as [[6], [7]], as this process counts them. By default the last ones,
                because training uses the first.
            seeded: Whether each request has a seed, so that runs repeat. By default on CPUs, and with batch_invariant.
            batch_invariant: Whether servers started here use kernels whose results do not depend on what else is in a
                batch, so that tokens do not either. On GPUs only.
            requests_at_a_time: Upper limit of the prompts in flight at each server.
            transfer: Way in which weights are sent: ``file``, through files in shared memory or ``weights_dir``; or
                ``nccl``, from the trainer's GPU to servers on other GPUs or machines. Servers of ``urls`` then need
                ``--weight-transfer-config '{"backend": "nccl"}'``.
            transfer_address: IPv4 address of rank 0's machine that servers can reach, for ``nccl``; by default the
                address of the route to them, which is loopback for servers started here.
            weights_dir: Folder for files of weights; by default one in shared memory. Servers start from it, and with
                ``nccl`` write the weights for checkpoints into it.
            timeouts: Time limits.
            max_failures: Number of server failures that a generation or a sync recovers from; the next one stops the
                run.
            adapters: Whether only the adapters of a policy with LoRA are sent, which servers apply; otherwise the
                merged weights are sent. Servers of ``urls`` need ``--enable-lora --max-loras 1 --max-lora-rank …``,
                the policy's model, and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
            verify: Whether the servers' own checksums are compared with the policy's after every sync.
            options: Any other flag of the server, by name.
            environment_variables: Additional environment variables of servers started here.
        """
        super().__init__()
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.max_model_len = max_model_len
        self.kv_cache_gib = kv_cache_gib
        self.tensor_parallel_size = tensor_parallel_size
        self.requests_at_a_time = requests_at_a_time
        self.verify = verify
        launcher = ServerLauncher(
            num_servers=num_servers,
            urls=urls,
            api_key_env=api_key_env,
            served_model_name=served_model_name,
            kv_cache_gib=kv_cache_gib,
            tensor_parallel_size=tensor_parallel_size,
            devices=devices,
            seeded=seeded,
            batch_invariant=batch_invariant,
            flags={
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "gpu_memory_utilization": gpu_memory_utilization,
                **(options or {}),
            },
            environment_variables=environment_variables or {},
        )
        self.group = ServerGroup(
            launcher,
            TransferSettings(name=transfer, address=transfer_address, weights_dir=weights_dir, adapters=adapters),
            FailureBudget(max_failures),
            timeouts,
            dtype=self.dtype,
            verify=verify,
        )
        self._shared = SharedServers(self.group, lambda: self.state)

    @property
    def faults(self) -> Faults:
        return self.group.budget.faults

    def check_installed(self) -> None:
        if not self.group.launcher.urls:
            check_vllm_installed()

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        self.group.launcher.tokenizer = tokenizer

    # Weights: rank 0 acts, the other ranks follow

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        load = super().load_weights
        self._on_rank_zero(lambda own: load(own, step, num_rollouts), weights)
        return self.state.ledger[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the weights on rank 0, and an empty one on the other ranks."""
        return {"config": None, "weights": None} if self._shared.is_follower else super().state_dict()

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        load = super().load_state_dict
        self._on_rank_zero(lambda own: load(state, own), policy)

    def replace_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        replace = super().replace_weights
        return self._on_rank_zero(lambda own: replace(own, step, version), weights) or WeightManifest()

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        if not self.group.servers:
            atexit.register(self.close)  # so that no server and no file outlives the run
        checksum = {record.version: record.checksum for record in self.state.ledger}.get(version)
        manifest = self.group.sync(weights, version, checksum)
        self.state.adapter_rank = self.group.transfer.adapter_rank
        return manifest

    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        self.group.verify(manifest)
        return manifest.checksums

    def held_weights(self) -> dict[str, Tensor]:
        return self.group.transfer.held_weights(self.group.available)

    def close(self) -> None:
        self._shared.close()
        self.drop_weights()
        self.group.close()
        atexit.unregister(self.close)

    def _on_rank_zero(self, act: Callable[[Weights], Result], weights: Weights) -> Result | None:
        """Run an action on rank 0, where it returns the result; on the other ranks adopt the state and return None."""
        if not self._shared.connect():
            return act(weights)
        if self._shared.is_follower:
            self.drop_weights()
            self._state = self._shared.follow(weights)
            return None
        return self._shared.lead(act, weights)

    # Completions

    def sample(self, generation: Generation) -> None:
        group, model = self.group, self.group.model
        check_context_length(generation, model.max_model_len)
        requests = ServerRequests(generation, self.held_config(), model, group.timeouts.generate)
        group.wait_for_restarts()
        group.budget.reset()
        cancelled = group.cancelled

        def ask(server: VLLMServer, index: int) -> list[Completion]:
            completions = requests.group(server, index)
            check(server)  # it may have been restarted with other weights before it answered
            return completions

        def check(server: VLLMServer) -> None:
            """Check the worker: the health route of a server answers even if its worker hangs."""
            group.check_version(server, group.timeouts.hang)

        balancer = LoadBalancer[VLLMServer, list[Completion]](
            len(generation.prompts),
            ask=ask,
            check=check,
            replace=lambda server, failure: self._shared.recover(server, failure, cancelled),
            max_in_flight=self.requests_at_a_time,
            period=min(5.0, group.timeouts.hang),
            timeout=group.timeouts.generate,
        )
        try:
            with self._shared.used(), requests.aborted_at_end():
                balancer.run(group.available, keep_or_leave(generation))
        except BaseException:
            group.cancel()
            raise
