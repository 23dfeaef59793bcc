"""``lgrpo plan``: what a config means in numbers, before anything is loaded."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from lgrpo.checks import check_range, check_schedule
from lgrpo.commands import command_parser

if TYPE_CHECKING:
    from lgrpo.functional.sync_cycle import Period


def main(args: list[str]) -> None:
    """Print the plan of the settings that ``lgrpo fit`` would read from the same arguments."""
    parser = command_parser(
        "plan",
        "No weights and no data are loaded. The table has one row each for the schedule (v and i), one rollout, one "
        "optimizer step, its micro-batches, the syncs, the lags that occur, one epoch, the whole run, groups whose "
        "rewards are all equal, what overlaps, the policy, the memory of the trainer, a checkpoint, and the expected "
        "time on an H200. All options of lgrpo fit are accepted.",
        "lgrpo plan --config configs/demo.yaml --weight_sync.period 5",
    )
    parser.usage = "%(prog)s [-h] [options of lgrpo fit]"
    _, fit_args = parser.parse_known_args(args)

    from lgrpo.commands.settings import parse_settings

    print(plan_table(parse_settings(fit_args)))


def plan_table(config: Namespace, with_memory: bool = True) -> str:
    """Return a table of what one optimizer step, one cycle and the whole run do under parsed settings.

    Without the rows on parameters and memory, no class that the settings name is imported.
    """
    from lgrpo.data.micro_batches import num_micro_batches

    data, trainer = config.data, config.trainer
    sync = config.weight_sync.init_args if config.weight_sync else Namespace(period=None)
    adaptive = sync if "budget" in sync else None  # v is chosen by measurement
    period = sync.get("period")
    prompts, group, reuse = data.num_prompts, data.group_size, data.reuse
    for name, value in {"weight_sync.period": period, "data.reuse": reuse, "data.num_prompts": prompts}.items():
        check_schedule(name, value, partial(check_range, at_least=1))
    completions = prompts * group
    longest = data.sampling.max_tokens
    devices = str(trainer.devices)
    num_ranks = max(1, int(devices) if devices.isdecimal() else 1) * trainer.num_nodes
    ranks = "1 device" if num_ranks == 1 else f"each of {num_ranks} devices"
    budget, micro_batches = data.micro_batch_tokens, trainer.accumulate_grad_batches
    num_contexts = _max_contexts(data.engine)
    if budget is not None:  # prompts are not loaded: assume the longest that is allowed
        longest_row = num_contexts * (longest + (data.max_prompt_tokens or 0))
        micro_batches = num_micro_batches(completions // num_ranks, longest_row, budget)
    rows_each = completions / micro_batches / num_ranks
    rows = [
        ("schedule", _schedule(sync, reuse, data.lead, bool(data.partial))),
        (
            "rollout",
            f"{prompts} prompts × {group} completions = {completions} completions, up to {longest} tokens each"
            + (f", in each of up to {num_contexts} contexts (data.engine.max_contexts)" if num_contexts > 1 else "")
            + (_in_one_call(sync) if data.generate_ahead else ""),
        ),
        ("optimizer step", f"trains on {completions} completions, at most {completions * longest:,} sampled tokens"),
        ("micro-batches", _micro_batches(micro_batches, ranks, rows_each, budget)),
        ("sync", _sync(sync, reuse)),
        ("lags that occur", _lags(adaptive.maximum if adaptive else period, data, sync)),
        *_whole_run(
            config, micro_batches, adaptive.maximum if adaptive else period, adaptive.minimum if adaptive else None
        ),
        ("zero-variance groups", _zero_variance_groups(config)),
    ]
    if with_memory:
        from lgrpo.commands.plan_memory import memory_rows, overlapping_engine

        if (engine := overlapping_engine(config)) is not None:
            overlap = _overlap(sync, data.lead) + _shared_memory(engine.has_own_device)
            if sync.get("in_flight"):
                overlap += "; a sync interrupts sampling, which continues with the new weights (weight_sync.in_flight)"
            rows.append(("overlap", overlap))
        steps = _num_steps(config, micro_batches)
        tokens = rows_each * longest * num_contexts if budget is None else budget
        rows += memory_rows(config, tokens, None if steps is None else -(-steps // reuse), num_ranks)
    if data.partial:
        extra = getattr(data.partial, "extra_prompts", None) or max(1, data.num_prompts // 4)
        text = f"a rollout ends when {data.num_prompts} of {data.num_prompts + extra} groups are whole (data.partial)"
        rows.insert(2, ("partial rollouts", text))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _max_contexts(engine: Namespace | None) -> int:
    """Return the largest number of contexts of an episode; 1 unless an engine drops observations."""
    found = 1
    while engine is not None and "init_args" in engine:
        found = max(found, engine.init_args.get("max_contexts", 1))
        engine = engine.init_args.get("engine")  # of a ReplayEngine or an EnvironmentEngine
    return found


def _in_one_call(sync: Namespace) -> str:
    """Return which rollouts ``data.generate_ahead`` samples together."""
    if "budget" in sync:
        return "; one in each call, because the next sync is not known in advance"
    period = sync.get("period")
    from lgrpo.functional.sync_cycle import MAX_AHEAD

    if isinstance(period, dict):
        return "; those of a cycle in one call (data.generate_ahead)"
    together = f"up to {MAX_AHEAD} of an epoch" if period is None else f"those of a cycle ({period})"
    return f"; {together} in one call (data.generate_ahead)"


def _overlap(sync: Namespace, lead: int) -> str:
    """Return which rollouts ``data.overlap`` samples while others are trained on."""
    if lead:
        earlier = "the one before it trains" if lead == 1 else f"the {lead} before it train"
        return f"each rollout is sampled while {earlier} (data.overlap, data.lead)"
    if "budget" in sync:
        return "none, because the next sync is not known in advance; with a data.lead rollouts would overlap"
    period = sync.get("period")
    if period == 1:
        return "none at v = 1: every rollout waits for its sync; with a data.lead rollouts would overlap"
    if period is None:
        return "every rollout but the first is sampled while earlier ones train (data.overlap)"
    if isinstance(period, dict):
        return "the rollouts of a cycle, except its first, are sampled while earlier ones train (data.overlap)"
    some = "rollout 1" if period == 2 else f"rollouts 1 to {period - 1}"
    return f"{some} of a cycle {'is' if period == 2 else 'are'} sampled while earlier ones train (data.overlap)"


def _shared_memory(has_own_device: bool) -> str:
    return "" if has_own_device else "; engine and trainer need their memory at the same time"


def _micro_batches(number: int, ranks: str, rows_each: float, budget: int | None) -> str:
    if budget is None:
        return f"{number} in each step on {ranks}, about {rows_each:g} completions each"
    return (
        f"at least {number} in each step on {ranks}, of {budget:,} tokens at most (more if prompts are longer); those "
        "that shorter completions do not need are empty if rows are packed"
    )


def _schedule(sync: Namespace, reuse: int, lead: int, is_partial: bool) -> str:
    if "budget" in sync:
        return f"v by measurement, {sync.minimum} to {sync.maximum}, i = {reuse}: off-policy as far as a budget allows"
    period = sync.get("period")
    if isinstance(period, dict):
        return f"v = {_over_rollouts(period)}; i = {reuse}"
    v = "∞" if period is None else str(period)
    kind = {
        (True, True): "on-policy GRPO, but for continued completions" if is_partial else "on-policy GRPO",
        (True, False): "reuse: several steps on each rollout",
        (False, True): "off-policy: the sampler lags behind",
        (False, False): "off-policy, with several steps on each rollout",
    }[period == 1 and lead == 0, reuse == 1]
    return f"v = {v}, i = {reuse}: {kind}"


def _sync(sync: Namespace, reuse: int) -> str:
    if "budget" in sync:
        budget = "its default budget" if sync.budget is None else f"{sync.budget:g}"
        return f"when {sync.criterion} reaches {budget}, after {sync.minimum} to {sync.maximum} rollouts"
    if (period := sync.get("period")) is None:
        return "before the first rollout only"
    if isinstance(period, dict):
        changes = sorted(first for first in period if first)
        return f"after each v rollouts, and before rollout {', '.join(map(str, changes))}, where v changes"
    return f"every {period} rollouts, {period * reuse} steps"


def _over_rollouts(period: dict[int, int | None]) -> str:
    """Return the values of a schedule.

    >>> _over_rollouts({0: 1, 20: 5})
    '1, from rollout 20 on 5'
    """
    values = [(first, "∞" if v is None else str(v)) for first, v in sorted(period.items())]
    return ", ".join(v if first == 0 else f"from rollout {first} on {v}" for first, v in values)


def _lags(period: Period, data: Namespace, sync: Namespace) -> str:
    """Return every lag, in optimizer steps, that a completion can have in an optimizer step on it."""
    at_most, first = "budget" in sync, data.lead * data.reuse
    if isinstance(period, dict):
        firsts = sorted(period)
        lengths = {first: later - first for first, later in itertools.pairwise(firsts)}
        longest = [lengths.get(first) if v is None else v for first, v in period.items()]
        period = None if None in longest else max(v for v in longest if v is not None)
        at_most = True
    if period is None:
        last, text = None, "0, 1, 2, … to the end of the run (never synced again)"
    else:
        last = first + period * data.reuse - 1
        numbers = [str(first), *([str(first + 1)] if last > first + 1 else []), *(["…"] if last > first + 2 else [])]
        numbers += [str(last)] if last > first else []
        ending = "at most" if at_most else f"again in every cycle of {period} rollouts"
        text = "0: every completion is fresh" if last == 0 else f"{', '.join(numbers)} optimizer steps, {ending}"
        if data.lead:
            text += f"; less in the first {data.lead} rollouts"
            if sync.get("in_flight"):
                text += ", and for tokens sampled after a sync in flight"
    if data.partial:
        from lgrpo.data.partial import PartialRollouts

        spans = getattr(data.partial, "max_spans", PartialRollouts.max_spans)
        text += f"; more for the first tokens of continued completions, which span up to {spans} syncs (data.partial)"
    if data.max_lag is not None and (last is None or last > data.max_lag):
        text += f"; those above {data.max_lag} (data.max_lag) are not trained on"
    return text


def _num_syncs(rollouts: int, period: Period, lead: int) -> int:
    """Return the number of rollouts that a sync precedes.

    >>> [_num_syncs(10, period=3, lead=lead) for lead in (0, 2)]
    [4, 4]
    """
    from lgrpo.functional.sync_cycle import is_sync_due

    return sum(is_sync_due(rollout, period, lead) for rollout in range(rollouts))


def _whole_run(
    config: Namespace, micro_batches: int, period: Period, min_period: int | None = None
) -> list[tuple[str, str]]:
    data = config.data
    if data.num_rollouts is None:
        return [("stage (epoch)", "one pass over the training prompts; set data.num_rollouts to choose its length")]
    epoch_steps = _epoch_steps(config, micro_batches)
    stage = ("stage (epoch)", f"{epoch_steps / data.reuse:g} rollouts, {epoch_steps} optimizer steps")
    steps = _num_steps(config, micro_batches)
    if steps is None:
        return [stage, ("whole run", "no end: neither trainer.max_epochs nor trainer.max_steps is set")]
    rollouts = -(-steps // data.reuse)
    syncs = str(_num_syncs(rollouts, period, data.lead))
    if min_period is not None:
        syncs += f" to {_num_syncs(rollouts, min_period, data.lead)}"
    completions = rollouts * data.num_prompts * data.group_size
    whole = f"{rollouts} rollouts, {steps} optimizer steps, {syncs} syncs, {completions:,} completions"
    return [stage, ("whole run", whole)]


def _epoch_steps(config: Namespace, micro_batches: int) -> int:
    """Return the optimizer steps of an epoch of ``data.num_rollouts``."""
    data, limit = config.data, config.trainer.limit_train_batches
    steps: int = data.num_rollouts * data.reuse
    if limit is not None:  # a number of batches, or a share of them
        batches = steps * micro_batches
        steps = (int(limit * batches) if isinstance(limit, float) else min(limit, batches)) // micro_batches
    return steps


def _num_steps(config: Namespace, micro_batches: int) -> int | None:
    """Return the optimizer steps of the whole run; None if it has no end, or its epochs have no known length."""
    trainer = config.trainer
    if config.data.num_rollouts is None:
        return None
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * _epoch_steps(config, micro_batches))
    elif trainer.max_epochs is None and not limits:
        limits.append(1000 * _epoch_steps(config, micro_batches))  # Lightning's default
    return min(limits) if limits else None


def _zero_variance_groups(config: Namespace) -> str:
    kept = "masked, regularisers included" if config.zero_variance_mask else "kept"
    if (resampling := config.data.dynamic_sampling) is None:
        return kept
    return f"sampled again with other prompts, {resampling.max_rounds} times at most; then {kept}"
