"""Rewards given as ``file.py:function`` on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
