"""Answers to problems of reasoning-gym, scored by its own rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, final

from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@final
class ReasoningGymScore(Reward):
    """What reasoning-gym gives an answer, from 0 to 1.

    The answer is what stands in the last ``<answer>…</answer>``, or else the whole completion. One that the rule cannot
    read gets 0.
    """

    def __init__(self, name: str | None = None, config: dict[str, Any] | None = None) -> None:
        """
        Args:
            name: Generator whose rule it is; by default the one the row's ``metadata`` names.
            config: Settings of that generator, where its rule depends on them.
        """
        if config and name is None:
            raise ValueError("config holds the settings of one generator: say which, by name")
        self.name = name
        self.config = config
        self._rules: dict[str, Any] = {}
        if name is not None:
            self._rule(name)

    def required_fields(self) -> set[str]:
        return {"metadata"}  # not the answer: some generators have none and check what they are given

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._rule(self._name_of(row))

    def final_answer(self, text: str) -> str | None:
        tagged = _TAGGED.findall(text)
        return (tagged[-1] if tagged else text).strip() or None

    def score(self, prompt: Prompt, completion: Completion) -> float:
        rule = self._rule(self._name_of(prompt.row))
        try:
            return float(rule.score_answer(self.final_answer(completion.text), {"answer": None, **prompt.row}))
        except Exception:  # the text is the model's: whatever it breaks, it is no answer
            return 0.0

    def _name_of(self, row: Mapping[str, Any]) -> str:
        name = self.name or row["metadata"].get("source_dataset")
        if name is None:
            raise ValueError("the row's metadata names no generator (source_dataset): give ReasoningGymScore a name")
        return str(name)

    def _rule(self, name: str) -> Any:
        if name not in self._rules:
            self._rules[name] = generator(name, self.config, seed=0, size=1)
        return self._rules[name]

    def __getstate__(self) -> dict[str, Any]:
        """Without the generators: they are made again where they are needed."""
        return {"name": self.name, "config": self.config, "_rules": {}}


def generator(name: str, config: Mapping[str, Any] | None, *, seed: int, size: int) -> Any:
    """One of reasoning-gym's generators.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: it has no such generator, or the generator no such settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name!r} needs reasoning-gym: pip install 'lgrpo[gym]'") from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4)
        hint = f"close to it are {close}" if close else f"it has {len(DATASETS)}, among them {sorted(DATASETS)[:5]}"
        raise ValueError(f"reasoning-gym has no generator {name!r}; {hint}")
    settings = dict(config or {})
    if own := sorted({"seed", "size"} & set(settings)):
        raise ValueError(f"config may not set {own} of {name!r}: the task does")
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | d) for d in settings.get("datasets", [])]
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym's {name!r} does not take the config {settings}: {error}") from error
