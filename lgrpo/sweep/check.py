"""Check the settings and metrics of a grid before anything runs."""

from __future__ import annotations

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lgrpo.checks import nearest
from lgrpo.report import metric_names
from lgrpo.sweep.grid import Arm, Grid, SweepError


def check_grid(grid: Grid, parser: ArgumentParser) -> None:
    """Raise a ``SweepError`` for a setting or metric that no run has; its message names the nearest one that exists.

    ``parser`` is that of ``lgrpo fit``.
    """
    exit_on_error, parser.exit_on_error = parser.exit_on_error, False
    try:
        for arm in grid.arms:
            _check_metrics(grid, arm, _parse(arm, parser))
    finally:
        parser.exit_on_error = exit_on_error


def _parse(arm: Arm, parser: ArgumentParser) -> Namespace:
    """Return the settings of an arm. After an error, parse them one by one to name the wrong one."""
    try:
        return parser.parse_args(arm.arguments)
    except ArgumentError as error:
        known: list[str] = []
        count = len(arm.configs)
        for end in range(count, len(arm.arguments) + 1):
            try:
                known = _names(parser.parse_args(arm.arguments[:end]))
            except ArgumentError as first:
                if end == count:
                    raise SweepError(f"the configs {arm.configs} cannot be read together: {first}") from error
                name = list(arm.settings)[end - count - 1]
                if name not in known and (near := nearest(name, known)):
                    raise SweepError(f"there is no setting {name}{near}") from error
                raise SweepError(f"the setting {name}={arm.settings[name]!r} is refused: {first}") from error
        raise SweepError(f"the settings of {arm.name} contradict each other: {error}") from error


def _names(config: Namespace) -> list[str]:
    """Return the names of all settings of a config, nested ones included, as the user writes them."""
    flat = {key.replace(".init_args", "").removesuffix(".class_path") for key in vars(config.as_flat())}
    return sorted({".".join(key.split(".")[:n]) for key in flat for n in range(1, key.count(".") + 2)})


def _check_metrics(grid: Grid, arm: Arm, config: Namespace) -> None:
    benchmarks = {name: benchmark.num_samples for name, benchmark in (config.data.benchmarks or {}).items()}
    names = metric_names({"": config.data.evaluation.num_samples} | benchmarks)
    for metric in grid.metrics:
        is_part_of_reward = metric.startswith("reward/")  # its parts are known only when the run starts
        if metric not in names and metric not in grid.own_metrics and not is_part_of_reward:
            hint = nearest(metric, names) or " (tutorials/pages/metrics.md lists them)"
            raise SweepError(f"no run of {arm.name} logs a metric {metric}{hint}")
