"""vLLM in a process not its own: how it is imported, kept apart, asked, and explained when it fails."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from lgrpo.engines.base import EngineError, EngineFailure, Sampling
from lgrpo.types import Prompt

WHOLE_PROMPTS: dict[str, Any] = {"enable_chunked_prefill": False}
"""On a CPU: where vLLM reads a prompt in pieces it turns a seeded request's generator back, which CPUs' cannot do."""


def import_vllm() -> Any:
    """The vllm package, or an error that says how to get it."""
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise EngineError(
            f"this engine needs vLLM, which cannot be imported ({error}): pip install 'lgrpo[vllm]', or use "
            "lgrpo.engines.TransformersEngine"
        ) from error
    return vllm


def check_lengths(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    """vLLM would cut the completion of a long prompt short without a word."""
    for prompt in prompts:
        if len(prompt.token_ids) + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt.token_ids)} tokens and a completion of {sampling.max_tokens} exceed vLLM's "
                f"max_model_len of {max_model_len}: {prompt.text[:60]!r}…"
            )


def explain(error: Exception, config: PretrainedConfig) -> str:
    """What stopped vLLM from starting, in a line, with what to do about it."""
    text, architecture = str(error), (config.architectures or [config.model_type])[0]
    if "are not supported" in text or "no vLLM implementation" in text.lower() or "head_size" in text.lower():
        return f"vLLM cannot serve {architecture}: {first_line(error)}. Use lgrpo.engines.TransformersEngine"
    if "memory profiling" in text:
        return (
            "vLLM measures how much of the GPU's memory it needs, and some was given back meanwhile, by another "
            "process most likely: start it again, or set kv_cache_gib, with which it does not measure "
            f"({first_line(error)})"
        )
    if "KV cache" in text or "cache blocks" in text or "memory" in text.lower():
        return (
            f"vLLM found no memory for the KV cache: {first_line(error)}. Lower max_model_len, or raise kv_cache_gib "
            "or gpu_memory_utilization"
        )
    return f"vLLM did not start with {architecture}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


def answer_all(
    llm: Any,
    requests: Mapping[int, tuple[dict[str, Any], Any]],
    keep: Callable[[int, Any], None],
    noise: int,
    timeout: float,
    adapter: Any = None,
) -> None:
    """Steps vLLM until all requests are answered. After an error none of them is left inside.

    Args:
        llm: A ``vllm.LLM``.
        requests: A prompt and its parameters by a number of its own.
        keep: Is given the number and vLLM's output of each, as soon as it is finished.
        noise: Requests without a seed of their own draw from the process's generators, which begin with this: left as
            the trainer has them they would give the same numbers every time, since ``isolated``, in which this is to be
            called, turns them back.
        timeout: Seconds all of it may take.
        adapter: vLLM's request for one, to be applied to all.
    """
    engine, finished = llm.llm_engine, 0
    deadline = time.monotonic() + timeout
    inputs, parameters = zip(*requests.values(), strict=True)
    with without_collection():
        np.random.seed(noise % 2**32)
        torch.manual_seed(noise)
        try:
            names = llm.enqueue(list(inputs), list(parameters), adapter, use_tqdm=False)
            places = {name.split("-")[0]: place for name, place in zip(names, requests, strict=True)}
            while engine.has_unfinished_requests():
                if time.monotonic() > deadline:
                    left, total = engine.get_num_unfinished_requests(), sum(p.n for p in parameters)
                    raise EngineError(f"vLLM had {left} of {total} completions unfinished after {timeout:g} s")
                for output in _step(engine):
                    if output.finished:
                        keep(places[output.request_id.split("-")[0]], output)  # behind the dash, a random part
                        finished += 1
        except BaseException:  # what is left inside would make the next generation wait for ever
            with contextlib.suppress(Exception):  # a broken engine may not even do that
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
    if finished != len(requests):
        raise EngineFailure(f"vLLM answered {finished} of {len(requests)} prompts")


def _step(engine: Any) -> list[Any]:
    try:
        return engine.step()
    except Exception as error:
        raise EngineFailure(f"vLLM failed while it generated: {first_line(error)}") from error


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage: vLLM makes many small objects at every token, and few of them are garbage by then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """vLLM works inside; random states, thread count, exception hook and environment are the trainer's again after."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads, hook, environment = (
        torch.set_num_threads,
        torch.get_num_threads(),
        sys.excepthook,
        dict(os.environ),
    )
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        sys.excepthook = hook
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "RANK", "TORCHINDUCTOR_COMPILE_THREADS"):
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)
