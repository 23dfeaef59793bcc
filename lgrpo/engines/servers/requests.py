"""The requests of a generation to vLLM servers, and the completions in their answers."""

from __future__ import annotations

import contextlib
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PretrainedConfig

from lgrpo.engines.completions import Generation
from lgrpo.engines.recovery import EngineError, EngineFailure
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.group import ServedModel
from lgrpo.engines.vllm.kept import from_answer
from lgrpo.engines.vllm.requests import request_fields, request_seed
from lgrpo.types import Completion

_PERIOD = 0.05
"""Seconds between two looks whether a partial generation should end."""
_ABORT_TIMEOUT = 2.0
"""Seconds that a server may take to abort requests."""


class ServerRequests:
    """Requests of one generation, which may be sent to any server.

    A new group is one request. Completions that were begun have one request each, because their prompts differ. While
    ``aborted_at_end`` is active, the requests of a partial generation that should end are aborted; servers then answer
    with the tokens so far.
    """

    def __init__(self, generation: Generation, config: PretrainedConfig, model: ServedModel, timeout: float) -> None:
        self._generation = generation
        self._model = model
        self._timeout = timeout
        self._shared = request_fields(generation, config)
        self._lock = threading.Lock()
        self._open: dict[str, VLLMServer] = {}
        """Servers by the number of a request that is not answered."""

    def group(self, server: VLLMServer, index: int) -> list[Completion]:
        """Return the completions of a prompt; in a partial generation some of them may be unfinished."""
        generation = self._generation
        group = generation.begun_of(index)
        if generation.is_enough:
            return group
        if not any(completion.token_ids for completion in group):
            return self._ask(server, index, self._shared, group)
        open_ones = [sibling for sibling, begun in enumerate(group) if begun.finish_reason is None]
        with ThreadPoolExecutor(len(open_ones)) as pool:
            continued = pool.map(lambda sibling: self._continue(server, index, sibling, group[sibling]), open_ones)
            for sibling, completion in zip(open_ones, continued, strict=True):
                group[sibling] = completion
        return group

    @contextlib.contextmanager
    def aborted_at_end(self) -> Iterator[None]:
        """Abort requests inside the context when the generation should end."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_PERIOD):
                if self._generation.is_enough:
                    try:
                        self._abort()  # again and again: a request may arrive at its server after this
                    except EngineError as error:
                        warnings.warn(f"completions are not interrupted, but waited for: {error}", stacklevel=1)
                        return

        thread = threading.Thread(target=watch, name="engine-abort", daemon=True)
        if self._generation.is_partial:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def _continue(self, server: VLLMServer, index: int, sibling: int, begun: Completion) -> Completion:
        return self._ask(server, index, self._shared | {"n": 1}, [begun], sibling)[0]

    def _ask(
        self, server: VLLMServer, index: int, fields: dict[str, Any], begun: list[Completion], sibling: int = 0
    ) -> list[Completion]:
        """Send a request for completions that continue ``begun``, all from the same tokens."""
        generation, model, number = self._generation, self._model, uuid.uuid4().hex
        token_ids = begun[0].token_ids
        body = {
            **fields,
            "max_tokens": generation.max_tokens_of(index) - len(token_ids),
            "model": model.name,
            "prompt": generation.prompts[index].token_ids + token_ids,
            "seed": request_seed(generation, index, sibling, len(token_ids)) if model.is_seeded else None,
            "return_token_ids": True,
            "return_tokens_as_token_ids": bool(fields["logprobs"]),
            "cache_salt": f"v{generation.version}",
            "request_id": number,
        }
        with self._lock:
            self._open[number] = server
        try:
            choices = server.call("POST", "/v1/completions", self._timeout, json=body)["choices"]
        except EngineError as error:
            if not isinstance(error, EngineFailure) and "logprobs" in str(error):
                raise EngineError(
                    f"the vLLM server at {server.url} does not return {fields['logprobs']} log-probabilities for each "
                    f"token: start it with --max-logprobs {fields['logprobs']}, or lower data.sampling.top_k ({error})"
                ) from error
            raise
        finally:
            with self._lock:
                del self._open[number]
        answers = sorted(choices, key=lambda choice: choice["index"])
        return [self._completion(answer, own) for answer, own in zip(answers, begun, strict=True)]

    def _completion(self, choice: dict[str, Any], begun: Completion) -> Completion:
        reason, logprobs = choice["finish_reason"], choice["logprobs"]
        if reason == "abort" and self._generation.is_enough:
            reason = None
        token_ids = choice["token_ids"] or []
        found, kept = ([], None) if logprobs is None else from_answer(token_ids, logprobs, self._shared["logprobs"])
        return self._generation.completion(token_ids, found, reason, begun, kept)

    def _abort(self) -> None:
        """Ask servers to answer the open requests with the tokens so far."""
        with self._lock:
            by_server: dict[VLLMServer, list[str]] = {}
            for number, server in self._open.items():
                by_server.setdefault(server, []).append(f"cmpl-{number}-0")  # as the server calls it
        for server, names in by_server.items():
            with contextlib.suppress(EngineFailure):  # a server that has failed is noticed elsewhere
                server.call("POST", "/abort_requests", _ABORT_TIMEOUT, is_json=False, json={"request_ids": names})


def keep_or_leave(generation: Generation) -> Callable[[int, list[Completion]], None]:
    """Return a function that adds the completions of a prompt to a generation, finished or not."""

    def add(index: int, group: list[Completion]) -> None:
        if all(completion.finish_reason is not None for completion in group):
            generation.keep(index, group)
        else:
            generation.leave(index, group)

    return add
