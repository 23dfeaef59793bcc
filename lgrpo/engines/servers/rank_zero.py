"""Actions of rank 0 in which all training ranks take part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from lgrpo.engines.recovery import EngineError
from lgrpo.weights import NamedTensors, PolicyWeights, whole_iteration

Weights = TypeVar("Weights", bound=PolicyWeights | None)
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")


class RankZeroChannel(Generic[Outcome]):
    """Messages from rank 0 to the other ranks, in a process group separate from the training group.

    All ranks construct it at the same time. For each action rank 0 calls ``lead`` and the others call ``follow``.

    Rank 0 may iterate over the weights as often as it likes: it announces each iteration, and the others iterate too.
    """

    def __init__(self, timeout: float) -> None:
        self.rank = dist.get_rank()
        self.timeout = timeout
        """Seconds that a rank waits for the others."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def lead(self, act: Callable[[Weights], Result], weights: Weights, outcome: Callable[[], Outcome]) -> Result:
        """Wait for all ranks, act, and send the outcome or the error to the others. For rank 0."""
        self._barrier()
        try:
            with contextlib.ExitStack() as iterations:
                result = act(weights if weights is None else cast(Weights, self._announced(weights, iterations)))
            self._send("done", outcome())
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self._send("failed", str(error) or type(error).__name__)
            raise
        return result

    def follow(self, weights: PolicyWeights | None) -> Outcome:
        """Iterate when rank 0 does, and return the outcome or raise rank 0's error. For all other ranks."""
        self._barrier()
        while True:
            event, content = self._receive()
            if event == "iterate":
                assert weights is not None
                with whole_iteration(_parts(weights)[content]):
                    pass
            elif event == "done":
                return content
            else:
                raise EngineError(f"on rank 0: {content}")

    def _announced(self, weights: PolicyWeights, iterations: contextlib.ExitStack) -> PolicyWeights:
        """Return the same weights, with a message to the other ranks at the start of each iteration."""

        def iterate(part: str) -> Iterator[tuple[str, Tensor]]:
            iterations.close()  # the iteration before may have stopped early
            self._send("iterate", part)
            return iterations.enter_context(whole_iteration(_parts(weights)[part]))

        if weights.adapter is None:
            return replace(weights, tensors=partial(iterate, "whole"))
        adapter = replace(weights.adapter, base=partial(iterate, "base"), tensors=partial(iterate, "adapter"))
        return replace(weights, tensors=adapter.merged, adapter=adapter)

    def _barrier(self) -> None:
        with self._explained("not all ranks reached the sync"):
            dist.barrier(group=self._group)

    def _send(self, event: str, content: Any = None) -> None:
        with self._explained("another rank has ended"):
            dist.broadcast_object_list([(event, content)], src=0, group=self._group)

    def _receive(self) -> tuple[str, Any]:
        received: list[Any] = [None]
        with self._explained("rank 0 has ended or does not respond"):
            dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    @contextlib.contextmanager
    def _explained(self, message: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise EngineError(f"{message} (the time limit is {self.timeout:g} s): {reason}") from error


def _parts(weights: PolicyWeights) -> dict[str, NamedTensors]:
    """Return every source of tensors that rank 0 may iterate over."""
    if weights.adapter is None:
        return {"whole": weights.tensors}
    return {"base": weights.adapter.base, "adapter": weights.adapter.tensors}
