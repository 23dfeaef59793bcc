"""Episodes in a rollout: the environment they need, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import get_args

from lgrpo.advantages import Advantage
from lgrpo.checks import check_instance
from lgrpo.data.evaluation import Benchmark
from lgrpo.engines import EnvironmentEngine, RolloutEngine
from lgrpo.rewards import Failure
from lgrpo.tasks import Task
from lgrpo.types import Completion


def connect_environment(
    task: Task, engine: RolloutEngine, benchmarks: Mapping[str, Benchmark], advantage: Advantage
) -> None:
    """Check that these fit together, and give the engine the environment of the task, if that has one."""
    check_instance("task", task, Task, "a Task, such as lgrpo.tasks.GSM8K()")
    check_instance("engine", engine, RolloutEngine, "a RolloutEngine, such as lgrpo.engines.VLLMEngine()")
    if task.environment is not None and not engine.set_environment(task.environment):
        raise ValueError(
            f"{type(task).__name__} has an environment, but {type(engine).__name__} samples single turns: set "
            "data.engine to lgrpo.engines.EnvironmentEngine, with this engine as data.engine.engine"
        )
    if not engine.has_turns:
        check_turns(type(advantage), type(engine))
    for name, benchmark in benchmarks.items():
        if type(benchmark.task.environment) is not type(task.environment):
            raise ValueError(
                f"benchmark {name!r} and data.task have different environments, but one engine samples both: evaluate "
                "it in a run of its own"
            )


def check_turns(advantage: type[Advantage], engine: type[RolloutEngine]) -> None:
    """Raise an error if the advantage compares turns, but the engine cannot return episodes."""
    if advantage.needs_turns and not (issubclass(engine, EnvironmentEngine) or engine.replays):
        raise ValueError(
            f"data.advantage {advantage.__name__} compares turns, but {engine.__name__} samples single turns: set "
            "data.engine to lgrpo.engines.EnvironmentEngine, with this engine as data.engine.engine, or use another "
            "advantage"
        )


def episode_metrics(completions: Sequence[Completion], may_drop: bool) -> dict[str, float]:
    """Return metrics of episodes; recorded completions without turns do not count.

    Args:
        completions: Completions of a rollout.
        may_drop: Whether observations may be dropped.
    """
    episodes = [completion for completion in completions if completion.turn_rewards is not None]
    kinds = Counter(one.failure[0] for one in episodes if one.failure is not None)
    replacements = [sum(part.stop - part.middle for part in one.dropped) for one in episodes]
    lengths = [len(one.token_ids) - one.num_sampled for one in episodes]
    dropped = {"rollout/dropped_observations": _mean([len(one.dropped) for one in episodes])} if may_drop else {}
    return {
        "rollout/turns": _mean([len(one.turns) for one in episodes]),
        "rollout/observed_length": _mean([a - b for a, b in zip(lengths, replacements, strict=True)]),
        **dropped,
        "rollout/model_errors": float(sum(one.num_errors for one in episodes)),
        "environment/failures": float(kinds.total()),
        **{f"environment/{kind}": float(kinds[kind]) for kind in get_args(Failure)},
    }


def _mean(values: Sequence[int]) -> float:
    return fmean(values) if values else 0.0
