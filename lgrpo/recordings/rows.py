"""Rollouts in files of other programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lgrpo.tasks.files import read_file

_LISTS = {"completions": "completion", "rewards": "reward", "finish_reasons": "finish_reason"}
"""Columns that hold lists over all siblings of a prompt, and their names for one completion."""

OPTIONAL = ("observed", "turn_rewards", "episode_failed", "dropped", "kept_token_ids", "kept_counts")
"""Columns of a recording that only episodes or completions of truncated sampling have."""


def read_rows(path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read a file of another program: a row per completion, or per prompt with lists of completions and rewards.

    Args:
        path: JSON lines, JSON or Parquet.
        columns: Names of the columns of a recording; other fields of a row belong to the task.
    """
    rows: list[dict[str, Any]] = []
    numbers: dict[object, int] = {}
    last_siblings: dict[int, int] = {}
    for location, given in read_file(path):
        for one in _completions_in(location, given, columns):
            key = given.get("group", (one["prompt"],))  # by default all completions of a prompt are one group
            one["group"] = numbers.setdefault(key, len(numbers))
            one["sibling"] = last_siblings[one["group"]] = last_siblings.get(one["group"], -1) + 1
            rows.append(one)
    return rows


def _completions_in(location: str, given: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the completions of a row, checked, with the names of ``columns``."""
    lists = {own: given[theirs] for theirs, own in _LISTS.items() if given.get(theirs) is not None}
    if "prompt" not in given or ("completion" not in given and "completion" not in lists):
        raise ValueError(
            f"{location}: a recorded row needs a prompt, and a completion (or completions, a list); this one has "
            f"{sorted(given)}"
        )
    if given.get("token_ids") is not None and (lost := [name for name in OPTIONAL if given.get(name) is not None]):
        raise ValueError(
            f"{location}: {', '.join(lost)} can be read only from a Parquet file with lgrpo's metadata, and without "
            "that the token ids and log-probabilities would mean something else. Keep the metadata (key lgrpo), or "
            "leave these columns, token_ids and logprobs out"
        )
    shared = {name: given[name] for name in ("prompt", "position", "rollout") if name in given}
    known = {*columns, *_LISTS}
    others = {name: value for name, value in given.items() if name not in known}
    row = given.get("row") or others
    shared["row"] = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    own = ("completion", "token_ids", "logprobs", "finish_reason", "reward")
    if "completion" not in lists:
        found = [{name: given.get(name) for name in own}]
    else:
        if wrong := [name for name, values in lists.items() if not isinstance(values, list)]:
            raise ValueError(f"{location}: {wrong[0]}s is not a list")
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{len(values)} {name}s" for name, values in lists.items())
            raise ValueError(f"{location}: {counts}: the lists must have the same length")
        found = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return [_checked(location, shared | one) for one in found]


def _checked(location: str, one: dict[str, Any]) -> dict[str, Any]:
    for name in ("prompt", "completion"):
        if not isinstance(one[name], str):
            raise ValueError(f"{location}: {name} is {one[name]!r}, not a string")
    reward = one.get("reward")
    if reward is not None:
        is_number = isinstance(reward, int | float)
        if not is_number or not math.isfinite(reward):
            raise ValueError(
                f"{location}: the reward is {reward!r}; it must be a finite number, or null if not known yet"
            )
        one["reward"] = float(reward)
    one["finish_reason"] = one.get("finish_reason") or "stop"
    if one["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"{location}: finish_reason is {one['finish_reason']!r}; it must be stop or length")
    ids, logprobs = one.get("token_ids"), one.get("logprobs")
    if logprobs is not None and (ids is None or len(ids) != len(logprobs)):
        raise ValueError(f"{location}: logprobs must have one number for each of token_ids")
    if wrong := [number for number in logprobs or [] if not isinstance(number, int | float)]:
        raise ValueError(f"{location}: logprobs contains {wrong[0]!r}; if one is not known, leave all of them out")
    return one
