"""Prefect's server for one command, where none is configured: started before anything else is imported.

Prefect starts an embedded server of its own once its client is asked for, after seconds of imports, and
leaves it running where the command is killed. This one starts first, and ends with the process that
started it, however that ends. Its database is the one that Prefect's own would use.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tasks.errors import SetupError

_START_S = 180.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


class EmbeddedServer:
    """A server that is starting. ``join`` waits until it answers."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/api"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.embedded_server", str(port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            # Ctrl-C is for the command, which still has something to report to its server.
            start_new_session=True,
        )  # fmt: skip
        os.environ["PREFECT_API_URL"] = self._url

    def join(self) -> None:
        """Raises SetupError where the server ends or does not answer within three minutes."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):  # noqa: S310 - a URL of our own
                    return
            except OSError:
                time.sleep(_POLL_S)
        raise SetupError(
            "Prefect's embedded server does not start: try 'prefect server start', which says why, "
            "or set PREFECT_API_URL to one that runs"
        )


def is_configured() -> bool:
    """Has the user named a server, or a profile or file of settings that may name one?"""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    if any(os.environ.get(name) for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH")):
        return True
    files = (home / "profiles.toml", Path("prefect.toml"), Path("pyproject.toml"), Path(".env"))
    return any("PREFECT_API" in text or "tool.prefect" in text or "[api]" in text for text in map(_text, files))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def main() -> None:
    """Serve on the port that the command line names, for as long as the parent lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    import uvicorn

    uvicorn.run(
        "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(sys.argv[1]),
        log_level="critical", lifespan="on",
    )  # fmt: skip


if __name__ == "__main__":
    main()
