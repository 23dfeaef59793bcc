"""A teacher behind a vLLM server."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count, check_range
from lgrpo.engines.recovery import EngineError, EngineFailure
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.functional import TopLogprobs
from lgrpo.functional.teacher import LOWEST_LOGPROB
from lgrpo.teachers.base import Teacher

_TEXT = "Twelve apples, 3.5 kg each: {x} → 42?\n\tdef f(x): return x ** 2"
"""Text that must have the same tokens for the policy and for the teacher."""


@final
class ServerTeacher(Teacher):
    """A language model behind a vLLM server that you run. It reads each completion with its prompt once."""

    def __init__(
        self,
        url: str,
        api_key_env: str = "LGRPO_VLLM_API_KEY",
        timeout: float = 300.0,
        max_requests: int = 64,
        retries: int = 3,
    ) -> None:
        """
        Args:
            url: Address of the server, such as ``http://host:8000``. Start it with ``--max-logprobs`` of at least
                ``top_k``.
            api_key_env: Environment variable with the server's key, if it has one.
            timeout: Upper limit of seconds for an answer.
            max_requests: Upper limit of requests at the same time.
            retries: Number of further attempts for a request that fails.
        """
        check_range("teacher.timeout", timeout, above=0)
        check_count("teacher.max_requests", max_requests, at_least=1)
        check_count("teacher.retries", retries, at_least=0)
        self.url = url
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.max_requests = max_requests
        self.retries = retries
        self._server: VLLMServer | None = None
        self._model, self._context = "", 0

    def start(
        self, tokenizer: PreTrainedTokenizerBase, top_k: int | None, temperature: float, longest: int | None = None
    ) -> None:
        if top_k is None:
            raise ValueError("a ServerTeacher sends the most likely tokens only: set TeacherKL's top_k")
        if temperature != 1:
            raise ValueError(
                f"a ServerTeacher sends probabilities at temperature 1, not {temperature:g}: set TeacherKL's "
                "temperature to 1, or use a FrozenTeacher"
            )
        self._server = VLLMServer(self.url, os.environ.get(self.api_key_env))
        model = self._call("GET", "/v1/models")["data"][0]
        self._model, self._context = model["id"], int(model["max_model_len"])
        self._check_length(longest or 0)
        self._check_vocabulary(tokenizer)
        token_ids = tokenizer(_TEXT, add_special_tokens=False).input_ids[: self._context - 1]
        self._read(token_ids, top_k)  # raises an error if its limit of log-probabilities is lower

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = _TEXT if tokenizer.unk_token_id is None else tokenizer.decode(range(len(tokenizer)))
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        found = self._call("POST", "/tokenize", json=body)["tokens"]
        if found != tokenizer(text, add_special_tokens=False).input_ids:
            raise ValueError(
                f"the teacher at {self.url} has another vocabulary than the policy: {text[:40]!r}… has the tokens "
                f"{found[:8]}… there and {tokenizer(text, add_special_tokens=False).input_ids[:8]}… here"
            )

    def top_logprobs(
        self, tokens: Tensor, completion_mask: Tensor, top_k: int | None, temperature: float, vocabulary: int
    ) -> TopLogprobs:
        assert top_k is not None, "start checks it"
        top_k = min(top_k, vocabulary)
        ids, logprobs = [], []
        rows = [self._row(row, mask) for row, mask in zip(tokens.cpu(), completion_mask.cpu(), strict=True)]
        with ThreadPoolExecutor(self.max_requests) as pool:
            answers = pool.map(lambda row: self._read(row, top_k) if row else [], rows)
            for mask, answer in zip(completion_mask.cpu(), answers, strict=True):
                for column in mask.nonzero().squeeze(1).tolist():
                    known = [item for item in answer[column].items() if item[0] < vocabulary]
                    best = sorted(known, key=lambda item: -item[1])[:top_k]
                    if len(best) < top_k:
                        raise EngineError(
                            f"the teacher at {self.url} sent {len(best)} tokens of the policy's vocabulary instead of "
                            f"{top_k}: lower TeacherKL's top_k"
                        )
                    ids.append([token for token, _ in best])
                    logprobs.append([value for _, value in best])
        found = torch.tensor(logprobs, dtype=torch.float64).view(-1, top_k)
        rest = (1 - found.exp().sum(-1)).clamp(min=1e-9).log()
        return TopLogprobs(
            token_ids=torch.tensor(ids).view(-1, top_k).to(tokens.device),
            logprobs=found.float().clamp(min=LOWEST_LOGPROB).to(tokens.device),
            rest=rest.float().to(tokens.device),
        )

    def _row(self, tokens: Tensor, mask: Tensor) -> list[int]:
        """Return a prompt and its completion up to the last sampled token."""
        columns = mask.nonzero()
        row = tokens[: int(columns[-1]) + 1].tolist() if len(columns) else []
        self._check_length(len(row))
        return row

    def _check_length(self, length: int) -> None:
        if length >= self._context:
            raise ValueError(
                f"a prompt with its completion has up to {length} tokens, but the teacher at {self.url} can read only "
                f"{self._context - 1}: raise its --max-model-len"
            )

    def _read(self, token_ids: list[int], top_k: int) -> list[dict[int, float]]:
        """Return log-probabilities by token at each position of a text; none at its first."""
        body = {"model": self._model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": top_k}
        try:
            answer = self._call("POST", "/v1/completions", json=body)
        except EngineError as error:
            if "logprobs" in str(error):
                raise ValueError(
                    f"the teacher at {self.url} does not send {top_k} log-probabilities: start it with --max-logprobs "
                    f"{top_k}, or lower TeacherKL's top_k ({error})"
                ) from error
            raise
        found = answer["choices"][0]["prompt_logprobs"]
        return [{int(token): entry["logprob"] for token, entry in (position or {}).items()} for position in found]

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        assert self._server is not None, "start comes first"
        for attempt in range(self.retries + 1):
            try:
                return self._server.call(method, path, self.timeout, **arguments)
            except EngineFailure:
                if attempt == self.retries:
                    raise

    def close(self) -> None:
        self._server = None
