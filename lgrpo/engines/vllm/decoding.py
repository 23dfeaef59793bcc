"""Decoding steps of vLLM with less work in Python for each token, which takes longer than the GPU needs.

What is sampled does not change. Attributes of vLLM's objects are replaced for one generation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


class HeldOutputs:
    """Passes the outputs of a request to vLLM's output processor together when it ends, instead of at every step.

    Log-probabilities go into the request's ``FlatLogprobs`` directly: the processor adds them one token at a time.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._process: Callable[..., Any] = processor.process_outputs
        self._held: dict[str, list[Any]] = defaultdict(list)

    def process_outputs(self, outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """Keep the outputs, and process those of requests that end."""
        held, ended = self._held, []
        for output in outputs:
            held[output.request_id].append(output)
            if output.finish_reason is not None:
                ended.append(output.request_id)
        return self._process([self._joined(held.pop(name)) for name in ended], *arguments, **options)

    def release(self) -> None:
        """Process the outputs of all requests that have not ended."""
        held, self._held = self._held, defaultdict(list)
        self._process([self._joined(outputs) for outputs in held.values()])

    def _joined(self, outputs: list[Any]) -> Any:
        """Return the last output with the tokens of all, and store their log-probabilities."""
        last, state = outputs[-1], self._processor.request_states.get(outputs[-1].request_id)
        if state is None:  # it was aborted
            return last
        add_logprobs(state.logprobs_processor, [o.new_logprobs for o in outputs if o.new_logprobs is not None])
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        last.new_logprobs, last.prefill_stats = None, outputs[0].prefill_stats
        return last


def add_logprobs(processor: Any, parts: Sequence[Any]) -> None:
    """Append arrays of log-probabilities, as vLLM's scheduler returns them, to a request's ``FlatLogprobs``."""
    if not parts:
        return
    flat, width = processor.logprobs, 1 + processor.num_logprobs
    token_ids, logprobs = (np.concatenate([part[i] for part in parts])[:, :width] for i in (0, 1))
    ranks = np.broadcast_to(np.arange(width), token_ids.shape).copy()
    ranks[:, 0] = np.concatenate([part[2] for part in parts])
    begin = len(flat.logprobs)
    starts = range(begin, begin + token_ids.size + 1, width)
    flat.start_indices.extend(starts[:-1])
    flat.end_indices.extend(starts[1:])
    flat.token_ids.extend(token_ids.ravel().tolist())
    flat.logprobs.extend(logprobs.ravel().tolist())
    flat.ranks.extend(ranks.ravel().tolist())
    flat.decoded_tokens.extend([None] * token_ids.size)
    processor.cumulative_logprob += float(logprobs[:, 0].sum())


def quick_allocation(scheduler: Any) -> Callable[..., Any] | None:
    """Return a replacement of ``KVCacheManager.allocate_slots`` that knows when nothing is to be done.

    A decoding step needs a new block of the cache only for the first token of a block, and completes a block only with
    its last one. None if the model's cache or the scheduler is of another kind than this holds for.
    """
    manager = scheduler.kv_cache_manager
    caches = manager.coordinator.single_type_managers
    if [type(cache).__name__ for cache in caches] != ["FullAttentionManager"] or scheduler.connector is not None:
        return None
    size, nothing, allocate = caches[0].block_size, manager.empty_kv_cache_blocks, manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **options: Any) -> Any:
        is_inside = num_new_tokens == 1 and 0 < request.num_computed_tokens % size < size - 1
        if is_inside and num_lookahead_tokens == 0 and not options:
            return nothing
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **options)

    return allocate_slots


@contextlib.contextmanager
def quick_decoding(engine: Any) -> Iterator[HeldOutputs]:
    """Replace methods of an ``LLMEngine`` of this process inside the context; return what holds its outputs back."""
    scheduler, processor = engine.engine_core.engine_core.scheduler, engine.output_processor
    held, allocate_slots = HeldOutputs(processor), quick_allocation(scheduler)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(processor, "process_outputs", held.process_outputs))
        if allocate_slots is not None:
            stack.enter_context(_replaced(scheduler.kv_cache_manager, "allocate_slots", allocate_slots))
        yield held


@contextlib.contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Set an attribute of an object that has the method of its class, and remove it at the end."""
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
