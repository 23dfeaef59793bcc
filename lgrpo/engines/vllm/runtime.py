"""Use of vLLM inside the training process: import, isolation from the trainer, requests, and error messages."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from lgrpo.engines.completions import Generation
from lgrpo.engines.recovery import EngineError, EngineFailure
from lgrpo.engines.vllm.decoding import quick_decoding
from lgrpo.engines.vllm.requests import Requests

WHOLE_PROMPTS: dict[str, Any] = {"enable_chunked_prefill": False}
"""Arguments for seeded requests on a CPU, whose generators cannot be rewound as chunked prefill requires."""

BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
"""Environment variable of a process whose kernels do not depend on the batch. vLLM reads it when it is imported."""


def check_vllm_installed() -> None:
    """Raise an ``EngineError`` that says how to install vLLM if it is missing. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "this engine needs vLLM, which is not installed: pip install 'lgrpo[vllm]', or use "
            "lgrpo.engines.TransformersEngine"
        )


def set_environment() -> None:
    """Set the variables that vLLM reads when it is imported or built."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM warns about harmless things at every sync


def import_vllm() -> Any:
    """Return the vllm package, or raise an ``EngineError`` that says why it cannot be imported."""
    check_vllm_installed()
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise EngineError(
            f"this engine needs vLLM, which cannot be imported ({error}): pip install 'lgrpo[vllm]', or use "
            "lgrpo.engines.TransformersEngine"
        ) from error
    return vllm


def check_batch_invariance(on_cpu: bool) -> None:
    """Raise an ``EngineError`` if vLLM has no kernels whose results do not depend on the batch."""
    if on_cpu:
        raise EngineError(
            "batch_invariant is set, and vLLM's kernels whose results do not depend on the batch need a GPU: leave it "
            "out on a CPU, where float32 tokens hardly depend on the batch"
        )


def check_context_length(generation: Generation, max_model_len: int) -> None:
    """Raise ``ValueError`` if prompt and completion exceed the context: vLLM would truncate silently."""
    for index, prompt in enumerate(generation.prompts):
        max_tokens = generation.max_tokens_of(index)
        if len(prompt.token_ids) + max_tokens > max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt.token_ids)} tokens and a completion of {max_tokens} exceed vLLM's "
                f"max_model_len of {max_model_len}: {prompt.text[:60]!r}…"
            )


def explain(error: Exception, config: PretrainedConfig) -> str:
    """Return why vLLM did not start, and what to do."""
    text, architecture = str(error), (config.architectures or [config.model_type])[0]
    if "are not supported" in text or "no vLLM implementation" in text.lower() or "head_size" in text.lower():
        return f"vLLM cannot serve {architecture}: {first_line(error)}. Use lgrpo.engines.TransformersEngine"
    if "memory profiling" in text:
        return (
            "vLLM measures how much GPU memory it needs, and memory was released meanwhile, probably by another "
            f"process: start again, or set kv_cache_gib, with which it does not measure ({first_line(error)})"
        )
    if "KV cache" in text or "cache blocks" in text or "memory" in text.lower():
        return (
            f"vLLM found no memory for the KV cache: {first_line(error)}. Lower max_model_len, or raise kv_cache_gib "
            "or gpu_memory_utilization"
        )
    return f"vLLM did not start with {architecture}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


def answer_all(
    llm: Any,
    requests: Requests,
    seed: int,
    timeout: float,
    adapter: Any = None,
    on_step: Callable[[], None] | None = None,
) -> None:
    """Step vLLM until all requests are answered, or enough of them. Afterwards, also after an error, vLLM has none of
    them left. Call it in ``isolated``.

    Args:
        llm: A ``vllm.LLM``.
        requests: Requests of a generation.
        seed: Seed of the process's generators, from which requests without a seed draw: ``isolated`` restores them.
        timeout: Time limit in seconds.
        adapter: vLLM's request for the adapter to apply, if any.
        on_step: Called between decoding steps.
    """
    engine, finished = llm.llm_engine, 0
    deadline = time.monotonic() + timeout
    inputs, parameters = requests.inputs, requests.parameters
    with without_garbage_collection(), quick_decoding(engine):
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            names = llm.enqueue(list(inputs), list(parameters), adapter, use_tqdm=False)
            numbers = {name.split("-")[0]: number for number, name in enumerate(names)}  # after it is a random part
            while engine.has_unfinished_requests() and not requests.generation.is_enough:
                if time.monotonic() > deadline:
                    left, total = engine.get_num_unfinished_requests(), sum(p.n for p in parameters)
                    raise EngineError(f"vLLM had {left} of {total} completions unfinished after {timeout:g} s")
                for output in _step(engine):
                    if output.finished:
                        requests.keep(numbers[output.request_id.split("-")[0]], output.outputs)
                        finished += 1
                if on_step is not None:
                    on_step()
            if engine.has_unfinished_requests():
                states = engine.output_processor.request_states
                for name, state in states.items():
                    tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                    requests.leave(numbers[name.split("-")[0]], tokens, logprobs)
                finished += len(states)
                engine.abort_request(list(states), internal=True)
        except BaseException:  # the next generation would wait for the requests that are left
            with contextlib.suppress(Exception):  # a failed vLLM may raise again
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
    if finished != len(inputs):
        raise EngineFailure(f"vLLM answered {finished} of {len(inputs)} prompts")
    requests.finish()


def _step(engine: Any) -> list[Any]:
    try:
        return engine.step()
    except Exception as error:
        raise EngineFailure(f"vLLM failed while generating: {first_line(error)}") from error


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: vLLM creates many small objects per token, of which few are garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restore the trainer's random states, thread count, exception hook and environment after vLLM has run inside."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    hook, environment = sys.excepthook, dict(os.environ)
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
