"""The file that says what a sweep runs."""

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

from lgrpo.report import nearest

Value = Literal["last", "max", "min", "mean"]


class SweepError(ValueError):
    """A grid that cannot be run. Nothing was."""


@dataclass(kw_only=True, frozen=True)
class Arm:
    """One choice of settings, run with every seed."""

    name: str
    configs: list[str]
    settings: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        """As for ``lgrpo fit``, but for the seed and the folder."""
        configs = [f"--config={path}" for path in self.configs]
        return [*configs, *(f"--{name}={_as_text(value)}" for name, value in self.settings.items())]

    @property
    def folder(self) -> str:
        """A name for a folder: readable, and another one for each arm."""
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "_", self.name).strip("_.")
        is_plain = plain == self.name and len(plain) < 80
        return plain if is_plain else f"{plain[:60]}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"


@dataclass(kw_only=True)
class Grid:
    """What is run, and what is read from it."""

    name: str
    arms: list[Arm]
    seeds: list[int]
    metrics: list[str]
    own_metrics: list[str] = field(default_factory=list)
    baseline: str = ""
    """Name of the arm the others are compared with."""
    value: Value = "last"
    confidence: float = 0.95


def read_grid(path: Path) -> Grid:
    """Reads and checks a grid file.

    Its keys: ``configs`` (of every run, relative to the file), ``settings`` (of every run), ``grid`` (settings with
    lists of values: all combinations are run), ``arms`` (named choices, each with ``configs`` and ``settings`` of its
    own, times the grid), ``seeds`` (a list, or how many), ``metrics``, ``own_metrics``, ``baseline``, ``value``,
    ``confidence``.

    Raises:
        SweepError: it is no grid; says why.
    """
    given = _read(path)
    known = [
        "configs",
        "settings",
        "grid",
        "arms",
        "seeds",
        "metrics",
        "own_metrics",
        "baseline",
        "value",
        "confidence",
    ]
    for key in given:
        if key not in known:
            raise SweepError(f"{path}: a grid has no {key!r}{nearest(str(key), known) or f'; it has {known}'}")
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
        raise SweepError(f"{path}: the baseline {grid.baseline!r} is no arm{hint}")
    if grid.value not in get_args(Value):
        raise SweepError(f"{path}: value is {grid.value!r}; it is one of {', '.join(get_args(Value))}")
    if not isinstance(grid.confidence, float) or not 0 < grid.confidence < 1:
        raise SweepError(f"{path}: confidence is {grid.confidence!r}; it lies between 0 and 1")
    return grid


def _read(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SweepError(f"the grid {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise SweepError(f"{path} is no grid: it is to map names (configs, grid, seeds, …) to what they are")
    return given


def _mapping(path: Path, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = given.get(key) or {}
    if not isinstance(found, dict):
        raise SweepError(f"{path}: {key} is {found!r}; it maps the names of settings to values")
    if taken := [name for name in found if name in ("seed_everything", "run", "ckpt_path", "config")]:
        raise SweepError(f"{path}: {key} has {taken[0]}, which a sweep sets for each of its runs (seeds: …)")
    return {str(name): value for name, value in found.items()}


def _configs(path: Path, given: Mapping[str, Any], key: str) -> list[str]:
    found = given.get(key) or []
    files = [path.parent / name for name in _names(path, {key: found}, key, [])]
    if missing := [file for file in files if not file.is_file()]:
        raise SweepError(f"{path}: there is no config {missing[0]} (they are looked for beside the grid)")
    return [os.path.normpath(file) for file in files]


def _names(path: Path, given: Mapping[str, Any], key: str, default: list[str]) -> list[str]:
    found = given.get(key, default)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise SweepError(f"{path}: {key} is {found!r}; it is a list of names")
    return found


def _seeds(path: Path, given: Any) -> list[int]:
    seeds = list(range(given)) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise SweepError(f"{path}: seeds is {given!r}; it is a list of whole numbers, or how many there are")
    if len(set(seeds)) < len(seeds):
        raise SweepError(f"{path}: seeds has one twice: {seeds}")
    return seeds


def _arms(path: Path, given: Mapping[str, Any], configs: list[str], settings: dict[str, Any]) -> list[Arm]:
    """All named choices times all combinations of the grid."""
    grid = _mapping(path, given, "grid")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"{path}: grid.{name} is {values!r}; it is a list of values, each run by itself")
        if len({_as_text(value) for value in values}) < len(values):
            raise SweepError(f"{path}: grid.{name} has a value twice: {values}")
    named = given.get("arms") or {"": {}}
    if not isinstance(named, dict) or not all(isinstance(arm, dict | None) for arm in named.values()):
        raise SweepError(f"{path}: arms maps a name to configs and settings of its own; it is {named!r}")
    arms = []
    for arm_name, arm in named.items():
        arm = arm or {}
        if unknown := sorted(set(arm) - {"configs", "settings"}):
            raise SweepError(f"{path}: the arm {arm_name} has {unknown[0]!r}; an arm has configs and settings")
        own_configs, own_settings = _configs(path, arm, "configs"), _mapping(path, arm, "settings")
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            parts = [str(arm_name)] if arm_name != "" else []
            parts += [f"{name}={_as_text(value)}" for name, value in chosen.items()]
            every = settings | own_settings | chosen
            arms.append(Arm(name=", ".join(parts), configs=[*configs, *own_configs], settings=every))
    return arms


def _as_text(value: Any) -> str:
    """A value as an argument of the command line."""
    return value if isinstance(value, str) else json.dumps(value)
