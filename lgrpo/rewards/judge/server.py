"""Client of a server with OpenAI's chat route, which may be slow, busy, wrong or away."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lgrpo.rewards.judge.engine import Answer, JudgeError

if TYPE_CHECKING:
    from httpx import AsyncClient, Response

_BUSY = (408, 425, 429)
"""Statuses with which a server asks to be asked again later, as do those of 500 and above."""
_ROUTE = "/chat/completions"


class JudgeServer:
    """A model behind a server with OpenAI's chat route.

    Every request has a deadline for the whole response. A request that fails in a way that may pass is repeated. While
    the server asks for a pause (``Retry-After``), no request of this process is sent. The key is in no message.
    """

    def __init__(self, url: str, api_key_env: str, timeout: float, max_retries: int, retry_delay: float) -> None:
        self.url = base_url(url)
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.max_retries = max_retries
        self.retry_delay = retry_delay
        self._pause_end = 0.0

    def client(self) -> AsyncClient:
        """Return a client, a context manager, whose requests share connections."""
        import httpx

        key = self._key()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return httpx.AsyncClient(headers=headers, timeout=self.timeout, verify=_certificates())

    async def first_model(self) -> str:
        """Return the name of the server's first model."""
        async with self.client() as client:
            found = await self._request(client, "GET", "/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeError(
                f"the judge at {self.url} names no model: {self._shown(str(found))}. Set model to its name"
            ) from error

    async def answer(self, client: AsyncClient, body: dict[str, Any]) -> Answer:
        """Return the answer to a question.

        Args:
            client: A ``client()``.
            body: Body of the request.
        """
        found = await self._request(client, "POST", _ROUTE, body)
        try:
            choice = found["choices"][0]
            text, is_complete = choice["message"]["content"], choice.get("finish_reason") != "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            text, is_complete = found, True
        if not isinstance(text, str | None):
            raise JudgeError(f"the judge at {self.url} sent no answer: {self._shown(str(found))}")
        return Answer((text or "").encode(errors="replace").decode(), is_complete)  # files cannot have lone surrogates

    async def _request(self, client: AsyncClient, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request until it is answered, or there were ``max_retries`` further attempts."""
        import httpx

        content = None if body is None else json.dumps(body)  # as ASCII, which lone surrogates have, too
        failure = ""
        for attempt in range(self.max_retries + 1):
            if attempt:  # with a random part, so that requests that failed together do not come back together
                await asyncio.sleep(self.retry_delay * 2 ** (attempt - 1) * random.uniform(1, 2))
            await self._wait_for_pause()
            try:
                async with asyncio.timeout(self.timeout):  # httpx limits each read, so a body may trickle
                    response = await client.request(method, self.url + route, content=content)
            except (TimeoutError, httpx.TimeoutException):
                failure = f"did not answer within {self.timeout:g} s"
            except httpx.TransportError as error:
                failure = f"cannot be reached ({type(error).__name__}: {self._shown(str(error))})"
            except httpx.RequestError as error:
                failure = f"sent what cannot be read ({type(error).__name__}: {self._shown(str(error))})"
            else:
                if response.status_code in _BUSY or response.status_code >= 500:
                    failure = f"answered {route} with {response.status_code}: {self._shown(response.text)}"
                    self._pause(response)
                    continue
                self._check(response, route)
                try:
                    return response.json()
                except ValueError:
                    failure = f"sent no JSON: {self._shown(response.text)!r}"
        raise JudgeError(f"the judge at {self.url} {failure}, after {self.max_retries + 1} attempts")

    def _check(self, response: Response, route: str) -> None:
        """Raise an error for a response that another attempt would get, too."""
        if response.has_redirect_location:
            location = self._shown(response.headers["Location"])
            raise JudgeError(f"the judge at {self.url} redirects to {location!r}: set url to it")
        if response.is_error:
            hint = f" Set {self.api_key_env} to its key." if response.status_code in (401, 403) else ""
            raise JudgeError(
                f"the judge at {self.url} answered {route} with {response.status_code}: "
                f"{self._shown(response.text)}.{hint}"
            )

    def _pause(self, response: Response) -> None:
        """Begin the pause that the server asks for, if any."""
        seconds = retry_seconds(response.headers.get("Retry-After", "0"), time.time())
        if seconds > self.timeout:
            raise JudgeError(
                f"the judge at {self.url} asks to wait {seconds:g} s, longer than timeout ({self.timeout:g} s)"
            )
        self._pause_end = max(self._pause_end, time.monotonic() + seconds)

    async def _wait_for_pause(self) -> None:
        while (seconds := self._pause_end - time.monotonic()) > 0:
            await asyncio.sleep(seconds + random.uniform(0, self.retry_delay))

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise JudgeError(f"{self.api_key_env} has a line break, or a character that is not ASCII: check the key")
        return key

    def _shown(self, text: str) -> str:
        """Return the beginning of what a server sent, without the key."""
        key = os.environ.get(self.api_key_env, "").strip()
        return (text.replace(key, "…") if key else text)[:200]


def base_url(url: str) -> str:
    """Return the address before the routes; raise a ``ValueError`` if it is none, or has a key.

    >>> [base_url(f"http://host:8000{path}") for path in ("", "/v1/", "/v1beta/openai", "/v1/chat/completions")]
    ['http://host:8000/v1', 'http://host:8000/v1', 'http://host:8000/v1beta/openai', 'http://host:8000/v1']
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise ValueError(
            "JudgeReward's url has a user name, a password or a query, which would be in logs and checkpoints: put the "
            "key into the environment variable (api_key_env)"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"JudgeReward's url is {url!r}; it must be an address such as http://localhost:8000")
    path = parts.path.rstrip("/").removesuffix(_ROUTE)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def retry_seconds(header: str, now: float) -> float:
    """Return the pause that a ``Retry-After`` asks for, as a number of seconds or as a date; 0 if it is neither.

    >>> retry_seconds("1.5", 0.0), retry_seconds("Thu, 01 Jan 1970 00:00:09 GMT", 2.0), retry_seconds("soon", 0.0)
    (1.5, 7.0, 0.0)
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            seconds = 0.0
    return max(0.0, seconds)  # 0 for NaN


@cache
def _certificates() -> Any:
    """Return the certificates to trust. Reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()
