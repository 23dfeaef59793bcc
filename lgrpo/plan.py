"""What a config means, in numbers, before anything is loaded."""

from __future__ import annotations

from pydoc import locate
from typing import Any

import torch
from jsonargparse import Namespace
from transformers import AutoModelForCausalLM, PretrainedConfig

from lgrpo.data.micro_batches import micro_batches_for
from lgrpo.module import COMPUTED_IN
from lgrpo.policy import CausalPolicy, LoRA, add_adapter
from lgrpo.policy.memory import activation_bytes, in_words, logit_bytes


def policy_of(config: Namespace) -> CausalPolicy:
    """The policy of a parsed config, not built."""
    settings = dict(vars(config.model.policy))
    lora = settings.pop("lora", None)
    return CausalPolicy(**settings, lora=None if lora is None else LoRA(**vars(lora)))


def plan(config: Namespace) -> str:
    """A table of what one optimizer step, one cycle and the whole run will do under a parsed config."""
    data, trainer = config.data, config.trainer
    sync = config.weight_sync.init_args if config.weight_sync else Namespace(period=None)
    adaptive = sync if "budget" in sync else None  # v by measurement
    period = sync.get("period")
    prompts, group, reuse = data.num_prompts, data.group_size, data.reuse
    completions = prompts * group
    longest = data.sampling.max_tokens
    devices = str(trainer.devices)
    num_ranks = max(1, int(devices) if devices.isdecimal() else 1) * trainer.num_nodes
    ranks = "1 device" if num_ranks == 1 else f"each of {num_ranks} devices"
    budget, micro_batches = data.micro_batch_tokens, trainer.accumulate_grad_batches
    if budget is not None:  # prompts are not loaded here: the longest one allowed stands for them
        longest_row = longest + (data.max_prompt_tokens or 0)
        micro_batches = micro_batches_for(completions // num_ranks, longest_row, budget)
    piece = completions / micro_batches / num_ranks
    rows = [
        ("schedule", _adaptive_schedule(adaptive, reuse) if adaptive else _schedule(period, reuse)),
        (
            "rollout",
            f"{prompts} prompts × {group} completions = {completions} completions, up to {longest} tokens each",
        ),
        ("optimizer step", f"trains on {completions} completions, at most {completions * longest:,} sampled tokens"),
        ("micro-batches", _micro_batches(micro_batches, ranks, piece, budget)),
        ("sync", _adaptive_sync(adaptive) if adaptive else _sync(period, reuse)),
        ("lags that occur", _lags(adaptive.maximum if adaptive else period, reuse, at_most=adaptive is not None)),
        *_whole_run(config, adaptive.maximum if adaptive else period, adaptive.minimum if adaptive else None),
        ("zero-variance groups", _dull_groups(config)),
        *_memory(config, piece * longest),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _micro_batches(number: int, ranks: str, piece: float, budget: int | None) -> str:
    if budget is None:
        return f"{number} in each step on {ranks}, about {piece:g} completions each"
    return f"at least {number} in each step on {ranks}, of {budget:,} tokens at most (longer prompts make it more)"


def _schedule(period: int | None, reuse: int) -> str:
    v = "∞" if period is None else str(period)
    kind = {
        (True, True): "on-policy GRPO",
        (True, False): "reuse: several steps on each rollout",
        (False, True): "off-policy: the sampler lags behind",
        (False, False): "off-policy, with several steps on each rollout",
    }[period == 1, reuse == 1]
    return f"v = {v}, i = {reuse}: {kind}"


def _adaptive_schedule(sync: Namespace, reuse: int) -> str:
    return f"v by measurement, {sync.minimum} to {sync.maximum}, i = {reuse}: off-policy as far as a budget allows"


def _sync(period: int | None, reuse: int) -> str:
    if period is None:
        return "before the first rollout only"
    return f"every {period} rollouts, {period * reuse} steps"


def _adaptive_sync(sync: Namespace) -> str:
    budget = "its default budget" if sync.budget is None else f"{sync.budget:g}"
    return f"when {sync.criterion} reaches {budget}, after {sync.minimum} to {sync.maximum} rollouts"


def _lags(period: int | None, reuse: int, at_most: bool = False) -> str:
    """Every lag, in optimizer steps, a completion can have when it is trained on."""
    if period is None:
        return "0, 1, 2, … to the end of the run (never synced again)"
    last = period * reuse - 1
    if last == 0:
        return "0: every completion is fresh"
    between = ", 1" if last == 2 else ", 1, …" if last > 2 else ""
    ending = "at most" if at_most else f"again in every cycle of {period} rollouts"
    return f"0{between}, {last} optimizer steps, {ending}"


def _whole_run(config: Namespace, period: int | None, least: int | None = None) -> list[tuple[str, str]]:
    data, trainer = config.data, config.trainer
    if data.num_rollouts is None:
        return [("stage (epoch)", "one pass over the training prompts; set data.num_rollouts to choose its length")]
    stage = ("stage (epoch)", f"{data.num_rollouts} rollouts, {data.num_rollouts * data.reuse} optimizer steps")
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * data.num_rollouts * data.reuse)
    elif trainer.max_epochs is None and not limits:
        limits.append(1000 * data.num_rollouts * data.reuse)  # Lightning's own default
    if not limits:
        return [stage, ("whole run", "without end: neither trainer.max_epochs nor trainer.max_steps is set")]
    steps = min(limits)
    rollouts = -(-steps // data.reuse)
    syncs = str(1 if period is None else -(-rollouts // period))
    if least is not None:
        syncs += f" to {-(-rollouts // least)}"
    completions = rollouts * data.num_prompts * data.group_size
    whole = f"{rollouts} rollouts, {steps} optimizer steps, {syncs} syncs, {completions:,} completions"
    return [stage, ("whole run", whole)]


def _dull_groups(config: Namespace) -> str:
    """What becomes of groups whose rewards are all equal."""
    kept = "masked, regularisers included" if config.zero_variance_mask else "kept"
    if (again := config.data.dynamic_sampling) is None:
        return kept
    return f"sampled again with other prompts, {again.max_rounds} times at most; then {kept}"


def _memory(config: Namespace, tokens: float) -> list[tuple[str, str]]:
    """Weights, gradients, optimizer state, copies, and the activations of one micro-batch."""
    settings: dict[str, Any] = vars(config.model.policy)
    policy = policy_of(config)
    try:
        architecture = policy.config
    except OSError as error:
        return [("memory", f"not estimated: the model's config cannot be read ({str(error).splitlines()[0]})")]
    num_parameters, num_trained = _num_parameters(architecture, settings["trust_remote_code"], policy.lora)
    bytes_each = 2 if settings["dtype"] == "bfloat16" else 4
    needs_reference = _needs_reference(config.model.loss)
    optimizer, state = _optimizer_state(config.model.optimizer.class_path, 4 if policy.lora else bytes_each)
    held = {
        "weights": bytes_each * num_parameters,
        "gradients": bytes_each * num_parameters,
        optimizer: state * num_parameters,
        "reference": bytes_each * num_parameters * needs_reference,
        **_engine_bytes(config, num_parameters, bytes_each),
    }
    if policy.lora is not None:  # adapters are float32, and the reference is one of them
        trained = 4 * num_trained
        held |= {
            "adapters": trained,
            "gradients": trained,
            "AdamW": 2 * trained,
            "reference": trained * needs_reference,
        }
    text = architecture.get_text_config()
    bytes_of_one = 2 if "bf16" in str(config.trainer.precision) else 4
    activations = activation_bytes(
        architecture, tokens, bytes_of_one, settings["gradient_checkpointing"], policy.activation_memory
    )
    logits = logit_bytes(architecture, tokens, settings["chunk_size"])
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in held.items() if size)
    adapters = "" if policy.lora is None else f", of which none is trained, but {num_trained:,} of adapters"
    return [
        ("policy", f"{num_parameters:,} parameters, {text.model_type}, {settings['dtype']}{adapters}"),
        ("memory, held", f"{in_words(sum(held.values()))}: {parts}"),
        (
            "memory, in a step",
            f"about {in_words(activations + logits)} at worst: activations {in_words(activations)}, logits "
            f"{in_words(logits)} (prompts not counted)",
        ),
    ]


def _engine_bytes(config: Namespace, num_parameters: int, bytes_each: int) -> dict[str, int]:
    """What engines beside the trainer hold, in their own precision; bytes_each is the policy's."""
    engine, copies = config.data.engine or Namespace(class_path="", init_args=Namespace()), 1
    if "num_processes" in engine.init_args:
        copies = engine.init_args.num_processes
        engine = engine.init_args.engine or Namespace(class_path="lgrpo.engines.VLLMEngine", init_args=Namespace())
    dtype = engine.init_args.get("dtype")
    if dtype is not None:
        bytes_each = getattr(torch, dtype).itemsize
    elif getattr(locate(engine.class_path), "follows_precision", False) and config.trainer.accelerator != "cpu":
        bytes_each = min(bytes_each, COMPUTED_IN.get(str(config.trainer.precision), torch.float32).itemsize)
    name = "engine's copy" if copies == 1 else f"engines' {copies} copies"
    return {name: copies * bytes_each * num_parameters}


def _optimizer_state(class_path: str, bytes_each: int) -> tuple[str, float]:
    """An optimizer by name, and about how many bytes it keeps of every parameter: two moments, unless it says less."""
    name = class_path.rpartition(".")[2]
    if name == "SGD":
        return name, bytes_each
    return name, 2.1 if "8bit" in name else 2 * bytes_each


def _needs_reference(loss: Namespace) -> bool:
    """Whether a loss, as it is configured, has a term in the reference."""
    parts = loss.init_args.get("regularisers") or []
    return loss.init_args.get("kl_coef", 0) > 0 or any(
        getattr(locate(part.class_path), "needs_reference", False) for part in parts
    )


def _num_parameters(architecture: PretrainedConfig, trust_remote_code: bool, lora: LoRA | None) -> tuple[int, int]:
    """Of the model, and of what is trained."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=trust_remote_code)
        own = sum(p.numel() for p in model.parameters())
        if lora is None:
            return own, own
        add_adapter(model, lora, model.get_output_embeddings())
    return own, sum(p.numel() for p in model.parameters()) - own
