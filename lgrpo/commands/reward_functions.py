"""Rewards given as ``file.py:function`` on the command line and in configs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

_load_yaml = get_loader("yaml")

OPTION = re.compile(r"--[\w.]*\breward")
FUNCTION = re.compile(r"[^:=]+\.py:\w+")


def with_reward_functions(args: Sequence[str]) -> list[str]:
    """Return arguments in which ``file.py:function`` as a reward is written as a ``FunctionReward``.

    >>> with_reward_functions(["--data.task.reward", "mine.py:length"])
    ['--data.task.reward=lgrpo.rewards.FunctionReward', '--data.task.reward.function=mine.py:length']
    """
    result: list[str] = []
    for arg in args:
        if FUNCTION.fullmatch(arg) and result and OPTION.fullmatch(result[-1]):
            arg = f"{result.pop()}={arg}"
        option, _, value = arg.partition("=")
        if OPTION.fullmatch(option) and FUNCTION.fullmatch(value):
            result += [f"{option}=lgrpo.rewards.FunctionReward", f"{option}.function={value}"]
        else:
            result.append(arg)
    return result


def read_reward_functions() -> None:
    """Make jsonargparse read ``reward: file.py:function`` in a config as a ``FunctionReward``."""
    set_loader("yaml", lambda text: _expanded(_load_yaml(text)), exceptions=(yaml.YAMLError,))


def _expanded(node: Any, key: str = "", parent: str = "") -> Any:
    """Return loaded YAML in which functions under ``reward``, or by name under ``rewards``, are classes.

    >>> _expanded({"task": {"reward": "mine.py:length"}})
    {'task': {'reward': {'class_path': 'lgrpo.rewards.FunctionReward', 'init_args': {'function': 'mine.py:length'}}}}
    """
    if isinstance(node, list):
        return [_expanded(item) for item in node]
    if isinstance(node, dict):
        return {name: _expanded(value, name, key) for name, value in node.items()}
    if isinstance(node, str) and FUNCTION.fullmatch(node) and (key == "reward" or parent == "rewards"):
        return {"class_path": "lgrpo.rewards.FunctionReward", "init_args": {"function": node}}
    return node
