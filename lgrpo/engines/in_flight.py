"""Syncs in flight: a generation stops for a sync and continues with the new weights, instead of ending before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, OnGroup, Sampling
from lgrpo.engines.recovery import EngineError
from lgrpo.types import Completion, Prompt

_REPEAT = 0.05
"""Seconds after which a generation that has not ended is asked again to stop: it may have begun after the request."""


class SyncPause:
    """Pauses the generation of another thread while weights are replaced.

    The trainer holds ``paused`` during a sync. The thread that samples calls ``generate``, which stops for that, and
    continues all completions from their tokens afterwards. Their tokens then have several versions.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.is_allowed = False
        """Whether a sync may interrupt a generation."""
        self._engine = engine
        self._changed = threading.Condition()
        self._is_paused = False
        self._is_generating = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have nothing generated inside the context."""
        try:
            with self._changed:
                self._is_paused = True
                while self._is_generating:
                    self._engine.stop()
                    self._changed.wait(_REPEAT)
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup,
    ) -> list[list[Completion]]:
        """Return ``num_samples`` completions of each prompt, as ``RolloutEngine.generate`` does."""
        whole: dict[int, list[Completion]] = {}
        begun: dict[int, list[Completion]] = {}
        while len(whole) < len(prompts):
            asked = [index for index in range(len(prompts)) if index not in whole]

            def keep(number: int, group: list[Completion], asked: list[int] = asked) -> None:
                whole[asked[number]] = group
                on_group(asked[number], group)

            with self._generating():
                generation = Generation(
                    [prompts[index] for index in asked],
                    num_samples,
                    sampling,
                    seed,
                    tokenizer,
                    keep,
                    *self._engine.require_weights(),
                    begun={asked.index(index): group for index, group in begun.items()},
                    is_partial=True,
                )
                self._engine.generate_part(generation)
            begun = {asked[number]: group for number, group in generation.unfinished.items()}
            if begun and not generation.is_stopped:
                raise EngineError(f"{type(self._engine).__name__} left {len(begun)} groups unfinished")
        return [whole[index] for index in range(len(prompts))]

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Wait until nothing is paused, and make ``paused`` wait for the code inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._is_generating = True
        try:
            yield
        finally:
            with self._changed:
                self._is_generating = False
                self._changed.notify_all()
