"""Reward made of a Python function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, final

from lgrpo.rewards.base import BatchReward, Reward, Score
from lgrpo.types import Completion, Prompt


@final
class FunctionReward(Reward):
    """Python function of the text of a completion and the row of the data: ``def my_reward(text, row) -> float``.

    It runs in worker processes with limits (``data.scoring``), like every reward that is not known to be harmless. The
    workers import a function given by its path; another one is pickled by value, with the variables it uses.
    """

    def __init__(self, function: str | Callable[..., Score]) -> None:
        """
        Args:
            function: The function; or its import path, ``package.module.function``; or ``file.py:function``.
        """
        self.function = function
        self._function = load_function(function) if isinstance(function, str) else function
        check_signature(self._function)

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        return self._function(completion.text, prompt.row)

    def __reduce__(self) -> tuple[type[FunctionReward], tuple[str | Callable[..., Score]]]:
        """Pickle a path, not the function at it, whose module may not be importable by its name."""
        return FunctionReward, (self.function,)


def as_reward(reward: Any) -> BatchReward:
    """Return a reward, made of ``reward`` if that is a function.

    >>> type(as_reward(lambda text, row: len(text))).__name__
    'FunctionReward'
    """
    if isinstance(reward, BatchReward):
        return reward
    if isinstance(reward, type):
        raise ValueError(f"the reward is the class {reward.__name__}: give an instance of it, {reward.__name__}(…)")
    if callable(reward):
        return FunctionReward(reward)
    raise ValueError(
        f"the reward is {reward!r}: give a reward, such as lgrpo.rewards.ExactMatch(), or a function of the text of a "
        "completion and the row of the data"
    )


def check_signature(function: Callable[..., Any]) -> None:
    """Raise a ``ValueError`` unless a function can be called with a text and a row, and is not async."""
    name = getattr(function, "__name__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"the reward {name} is an async function: write a subclass of lgrpo.rewards.AsyncReward")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind("", {})
        is_valid = not {"prompts", "completions"} & set(signature.parameters)  # as in TRL
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"the reward {name}{signature} is called with two arguments, the text of one completion and the row of "
            f"the data, and returns a number: def {name}(text, row)"
        )


def load_function(path: str) -> Callable[..., Score]:
    """Return the function at an import path or in a file.

    >>> load_function("math.hypot")(3, 4)
    5.0
    """
    is_file = ".py:" in path
    module, _, name = path.rpartition(":" if is_file else ".")
    try:
        function = getattr(_module_in_file(module) if is_file else importlib.import_module(module), name)
    except (AttributeError, FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise ValueError(f"there is no function {path}: {error}") from error
    except Exception as error:  # importing a module may raise anything
        raise ValueError(f"{module} of the reward {path} cannot be imported: {error!r}") from error
    if not callable(function):
        raise ValueError(f"{path} is not a function")
    return function


def _module_in_file(file: str) -> ModuleType:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"lgrpo_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
