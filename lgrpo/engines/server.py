"""One vLLM server: a process of ours or an address of the user's, spoken to over HTTP with deadlines."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from lgrpo.engines.base import EngineError, EngineFailure
from lgrpo.engines.children import kill_process, start_process, telling_lines


class AnsweredError(EngineFailure):
    """The server lives, and answered with an error of its own."""


class VLLMServer:
    """Where a vLLM server listens, and how to ask it something. Nothing here waits for ever."""

    def __init__(self, url: str, api_key: str | None, process: subprocess.Popen | None = None, log: Path | None = None):
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.process = process
        self.log = log
        self.adapters: set[str | None] = set()
        """Names of those it was given."""
        self.is_given_up = False
        """Whether a server of the user's did not come back. The next sync looks for it again."""

    @classmethod
    def start(
        cls,
        folder: Path,
        log: Path,
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        successor_of: VLLMServer | None = None,
    ) -> VLLMServer:
        """Starts a server of the model in ``folder`` on the loopback address, behind a key of its own.

        ``successor_of`` is one that has ended, whose address and key it takes over.
        """
        if successor_of is None:
            port, api_key = free_port(), secrets.token_urlsafe(32)
        else:
            port, api_key = int(successor_of.url.rpartition(":")[2]), str(successor_of.api_key)
        arguments = {"model": folder, "host": "127.0.0.1", "port": port, **flags}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                command += [f"--{flag}", str(value)]
        with log.open("w") as output:
            process = start_process(
                command,
                env={**os.environ, **environment, "VLLM_API_KEY": api_key, "VLLM_SERVER_DEV_MODE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(f"http://127.0.0.1:{port}", api_key, process, log)

    def wait_until_ready(self, timeout: float) -> None:
        """Until it answers, or an error that shows why it will not."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check_process()
            if self.is_up():
                return
            time.sleep(0.2)
        raise EngineFailure(f"no vLLM server answers at {self.url}{self._tail()}")

    def is_up(self) -> bool:
        """Whether it says within two seconds that it is well."""
        try:
            return requests.get(f"{self.url}/health", timeout=2).ok
        except requests.RequestException:
            return False

    def check_process(self) -> None:
        """An error, with the end of its log, if our process has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise EngineFailure(f"the vLLM server at {self.url} ended with exit code {code}{self._tail()}")

    def call(self, method: str, path: str, timeout: float, plain: bool = False, **arguments: Any) -> Any:
        """One request: its answer, or an error that says what is wrong with which server, and whose fault.

        Answers are JSON, but where a route is known to answer in ``plain`` text.
        """
        self.check_process()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = requests.request(method, self.url + path, headers=headers, timeout=timeout, **arguments)
        except requests.Timeout as error:
            raise EngineFailure(f"the vLLM server at {self.url} did not answer {path} within {timeout:g} s") from error
        except requests.RequestException as error:
            time.sleep(0.5)  # a process that just died shows it now
            self.check_process()
            raise EngineFailure(f"the vLLM server at {self.url} is gone, or broke off {path}{self._tail()}") from error
        if answer.status_code == 401:
            raise EngineError(f"the vLLM server at {self.url} refused the API key")
        if not answer.ok:
            what = f"the vLLM server at {self.url} answered {path} with {answer.status_code}: {_short(answer)}"
            raise AnsweredError(what + self._tail()) if answer.status_code >= 500 else EngineError(what)
        if plain:
            return answer.text
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise EngineFailure(f"the vLLM server at {self.url} answered {path} with what is not JSON") from error

    def rpc(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Calls a method of the server's worker."""
        body = {"method": method, "kwargs": arguments, "timeout": timeout}
        results = self.call("POST", "/collective_rpc", timeout, json=body)["results"]
        return results[0]

    def close(self) -> None:
        """Ends our process, and what it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # with a request in flight it would never end
                self.process.wait(5)
        self.kill()

    def kill(self) -> None:
        """Ends our process, and what it started, at once."""
        if self.process is not None:
            kill_process(self.process)

    def _tail(self) -> str:
        return telling_lines(self.log)


class RequireKey:
    """Middleware of a server we start: every route wants the key, the ones that change weights too."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"wrong or missing key"})
                return
        await self.app(scope, receive, send)


def _short(answer: requests.Response) -> str:
    try:
        body = answer.json()
        message = body.get("error", body) if isinstance(body, dict) else body
        return str(message.get("message", message) if isinstance(message, dict) else message)[:300]
    except ValueError:
        return answer.text[:300]


def free_port(address: str = "127.0.0.1") -> int:
    """One nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
