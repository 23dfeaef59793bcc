"""The row of ``lgrpo plan`` about the duration of a run on an H200, from measured rates."""

from __future__ import annotations

from typing import NamedTuple

from jsonargparse import Namespace


class Rates(NamedTuple):
    """Speed of a run of Qwen2.5-Coder-1.5B-Instruct on GSM8K on one H200."""

    start: float
    """Seconds before the first rollout."""
    sampled: float
    """Sampled tokens per second."""
    trained: float
    """Tokens of completions per second of an update."""
    rest: float
    """Seconds of a rollout for everything else: sync, sleep, validation, checkpoints."""


RATES = {
    "VLLMEngine": Rates(start=80, sampled=29_000, trained=22_000, rest=3.5),
    "EnginePool": Rates(start=120, sampled=45_000, trained=46_000, rest=1.2),
}
"""Rates by engine: of ``configs/quickstart_gsm8k.yaml``, and with ``configs/fast.yaml``."""
PARAMETERS = 1_543_714_304
"""Parameters of the measured model."""
FILLED = 0.65
"""Mean length of a completion in the measured runs, relative to ``sampling.max_tokens``."""


def time_row(config: Namespace, num_parameters: int, num_rollouts: int | None) -> list[tuple[str, str]]:
    """Return the row with the expected minutes; none for an engine or hardware whose rates were not measured."""
    data, trainer = config.data, config.trainer
    rates = None if data.engine is None else RATES.get(data.engine.class_path.rpartition(".")[2])
    on_one_gpu = trainer.accelerator != "cpu" and str(trainer.devices) in ("1", "auto") and trainer.num_nodes == 1
    if rates is None or num_rollouts is None or config.model.policy.lora is not None or not on_one_gpu:
        return []
    tokens = data.num_prompts * data.group_size * data.sampling.max_tokens * FILLED
    scale = num_parameters / PARAMETERS
    sample, update = tokens / rates.sampled * scale, data.reuse * tokens / rates.trained * scale
    seconds = rates.start + num_rollouts * (sample + update + rates.rest)
    return [
        (
            "time",
            f"about {_minutes(seconds)} on one H200: {rates.start:g} s to start, then for each of {num_rollouts} "
            f"rollouts {_seconds(sample)} s to sample, {_seconds(update)} s to update, {rates.rest:g} s for the rest "
            f"(measured at 1.5B, scaled with parameters; completions of {FILLED:.0%} of sampling.max_tokens)",
        )
    ]


def _minutes(seconds: float) -> str:
    """Return a duration in minutes or hours.

    >>> _minutes(570), _minutes(20), _minutes(20000)
    ('10 minutes', '1 minute', '5.6 hours')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
