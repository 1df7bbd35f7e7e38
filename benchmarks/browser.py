"""A headless Chromium, driven over its debugging protocol: how long a page takes, and what it looks like."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_POLL_S = 0.05


def chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Methods raise RuntimeError where the browser refuses."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last = 0

    def open(self, url: str, texts: tuple[str, ...], timeout_s: float = 120.0) -> float:
        """Go to ``url``; seconds until the page shows every one of ``texts``. Raises TimeoutError."""
        self._call("Page.navigate", url="about:blank")
        started = time.monotonic()
        self._call("Page.navigate", url=url)
        found = f"{json.dumps(texts)}.every(t => document.body && document.body.innerText.includes(t))"
        while True:
            with suppress(RuntimeError):  # between two documents there is nothing to ask
                if self.evaluate(found):
                    return time.monotonic() - started
            if time.monotonic() - started > timeout_s:
                shown = str(self.evaluate("document.body ? document.body.innerText : ''"))[:400]
                raise TimeoutError(f"{url} does not show {texts} within {timeout_s:g} s, but: {shown!r}")
            time.sleep(_POLL_S)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """What the window shows, as a PNG."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result


@contextmanager
def open_browser(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """A browser with one tab and an empty profile. Raises RuntimeError where there is no Chromium."""
    path = chromium()
    if path is None:
        raise RuntimeError("no Chromium found: install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--no-proxy-server", "--hide-scrollbars", f"--window-size={width},{height}",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_tab(Path(profile)), max_size=None, proxy=None) as socket:
                page = Page(socket)
                page._call("Page.enable")
                page._call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
                )
                yield page
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _tab(profile: Path, timeout_s: float = 60.0) -> str:
    """The debugging address of the browser's tab."""
    import urllib.request

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, IndexError):
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{int(port)}/json/list", timeout=5) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise RuntimeError(f"Chromium gives no debugging port within {timeout_s:g} s")
