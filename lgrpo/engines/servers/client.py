"""HTTP client of one vLLM server, which lgrpo started or the user runs. Every request has a timeout."""

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

from lgrpo.engines.processes import (
    END_WITH_TRAINER,
    ENGINE_PRIORITY,
    MPS_PRIORITY,
    kill_process,
    log_excerpt,
    start_process,
)
from lgrpo.engines.recovery import EngineError, EngineFailure

_SERVER = f"""{END_WITH_TRAINER}
import runpy, threading, time

def end_with_trainer():
    while os.getppid() == {{trainer}}:
        time.sleep(1)
    time.sleep(10)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_trainer, daemon=True).start()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""Program of a server. It receives SIGTERM when the trainer ends, but vLLM then waits without a limit for requests to
its engine, which it has already ended."""


class ServerErrorResponse(EngineFailure):
    """The server runs and answered with a status of 500 or above."""


class VLLMServer:
    """One vLLM server: its URL, its key, and its process if lgrpo started it."""

    def __init__(self, url: str, api_key: str | None, process: subprocess.Popen | None = None, log: Path | None = None):
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.process = process
        """Process of a server that lgrpo started; None for a server the user runs."""
        self.log = log
        self.adapters: set[str | None] = set()
        """Names of the LoRA adapters it has loaded."""
        self.is_unavailable = False
        """Whether a server the user runs failed and did not come up again in time. The next sync tries it again."""

    @classmethod
    def start(
        cls,
        folder: Path,
        log: Path,
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        predecessor: VLLMServer | None = None,
    ) -> VLLMServer:
        """Start a server of the model in ``folder`` on the loopback address.

        It takes the port and the key of its predecessor, a server that has ended, or new ones.
        """
        if predecessor is None:
            port, api_key = free_port(), secrets.token_urlsafe(32)
        else:
            port, api_key = int(predecessor.url.rpartition(":")[2]), str(predecessor.api_key)
        arguments = {"model": folder, "host": "127.0.0.1", "port": port, **flags}
        command = [sys.executable, "-c", _SERVER.format(trainer=os.getpid())]
        for name, value in arguments.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                command += [f"--{flag}", str(value)]
        with log.open("w") as output:
            process = start_process(
                command,
                env={
                    **os.environ,
                    MPS_PRIORITY: ENGINE_PRIORITY,
                    **environment,
                    "VLLM_API_KEY": api_key,
                    "VLLM_SERVER_DEV_MODE": "1",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(f"http://127.0.0.1:{port}", api_key, process, log)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers. Raise an ``EngineFailure`` with its log if it ends or does not answer."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check_process()
            if self.is_up():
                return
            time.sleep(0.2)
        raise EngineFailure(f"no vLLM server answers at {self.url}{log_excerpt(self.log)}")

    def is_up(self) -> bool:
        """Return whether the health route answers within two seconds."""
        try:
            return requests.get(f"{self.url}/health", timeout=2).ok
        except requests.RequestException:
            return False

    def check_process(self) -> None:
        """Raise an ``EngineFailure`` with the end of the log if the process has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise EngineFailure(f"the vLLM server at {self.url} ended with exit code {code}{log_excerpt(self.log)}")

    def call(self, method: str, path: str, timeout: float, is_json: bool = True, **arguments: Any) -> Any:
        """Send one request and return the body of the response, parsed unless ``is_json`` is false.

        Raises:
            EngineFailure: If the server failed: a timeout, a broken connection, a status of 500 or above.
            EngineError: If the request is wrong: another server would reject it too.
        """
        self.check_process()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = requests.request(method, self.url + path, headers=headers, timeout=timeout, **arguments)
        except requests.Timeout as error:
            raise EngineFailure(f"the vLLM server at {self.url} did not answer {path} within {timeout:g} s") from error
        except requests.RequestException as error:
            time.sleep(0.5)  # by now the exit code of a process that just ended is known
            self.check_process()
            raise EngineFailure(
                f"the connection to the vLLM server at {self.url} broke during {path}{log_excerpt(self.log)}"
            ) from error
        if response.status_code == 401:
            raise EngineError(f"the vLLM server at {self.url} rejected the API key")
        if not response.ok:
            message = f"the vLLM server at {self.url} answered {path} with {response.status_code}: {_short(response)}"
            if response.status_code >= 500:
                raise ServerErrorResponse(message + log_excerpt(self.log))
            raise EngineError(message)
        if not is_json:
            return response.text
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise EngineFailure(f"the vLLM server at {self.url} answered {path} with invalid JSON") from error

    def rpc(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Call a method of the server's workers and return the first worker's result."""
        body = {"method": method, "kwargs": arguments, "timeout": timeout}
        return self.call("POST", "/collective_rpc", timeout, json=body)["results"][0]

    def close(self) -> None:
        """Terminate the process and its children. Do nothing for a server the user runs."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # with a request in flight it would never end
                self.process.wait(5)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children at once. Do nothing for a server the user runs."""
        if self.process is not None:
            kill_process(self.process)


class RequireKey:
    """Middleware of a vLLM server: every route requires the key, also those that change weights."""

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


def _short(response: requests.Response) -> str:
    """Return the error message in a response, at most 300 characters."""
    try:
        body = response.json()
        message = body.get("error", body) if isinstance(body, dict) else body
        return str(message.get("message", message) if isinstance(message, dict) else message)[:300]
    except ValueError:
        return response.text[:300]


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
