"""Compiled layers that keep only part of their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch._functorch.config
from torch import fx


@dataclass(frozen=True)
class ActivationBudgetBackend:
    """Inductor as a backend of ``torch.compile``, with a budget of activations kept for the backward pass.

    Torch reads the budget from a global setting whenever it compiles: in the first forward pass, for new shapes, or
    when a checkpointed layer is recomputed. The backend sets it only while it compiles, so other compiled code in the
    process is not affected. Layers with equal backends share compiled code.
    """

    budget: float
    """Share of activations to keep, from 0 to 1 (``policy.activation_memory``)."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        with torch._functorch.config.patch(activation_memory_budget=self.budget):
            return torch._inductor.compile(graph, list(inputs))


def whole_layers() -> AbstractContextManager[Any]:
    """Return a context in which a layer is compiled as one graph under DDP too.

    Otherwise torch splits it at DDP's buckets of 25 MB, so that gradients can be sent before the backward pass of a
    graph ends. A layer is small enough for that, and parts of a layer fuse less and keep more activations.
    """
    import torch._dynamo.config  # slow to import

    return torch._dynamo.config.patch(optimize_ddp=False)
