"""The rows of ``lgrpo plan`` that depend on the model: parameters, memory, and time (``plan_time``)."""

from __future__ import annotations

from pydoc import locate
from typing import Any, cast

import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM, PretrainedConfig

from lgrpo.commands.plan_time import time_row
from lgrpo.commands.settings import policy_from_settings
from lgrpo.data.episodes import check_turns
from lgrpo.data.schedule import checked_overlap
from lgrpo.engines import RolloutEngine, TransformersEngine
from lgrpo.policy import CausalPolicy, GradientProjection, LoRA, add_adapter
from lgrpo.policy.memory import activation_bytes, logit_bytes
from lgrpo.policy.strategy import COMPUTE_DTYPES, reshard_without_fsdp2
from lgrpo.run.sizes import format_bytes


def memory_rows(
    config: Namespace, tokens: float, num_rollouts: int | None, num_ranks: int = 1
) -> list[tuple[str, str]]:
    """Return the rows on the policy, the memory held during the run, that of one micro-batch of ``tokens``, and time.

    ``num_rollouts`` is the length of the run, if it is known.
    """
    settings: dict[str, Any] = vars(config.model.policy)
    policy = policy_from_settings(config)
    try:
        architecture = policy.config
    except OSError as error:
        return [("memory", f"not estimated: the model's config cannot be read ({str(error).splitlines()[0]})")]
    num_parameters, num_trained = _num_parameters(architecture, settings["trust_remote_code"], policy.lora)
    bytes_each = 2 if settings["dtype"] == "bfloat16" else 4
    trained_bytes = 4 if policy.lora else bytes_each  # adapters are float32; their reference is a copy of them
    optimizer, state = _optimizer_state(config.model.optimizer.class_path, trained_bytes)
    copies, engine_bytes = _engine_copies(config, num_parameters, bytes_each)
    held = {
        "weights": bytes_each * num_parameters,
        "adapters": trained_bytes * num_trained if policy.lora else 0,
        "gradients": trained_bytes * num_trained,
        optimizer: state * num_trained,
        "previous gradient": trained_bytes * num_trained * _keeps_gradient(config.model.step_rule),
        "reference": trained_bytes * num_trained * _needs_reference(config.model.loss),
        "teacher": _teacher_bytes(config.model.loss),
        "engine's copy" if copies == 1 else f"engines' {copies} copies": copies * engine_bytes,
    }
    has_base = policy.lora is None or policy.name is None  # otherwise a checkpoint has the adapters only
    is_merged = policy.lora is None or _engine_class(config) is TransformersEngine
    stored = {
        "weights": held["weights"] * has_base,
        "adapters": held["adapters"],
        optimizer: held[optimizer],
        "previous gradient": held["previous gradient"],
        "reference": held["reference"] * (policy.name is None or policy.lora is not None or _changes_reference(config)),
        "behaviour policy": (engine_bytes if is_merged else held["adapters"]) * _stores_behaviour(config),
    }
    text = architecture.get_text_config()
    computed_bytes = 2 if "bf16" in str(config.trainer.precision) else 4
    activations = activation_bytes(
        architecture, tokens, computed_bytes, settings["gradient_checkpointing"], policy.activation_memory
    )
    logits = logit_bytes(architecture, tokens, settings["chunk_size"])
    adapters = "" if policy.lora is None else f", none trained, and {num_trained:,} trained ones in adapters"
    return [
        ("policy", f"{num_parameters:,} parameters, {text.model_type}, {settings['dtype']}{adapters}"),
        ("memory, held", _sum(held)),
        *_sharding(config, num_ranks, held["weights"] + held["adapters"] + held["gradients"]),
        (
            "memory, in a step",
            f"about {format_bytes(activations + logits)} at worst: activations {format_bytes(activations)}, logits "
            f"{format_bytes(logits)} (prompts not counted)",
        ),
        ("checkpoint", f"about {_sum(stored)} (rollouts not counted)"),
        *time_row(config, num_parameters, num_rollouts),
    ]


def _sum(parts: dict[str, float]) -> str:
    """Return the sum of sizes, and each of them.

    >>> _sum({"weights": 2**30, "reference": 0, "AdamW": 2**31})
    '3.0 GiB: weights 1.0 GiB, AdamW 2.0 GiB'
    """
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"{format_bytes(sum(parts.values()))}: {shown}"


def _sharding(config: Namespace, num_ranks: int, whole: float) -> list[tuple[str, str]]:
    """Return the row on FSDP2's shards and ``policy.reshard``; ``whole`` are the bytes of weights and gradients."""
    reshard, strategy = config.model.policy.reshard, config.trainer.strategy
    path = strategy if isinstance(strategy, str) else strategy.class_path
    if locate(path) is not ModelParallelStrategy:
        return [] if reshard is None else [("sharding", reshard_without_fsdp2(reshard, path.rpartition(".")[2]))]
    if num_ranks == 1:
        return []
    divided = f"weights, gradients, optimizer and reference are divided among {num_ranks} processes"
    if reshard is False:
        divided += f"; in a step each holds all weights and gradients, {format_bytes(whole)} (policy.reshard: false)"
    return [("sharding", divided)]


def _changes_reference(config: Namespace) -> bool:
    """Return whether the reference becomes another model than that of ``policy.name``."""
    callbacks = config.trainer.callbacks or []
    paths = [callback.class_path for callback in (callbacks if isinstance(callbacks, list) else [callbacks])]
    return config.reference_refresh is not None or any(path.endswith("SupervisedWarmStart") for path in paths)


def _stores_behaviour(config: Namespace) -> bool:
    """Return whether a checkpoint may fall between rollouts that are sampled from the same weights."""
    sync = config.weight_sync.init_args if config.weight_sync else Namespace()
    return sync.get("period") != 1 or config.data.lead > 0


def overlapping_engine(config: Namespace) -> type[RolloutEngine] | None:
    """Return the class of the engine if it samples while the trainer updates; raise an error if it cannot.

    The same if the advantage needs another engine.
    """
    engine_class, outer = _engine_class(config), config.data.engine
    advantage: Any = locate(config.data.advantage.class_path)
    check_turns(advantage, TransformersEngine if outer is None else cast(Any, locate(outer.class_path)))
    if checked_overlap(config.data.overlap, engine_class):
        return engine_class
    return None


def _engine_class(config: Namespace) -> Any:
    """Return the class of the engine that samples."""
    engine = config.data.engine
    while engine is not None and "engine" in engine.init_args and "num_processes" not in engine.init_args:
        engine = engine.init_args.engine  # of a ReplayEngine or an EnvironmentEngine
    return TransformersEngine if engine is None else locate(engine.class_path)


def _engine_copies(config: Namespace, num_parameters: int, bytes_each: int) -> tuple[int, int]:
    """Return the number of the engine's copies of the weights and the bytes of one.

    ``bytes_each`` is the size of the policy's elements.
    """
    engine = config.data.engine or Namespace(class_path="lgrpo.engines.TransformersEngine", init_args=Namespace())
    copies = 1
    if "num_processes" in engine.init_args:
        copies = engine.init_args.num_processes
        engine = engine.init_args.engine or Namespace(class_path="lgrpo.engines.VLLMEngine", init_args=Namespace())
    engine_class: Any = locate(engine.class_path)
    dtype = engine.init_args.get("dtype")
    if dtype is not None:
        bytes_each = getattr(torch, dtype).itemsize
    elif engine_class.follows_precision and config.trainer.accelerator != "cpu":
        bytes_each = min(bytes_each, COMPUTE_DTYPES.get(str(config.trainer.precision), torch.float32).itemsize)
    return copies, bytes_each * num_parameters


def _optimizer_state(class_path: str, bytes_each: int) -> tuple[str, float]:
    """Return the name of an optimizer and about how many bytes it keeps per parameter: two moments by default."""
    name = class_path.rpartition(".")[2]
    if name == "SGD":
        return name, bytes_each
    return name, 2.1 if "8bit" in name else 2 * bytes_each


def _needs_reference(loss: Namespace) -> bool:
    """Return whether a configured loss has a term with the reference."""
    regularisers: list[Any] = [locate(part.class_path) for part in loss.init_args.get("regularisers") or []]
    return loss.init_args.get("kl_coef", 0) > 0 or any(regulariser.needs_reference for regulariser in regularisers)


def _teacher_bytes(loss: Namespace) -> int:
    """Return the size of a teacher's weights in this process; 0 if they are on the CPU most of the time."""
    for part in loss.init_args.get("regularisers") or []:
        teacher = part.init_args.get("teacher")
        if teacher is not None and "name" in teacher.init_args and not teacher.init_args.offload:
            trusted = teacher.init_args.trust_remote_code
            architecture = CausalPolicy(teacher.init_args.name, trust_remote_code=trusted).config
            dtype = getattr(torch, teacher.init_args.dtype)
            return _num_parameters(architecture, trusted, None)[0] * dtype.itemsize
    return 0


def _keeps_gradient(rules: Namespace | list[Namespace] | None) -> bool:
    """Return whether a configured rule for the step keeps the gradient of the previous one."""
    kinds = [locate(rule.class_path) for rule in (rules if isinstance(rules, list) else [rules]) if rule]
    return GradientProjection in kinds


def _num_parameters(architecture: PretrainedConfig, trust_remote_code: bool, lora: LoRA | None) -> tuple[int, int]:
    """Return the number of parameters of the model, and the number of trained ones."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=trust_remote_code)
        of_model = sum(p.numel() for p in model.parameters())
        if lora is None:
            return of_model, of_model
        add_adapter(model, lora, model.get_output_embeddings())
    return of_model, sum(p.numel() for p in model.parameters()) - of_model
