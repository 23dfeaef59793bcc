"""Decoding steps of vLLM with less work in Python for each token, which can take longer than the GPU needs.

What is sampled does not change. Methods of vLLM's objects are replaced for one generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def quick_outputs(processor: Any) -> Callable[..., Any]:
    """Return a replacement of ``OutputProcessor.process_outputs`` for requests whose tokens are read at their end.

    It stores the tokens of requests that go on, and has vLLM process the outputs of those that end.
    """
    process, states = processor.process_outputs, processor.request_states

    def process_outputs(outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        ended = []
        for output in outputs:
            if output.finish_reason is not None:
                ended.append(output)
            elif (state := states.get(output.request_id)) is not None:  # otherwise it was aborted
                state.detokenizer.update(output.new_token_ids, False)
                if output.new_logprobs is not None:
                    add_logprobs(state.logprobs_processor, output.new_logprobs)
        return process(ended, *arguments, **options)

    return process_outputs


def add_logprobs(processor: Any, arrays: Any) -> None:
    """Append log-probabilities, as vLLM's scheduler returns them, to a request's ``FlatLogprobs``."""
    flat, width = processor.logprobs, 1 + processor.num_logprobs
    for token_ids, logprobs, rank in zip(arrays[0].tolist(), arrays[1].tolist(), arrays[2].tolist(), strict=True):
        flat.start_indices.append(len(flat.logprobs))
        flat.token_ids.extend(token_ids[:width])
        flat.logprobs.extend(logprobs[:width])
        flat.ranks.extend((rank, *range(1, width)))
        flat.decoded_tokens.extend((None,) * width)
        flat.end_indices.append(len(flat.logprobs))
        processor.cumulative_logprob += logprobs[0]


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
def quick_decoding(engine: Any) -> Iterator[None]:
    """Replace methods of an ``LLMEngine`` of this process inside the context."""
    scheduler, processor = engine.engine_core.engine_core.scheduler, engine.output_processor
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(processor, "process_outputs", quick_outputs(processor)))
        if (allocate_slots := quick_allocation(scheduler)) is not None:
            stack.enter_context(_replaced(scheduler.kv_cache_manager, "allocate_slots", allocate_slots))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Set an attribute of an object that has the method of its class, and remove it at the end."""
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
