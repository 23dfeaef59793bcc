"""Reward for problems of reasoning-gym, computed by its generators."""

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
    """Score that reasoning-gym gives an answer, from 0 to 1.

    The answer is the content of the last ``<answer>…</answer>``, or else the whole completion. An answer that the
    generator cannot read gets 0.
    """

    def __init__(self, name: str | None = None, config: dict[str, Any] | None = None) -> None:
        """
        Args:
            name: Generator that scores; the default is the one named in the row's ``metadata``.
            config: Settings of that generator, if its scores depend on them.
        """
        if config and name is None:
            raise ValueError("config holds the settings of one generator: set its name, too")
        self.name = name
        self.config = config
        self._generators: dict[str, Any] = {}
        if name is not None:
            self._generator(name)

    def required_fields(self) -> set[str]:
        return {"metadata"}  # not the answer: some generators have none

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._generator(self._name_of(row))

    def final_answer(self, text: str) -> str | None:
        tagged = _TAGGED.findall(text)
        return (tagged[-1] if tagged else text).strip() or None

    def score(self, prompt: Prompt, completion: Completion) -> float:
        scorer = self._generator(self._name_of(prompt.row))
        try:
            return float(scorer.score_answer(self.final_answer(completion.text), {"answer": None, **prompt.row}))
        except Exception:  # any error is caused by the model's text: a wrong answer
            return 0.0

    def _name_of(self, row: Mapping[str, Any]) -> str:
        name = self.name or row["metadata"].get("source_dataset")
        if name is None:
            raise ValueError("the row's metadata names no generator (source_dataset): give ReasoningGymScore a name")
        return str(name)

    def _generator(self, name: str) -> Any:
        if name not in self._generators:
            self._generators[name] = generator(name, self.config, seed=0, size=1)
        return self._generators[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the generators, which are created again when needed."""
        return {"name": self.name, "config": self.config, "_generators": {}}


def generator(name: str, config: Mapping[str, Any] | None, *, seed: int, size: int) -> Any:
    """Return a generator of reasoning-gym; raise a ``ValueError`` if it, or one of its settings, does not exist."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name!r} needs reasoning-gym: pip install 'lgrpo[gym]'") from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4)
        hint = f"similar names: {close}" if close else f"it has {len(DATASETS)}, for example {sorted(DATASETS)[:5]}"
        raise ValueError(f"reasoning-gym has no generator {name!r}; {hint}")
    settings = dict(config or {})
    if reserved := sorted({"seed", "size"} & set(settings)):
        raise ValueError(f"config may not set {reserved} of {name!r}: the task sets them")
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}} | d) for d in settings.get("datasets", [])]
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym's {name!r} rejects the config {settings}: {error}") from error
