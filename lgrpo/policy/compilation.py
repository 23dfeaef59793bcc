"""Compiled layers that keep a share of their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch._functorch.config
from torch import fx


@dataclass(frozen=True)
class KeepingShare:
    """A backend of ``torch.compile``: inductor's, with a share of activations kept for the backward pass.

    Torch reads the share while it compiles, wherever that happens: in a first forward pass, in one of new shapes, or
    where a checkpointed layer is computed again. Only then it is set, so what else is compiled in the process has its
    own. Layers share code where their backends are equal, so two policies with different shares do not.
    """

    share: float

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph, compiled."""
        with torch._functorch.config.patch(activation_memory_budget=self.share):
            return torch._inductor.compile(graph, list(inputs))
