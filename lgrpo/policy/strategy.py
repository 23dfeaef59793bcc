"""Adaptation of a policy to the Trainer: sharding, clipping of gradients, precision."""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lgrpo.policy.causal import CausalPolicy
from lgrpo.policy.reference import Reference

COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Compute dtype by ``trainer.precision``, where it differs from the dtype of the weights."""


def is_sharding(strategy: Strategy) -> bool:
    """Return whether a strategy shards the weights over processes."""
    return isinstance(strategy, FSDPStrategy | ModelParallelStrategy)


def shard(
    policy: CausalPolicy, reference: Reference | None, strategy: Strategy, mesh: DeviceMesh | None
) -> tuple[CausalPolicy, Reference | None]:
    """Return policy and reference, sharded if the strategy is FSDP1 or FSDP2.

    With FSDP1 they are wrappers. Their mixed precision is the strategy's argument, not Lightning's default, which would
    round gradients and the angles of rotary embeddings to bfloat16: autocast alone computes what every other strategy
    does.
    """
    if isinstance(strategy, ModelParallelStrategy) and mesh is not None:
        policy.shard_fsdp2(mesh["data_parallel"])
        # Lightning enters it for all micro-batches of a step but the last, and has it for DDP only
        strategy.block_backward_sync = policy.accumulating_gradients  # type: ignore[method-assign]
        if isinstance(reference, CausalPolicy):  # otherwise it is an adapter in the policy's model
            reference.shard_fsdp2(mesh["data_parallel"])
    if isinstance(strategy, FSDPStrategy):
        policy = policy.shard_fsdp1(strategy.mixed_precision)
        if isinstance(reference, CausalPolicy):
            reference = reference.shard_fsdp1(strategy.mixed_precision)
    return policy, reference


def reshard_without_fsdp2(reshard: bool, strategy: str) -> str:
    """Return the warning about ``policy.reshard`` with a strategy that ignores it."""
    return (
        f"policy.reshard is {str(reshard).lower()}, but has no effect with the strategy {strategy}: only FSDP2 gathers "
        "weights layer by layer (configs/fsdp2.yaml)"
    )


def check_strategy(policy: CausalPolicy, trainer: L.Trainer) -> None:
    """Raise a ``ValueError`` if the Trainer's strategy does not support the policy; warn if it is slow or ignored."""
    if policy.reshard_layers is not None and not isinstance(trainer.strategy, ModelParallelStrategy):
        rank_zero_warn(reshard_without_fsdp2(policy.reshard_layers, type(trainer.strategy).__name__))
    if not isinstance(trainer.strategy, FSDPStrategy):
        if policy.compile_layers and trainer.strategy.root_device.type == "cpu":
            rank_zero_warn(
                "policy.compile is set, but the policy is on the CPU, where compiling takes minutes before the first "
                "step and gives little speed-up: remove it (configs/fast.yaml is for GPUs)"
            )
        return
    if policy.lora is not None:
        raise ValueError(
            "policy.lora with FSDPStrategy: it would keep adapters and base weights in one flat tensor, with "
            "gradients of all of it. Use configs/fsdp2.yaml (lightning.pytorch.strategies.ModelParallelStrategy)"
        )
    if policy.compile_layers:
        raise ValueError(
            "policy.compile with FSDPStrategy is untested. Use configs/fsdp2.yaml "
            "(lightning.pytorch.strategies.ModelParallelStrategy), or leave compile out"
        )
    if trainer.strategy._state_dict_type == "sharded" and trainer.world_size == 1:
        raise ValueError(
            "FSDPStrategy has one process, so nothing is sharded and no sharded checkpoint can be written: raise "
            "trainer.devices, or set state_dict_type to full in trainer.strategy.init_args"
        )


def clip_gradients(
    module: L.LightningModule,
    policy: CausalPolicy,
    optimizer: torch.optim.Optimizer,
    value: float | None,
    algorithm: str | None,
) -> Tensor | None:
    """Clip gradients as Lightning does, and return their norm before; None if there are no gradients.

    Two cases are clipped that Lightning refuses: the norm of gradients sharded by FSDP1, and fused optimizers in
    bfloat16, which has no loss scale. The norm is computed once, for clipping and for the log.
    """
    kind, precision = GradClipAlgorithmType(algorithm or "norm"), module.trainer.precision_plugin
    max_norm = value if value is not None and value > 0 and kind == GradClipAlgorithmType.NORM else math.inf
    if isinstance(policy, FullyShardedDataParallel):
        norm = policy.clip_grad_norm_(max_norm)
        if max_norm == math.inf:
            module.clip_gradients(optimizer, value, algorithm)
        return norm
    parameters = list(precision.main_params(optimizer))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:  # the step is skipped
        return None
    norm = get_total_norm(gradients)
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        module.clip_gradients(optimizer, value, algorithm)
    elif max_norm < math.inf:
        clip_grads_with_norm_(parameters, max_norm, norm)
    else:
        Precision.clip_gradients(precision, optimizer, value or 0.0, kind)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def compute_dtype(trainer: L.Trainer | None) -> torch.dtype | None:
    """Return the dtype of the trainer's matrix products on a GPU; None if it is the dtype of the weights.

    Always None without a Trainer, and on a CPU, which may not support the lower precision.
    """
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        return None
    return COMPUTE_DTYPES.get(str(trainer.precision))


def check_precision(trainer: L.Trainer) -> None:
    """Raise a ``ValueError`` if ``trainer.precision`` would round the tensors of a batch."""
    precision = str(trainer.precision)
    if precision in ("bf16-true", "16-true") or precision.startswith("transformer-engine"):
        raise ValueError(
            f"trainer.precision {precision} rounds every float of a batch, behaviour log-probabilities too: "
            "-7.123456 becomes -7.125, and the ratio is wrong at lag 0. Use bf16-mixed"
        )
