"""A reward that asks another model, and keeps what it answered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, final

from lgrpo.checks import check_count, check_range
from lgrpo.rewards.base import AsyncReward
from lgrpo.rewards.judge.templates import JudgeTemplate, Messages, Rubric
from lgrpo.types import Completion, Prompt

Verdict: TypeAlias = dict[str, Any]
"""Questions to the judge about a completion, and its answers: ``model``, ``questions`` (conversations), ``answers``
(those of each vote), ``scores`` (of each vote, None if its answers cannot be read), ``seconds``."""

_BUSY = (408, 425, 429)
"""Statuses with which a server asks to be asked again later, as do those of 500 and above."""


class JudgeError(RuntimeError):
    """The judge did not answer, or its answer cannot be read."""


@final
class JudgeReward(AsyncReward):
    """Asks a model behind an OpenAI-compatible server (``/v1/chat/completions``) for a score between 0 and 1.

    A server that is busy, slow or away is asked again. A completion whose verdict cannot be had or read counts as
    failed (``reward/errors``), as with every reward. ``data.scoring.timeout`` limits a completion with all attempts.
    """

    def __init__(
        self,
        url: str,
        template: JudgeTemplate | None = None,
        model: str | None = None,
        api_key_env: str = "LGRPO_JUDGE_API_KEY",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        votes: int = 1,
        verdicts: str | None = None,
        timeout: float = 60.0,
        concurrency: int = 32,
        max_retries: int = 4,
        retry_delay: float = 1.0,
    ) -> None:
        """
        Args:
            url: Address of the server, such as ``http://localhost:8000``.
            template: Questions to the judge, and how its answers are read; by default a ``Rubric``.
            model: Name of the model; by default the first one of the server.
            api_key_env: Environment variable with the key of the server, if it needs one.
            temperature: Temperature of the judge.
            max_tokens: Upper limit of tokens in an answer.
            votes: Number of answers to each question, with different seeds; the score is their mean. More than one
                needs a temperature above 0.
            verdicts: Folder that keeps the questions about each completion with the answers, one file each. What it has
                is not asked again, also in later runs.
            timeout: Upper limit of seconds for an answer.
            concurrency: Number of completions that are judged at the same time, in each worker.
            max_retries: Number of further attempts for a question.
            retry_delay: Seconds before the second attempt, doubled before each later one; a server's ``Retry-After``
                takes precedence.
        """
        check_range("JudgeReward's temperature", temperature, at_least=0)
        check_count("JudgeReward's max_tokens", max_tokens, at_least=1)
        check_count("JudgeReward's votes", votes, at_least=1)
        check_range("JudgeReward's timeout", timeout, above=0)
        check_count("JudgeReward's concurrency", concurrency, at_least=1)
        check_count("JudgeReward's max_retries", max_retries, at_least=0)
        check_range("JudgeReward's retry_delay", retry_delay, at_least=0)
        if votes > 1 and temperature == 0:
            raise ValueError(f"JudgeReward's votes is {votes}, but at temperature 0 all answers are equal: raise it")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.template = Rubric() if template is None else template
        self.model = model
        self.api_key_env = api_key_env
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.votes = votes
        self.verdicts = verdicts
        self.timeout = timeout
        self.concurrency = concurrency
        self.max_retries = max_retries
        self.retry_delay = retry_delay

    def required_fields(self) -> set[str]:
        return self.template.fields()

    async def score_with_retries(self, prompt: Prompt, completion: Completion) -> float:
        return await self.score(prompt, completion)  # which repeats requests, not whole scores

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        if self.model is None:
            self.model = str((await self._request("GET", "/v1/models", None))["data"][0]["id"])
        settings = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        questions = self.template.questions(prompt, completion)
        asked: dict[str, Any] = settings | {"questions": questions, "votes": self.votes}
        path = None if self.verdicts is None else _path(Path(self.verdicts), asked)
        if path is not None and path.exists():
            answers = json.loads(path.read_text(encoding="utf-8"))["answers"]
        else:
            started = time.monotonic()
            answers = await asyncio.gather(*(self._vote(settings, questions, n) for n in range(self.votes)))
            if path is not None:
                seconds = round(time.monotonic() - started, 3)
                _write(path, asked | {"answers": answers, "scores": self._readable(answers), "seconds": seconds})
        return sum(self.template.read(own) for own in answers) / self.votes

    def _readable(self, answers: list[list[str]]) -> list[float | None]:
        """Return the score of each vote; None if its answers cannot be read."""
        scores: list[float | None] = []
        for own in answers:
            try:
                scores.append(self.template.read(own))
            except ValueError:
                scores.append(None)
        return scores

    async def _vote(self, settings: dict[str, Any], questions: list[Messages], vote: int) -> list[str]:
        """Return the answers to all questions about a completion."""
        return await asyncio.gather(
            *(self._answer(settings | {"messages": messages, "seed": vote}) for messages in questions)
        )

    async def _answer(self, body: dict[str, Any]) -> str:
        found = await self._request("POST", "/v1/chat/completions", body)
        try:
            return found["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(f"the judge at {self.url} sent no answer: {str(found)[:200]}") from error

    async def _request(self, method: str, route: str, body: dict[str, Any] | None) -> Any:
        """Send a request until it is answered, or there were ``max_retries`` further attempts."""
        import httpx

        key = os.environ.get(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        failure, delay = "", self.retry_delay
        async with httpx.AsyncClient(headers=headers, timeout=self.timeout, verify=_certificates()) as client:
            for attempt in range(self.max_retries + 1):
                if attempt:
                    await asyncio.sleep(delay)
                delay = self.retry_delay * 2**attempt
                try:
                    response = await client.request(method, self.url + route, json=body)
                except httpx.TimeoutException:
                    failure = f"did not answer within {self.timeout:g} s"
                    continue
                except httpx.TransportError as error:
                    failure = f"cannot be reached ({type(error).__name__}: {error})"
                    continue
                if response.status_code in _BUSY or response.status_code >= 500:
                    failure = f"answered {route} with {response.status_code}: {response.text[:200]}"
                    delay = _retry_after(response.headers.get("Retry-After"), delay)
                    continue
                if response.is_error:  # asking again would not help
                    hint = f" Set {self.api_key_env} to its key." if response.status_code in (401, 403) else ""
                    raise JudgeError(
                        f"the judge at {self.url} answered {route} with {response.status_code}: "
                        f"{response.text[:200]}.{hint}"
                    )
                try:
                    return response.json()
                except ValueError:
                    failure = f"sent no JSON: {response.text[:200]!r}"
        raise JudgeError(f"the judge at {self.url} {failure}, after {self.max_retries + 1} attempts")


def read_verdicts(folder: str | Path) -> Iterator[Verdict]:
    """Yield the verdicts in a folder of ``JudgeReward``, in no particular order.

    Args:
        folder: Folder given as ``verdicts``.
    """
    for path in Path(folder).glob("*/*.json"):
        yield json.loads(path.read_text(encoding="utf-8"))


def verdict_statistics(folder: str | Path) -> dict[str, float]:
    """Return statistics of the verdicts in a folder.

    ``verdicts`` is their number, ``unreadable`` the share with an answer that could not be read, ``score`` the mean
    score of the others, ``agreement`` the mean share of a completion's votes that equal the most frequent one, and
    ``seconds`` the median time of a verdict.

    Args:
        folder: Folder given as ``verdicts``.
    """
    found = list(read_verdicts(folder))
    if not found:
        raise FileNotFoundError(f"there are no verdicts in {folder}")
    readable = [verdict["scores"] for verdict in found if None not in verdict["scores"]]
    shares = [max(Counter(scores).values()) / len(scores) for scores in readable]
    return {
        "verdicts": len(found),
        "unreadable": 1 - len(readable) / len(found),
        "score": statistics.fmean(statistics.fmean(scores) for scores in readable) if readable else float("nan"),
        "agreement": statistics.fmean(shares) if shares else float("nan"),
        "seconds": statistics.median(verdict["seconds"] for verdict in found),
    }


def _path(folder: Path, asked: dict[str, Any]) -> Path:
    """Return the file of a verdict: its name is a hash of everything that is sent."""
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return folder / name[:2] / f"{name[2:]}.json"


def _write(path: Path, content: Verdict) -> None:
    """Write a file at once, so that other workers never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False)
    os.replace(file.name, path)


def _retry_after(header: str | None, default: float) -> float:
    """Return the seconds that a server asks to wait; a date, which is rare, is ignored.

    >>> _retry_after("2", 0.5), _retry_after(None, 0.5), _retry_after("Fri, 31 Dec 2027 23:59:59 GMT", 0.5)
    (2.0, 0.5, 0.5)
    """
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        return default


@cache
def _certificates() -> Any:
    """Return the certificates to trust. Reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()
