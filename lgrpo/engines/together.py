"""Several training processes, one set of servers: rank 0 acts, the others hear of it and do their part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lgrpo.engines.base import EngineError
from lgrpo.types import NamedTensors, PolicyWeights

Result = TypeVar("Result")


class Line:
    """From rank 0 to the others, beside the group that trains. All ranks make it, and use it, at the same time.

    Rank 0 may go through a policy's weights as often and as far as it likes. Where they are spread over the ranks each
    tensor is gathered on all of them: so it says beforehand which one it takes, and the others take it too.
    """

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: Seconds within which rank 0 must say something, and the others must come.
        """
        self.rank = dist.get_rank()
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @staticmethod
    def is_needed() -> bool:
        """Whether this is one of several training processes."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def lead(
        self,
        act: Callable[[PolicyWeights | None], Result],
        weights: PolicyWeights | None,
        outcome: Callable[[], Any],
    ) -> Result:
        """On rank 0: acts once all ranks are here, and tells them what came of it, or what went wrong."""
        self._meet()
        try:
            result = act(None if weights is None else self._announced(weights))
            self._tell("done", outcome())
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to see
                self._tell("failed", str(error) or type(error).__name__)
            raise
        return result

    def follow(self, weights: PolicyWeights | None) -> Any:
        """On the others: takes the tensors rank 0 takes. What came of it, or an error."""
        self._meet()
        tensors: Iterator[tuple[str, Tensor]] = iter(())
        parts = {} if weights is None else _parts(weights)
        while True:
            word, what = self._hear()
            if word == "begin":
                tensors = parts[what]()
            elif word == "next":
                next(tensors, None)
            elif word == "done":
                return what
            else:
                raise EngineError(f"on rank 0: {what}")

    def _announced(self, weights: PolicyWeights) -> PolicyWeights:
        def announced(part: str, found: NamedTensors) -> NamedTensors:
            def tensors() -> Iterator[tuple[str, Tensor]]:
                self._tell("begin", part)
                own = found()
                while True:
                    self._tell("next")
                    try:
                        yield next(own)
                    except StopIteration:
                        return

            return tensors

        parts = {part: announced(part, found) for part, found in _parts(weights).items()}
        if weights.adapter is None:
            return replace(weights, tensors=parts["whole"])
        adapter = replace(weights.adapter, base=parts["base"], tensors=parts["adapter"])
        return PolicyWeights.adapted(weights.config, adapter)

    def _meet(self) -> None:
        with self._explained("not all ranks came to a sync"):
            dist.barrier(group=self._group)

    def _tell(self, word: str, what: Any = None) -> None:
        with self._explained("another rank is gone"):
            dist.broadcast_object_list([(word, what)], src=0, group=self._group)

    def _hear(self) -> tuple[str, Any]:
        heard: list[Any] = [None]
        with self._explained("rank 0 is gone, or said nothing"):
            dist.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(f"{what} (they have {self.timeout:g} s): {str(error).splitlines()[0][:200]}") from error


def _parts(weights: PolicyWeights) -> dict[str, NamedTensors]:
    """What rank 0 may go through."""
    if weights.adapter is None:
        return {"whole": weights.tensors}
    return {"base": weights.adapter.base, "adapter": weights.adapter.tensors}
