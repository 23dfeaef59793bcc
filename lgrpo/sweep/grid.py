"""The grid file, which defines the runs of a sweep."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lgrpo.checks import nearest

Value = Literal["last", "max", "min", "mean"]


class SweepError(ValueError):
    """A grid that is wrong, or does not match the runs in its folder."""


@dataclass(kw_only=True, frozen=True)
class Arm:
    """One variant of the settings, run with every seed."""

    name: str
    configs: list[str]
    settings: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        """Arguments of ``lgrpo fit`` without the seed and the folder."""
        configs = [f"--config={path}" for path in self.configs]
        return [*configs, *(f"--{name}={_as_text(value)}" for name, value in self.settings.items())]

    @property
    def folder(self) -> str:
        """Name of the folder of the arm: readable and unique."""
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "_", self.name).strip("_.")
        is_plain = plain == self.name and len(plain) < 80
        return plain if is_plain else f"{plain[:60]}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"


@dataclass(kw_only=True)
class Grid:
    """The runs of a sweep and the metrics to compare."""

    name: str
    arms: list[Arm]
    seeds: list[int]
    metrics: list[str]
    """All metrics to compare, ``own_metrics`` included."""
    own_metrics: list[str] = field(default_factory=list)
    """Metrics that the user's code logs; their names are not checked."""
    baseline: str = ""
    """Name of the arm that the others are compared with."""
    value: Value = "last"
    """Which value of a metric is compared."""
    confidence: float = 0.95
    """Confidence level of the intervals."""


def read_grid(path: Path) -> Grid:
    """Read and check a grid file.

    Keys: ``configs`` (files for every run, relative to the grid file), ``settings`` (for every run), ``grid`` (settings
    with lists of values, all combinations of which are run), ``arms`` (named variants with ``configs`` and ``settings``
    that are added to those of every run, times the grid), ``seeds`` (a list, or their number), ``metrics``,
    ``own_metrics``, ``baseline``, ``value``, ``confidence``.

    Raises:
        SweepError: The file is not a valid grid.
    """
    given = _read(path)
    known = ["configs", "settings", "grid", "arms", "seeds", "metrics", "own_metrics"]
    known += ["baseline", "value", "confidence"]
    for key in given:
        if key not in known:
            hint = nearest(str(key), known) or f"; the keys are {', '.join(known)}"
            raise SweepError(f"{path}: a grid has no key {key!r}{hint}")
    if "grid" not in given and "arms" not in given:
        raise SweepError(f"{path} varies nothing: give a grid (settings with lists of values), or arms")
    configs, settings = _configs(path, given, "configs"), _mapping(path, given, "settings")
    arms = _arms(path, given, configs, settings)
    metrics = _names(path, given, "metrics", ["val/pass@1"])
    own = _names(path, given, "own_metrics", [])
    grid = Grid(
        name=path.stem,
        arms=arms,
        seeds=_seeds(path, given.get("seeds", [0, 1, 2])),
        metrics=[*metrics, *own],
        own_metrics=own,
        baseline=str(given.get("baseline", arms[0].name)),
        value=given.get("value", "last"),
        confidence=given.get("confidence", 0.95),
    )
    names = [arm.name for arm in arms]
    if grid.baseline not in names:
        hint = nearest(grid.baseline, names) or f"; the arms are {names}"
        raise SweepError(f"{path}: the baseline {grid.baseline!r} is not an arm{hint}")
    if grid.value not in get_args(Value):
        raise SweepError(f"{path}: value is {grid.value!r}; it must be one of {', '.join(get_args(Value))}")
    if not isinstance(grid.confidence, float) or not 0 < grid.confidence < 1:
        raise SweepError(f"{path}: confidence is {grid.confidence!r}; it must be a number between 0 and 1")
    return grid


def _read(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"the grid {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise SweepError(f"{path} is not a grid: it must be a mapping with keys such as configs, grid, seeds")
    return given


def _mapping(path: Path, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = given.get(key) or {}
    if not isinstance(found, dict):
        raise SweepError(f"{path}: {key} is {found!r}; it must map the names of settings to values")
    if taken := [name for name in found if name in ("seed_everything", "run", "ckpt_path", "config")]:
        raise SweepError(
            f"{path}: {key} has {taken[0]}, which a sweep sets for each of its runs: remove it (for seeds: seeds)"
        )
    return {str(name): value for name, value in found.items()}


def _configs(path: Path, given: Mapping[str, Any], key: str) -> list[str]:
    found = given.get(key) or []
    files = [path.parent / name for name in _names(path, {key: found}, key, [])]
    if missing := [file for file in files if not file.is_file()]:
        raise SweepError(f"{path}: there is no config {missing[0]} (paths are relative to the grid file)")
    return [os.path.normpath(file) for file in files]


def _names(path: Path, given: Mapping[str, Any], key: str, default: list[str]) -> list[str]:
    found = given.get(key, default)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise SweepError(f"{path}: {key} is {found!r}; it must be a list of names")
    return found


def _seeds(path: Path, given: Any) -> list[int]:
    seeds = list(range(given)) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise SweepError(f"{path}: seeds is {given!r}; it must be a list of integers, or their number")
    if len(set(seeds)) < len(seeds):
        raise SweepError(f"{path}: seeds has a value twice: {seeds}")
    return seeds


def _arms(path: Path, given: Mapping[str, Any], configs: list[str], settings: dict[str, Any]) -> list[Arm]:
    """Return all named variants times all combinations of the grid."""
    grid = _mapping(path, given, "grid")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"{path}: grid.{name} is {values!r}; it must be a list of values")
        if len({_as_text(value) for value in values}) < len(values):
            raise SweepError(f"{path}: grid.{name} has a value twice: {values}")
    named = given.get("arms") or {"": {}}
    if not isinstance(named, dict) or not all(isinstance(arm, dict | None) for arm in named.values()):
        raise SweepError(f"{path}: arms is {named!r}; it must map a name to configs and settings")
    arms = []
    for arm_name, arm in named.items():
        arm = arm or {}
        if unknown := sorted(set(arm) - {"configs", "settings"}):
            raise SweepError(f"{path}: the arm {arm_name} has {unknown[0]!r}; an arm has configs and settings")
        arm_configs, arm_settings = _configs(path, arm, "configs"), _mapping(path, arm, "settings")
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            parts = [str(arm_name)] if arm_name != "" else []
            parts += [f"{name}={_as_text(value)}" for name, value in chosen.items()]
            all_settings = settings | arm_settings | chosen
            arms.append(Arm(name=", ".join(parts), configs=[*configs, *arm_configs], settings=all_settings))
    return arms


def _as_text(value: Any) -> str:
    """Return a value as an argument of the command line."""
    return value if isinstance(value, str) else json.dumps(value)
