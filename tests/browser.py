"""A headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)} is installed")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


class Browser:
    """One tab of Chromium, as a context manager.

    ``errors`` collects the errors and the console output of the current page, ``requests`` the URLs it requested.
    """

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.size = width, height
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="lgrpo-browser-", ignore_cleanup_errors=True)
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = Path(self._folder.name) / "DevToolsActivePort"
        until(lambda: port.exists() and len(port.read_text().splitlines()) == 2, "Chromium to start")
        number, path = port.read_text().splitlines()
        self._socket = connect(f"ws://127.0.0.1:{number}{path}", max_size=None, open_timeout=60, proxy=None)
        self._session: str | None = None
        (tab,) = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(*self.size)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def resize(self, width: int, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scheme(self, name: str) -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, page: Path, hash_: str = "") -> None:
        """Open a page and wait until it is drawn."""
        self._call("Page.navigate", url="about:blank")
        until(lambda: self.eval("location.href") == "about:blank", "an empty page")
        self.errors.clear()  # late events of the previous page
        self.requests.clear()
        self._call("Page.navigate", url=page.resolve().as_uri() + (f"#{hash_}" if hash_ else ""))
        self.until_ready()

    def until_ready(self) -> None:
        until(lambda: self.eval("document.documentElement?.dataset.ready === 'yes'") or self.errors, "the page")

    def eval(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        try:
            done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        except AssertionError as error:
            if "context" not in str(error):
                raise
            done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)  # the page was reloading
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"]["exception"].get("description", done["exceptionDetails"]))
        return done["result"].get("value")

    def set(self, selector: str, value: str) -> None:
        """Set the value of a text field or of a list."""
        event = "change" if selector.startswith("select") else "input"
        self.eval(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; "
            f"e.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()"
        )

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """Send a mouse event: mousePressed, mouseMoved or mouseReleased."""
        held = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": clicks}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        clip = {}
        if whole:
            width, height = self.eval("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._handle_event(answer.get("method"), answer.get("params", {}))

    def _handle_event(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in event["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])


def until(is_done: Any, what: str, seconds: float = 60) -> None:
    """Wait until ``is_done()`` is true; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.05)
