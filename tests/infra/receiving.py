"""A webhook receiver over HTTP, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from infra.webhook import PATH, Receiver, make_app
from tests.services import free_port


@contextmanager
def serving(receiver: Receiver) -> Iterator[str]:
    """Serve ``receiver``; yields the address that deliveries go to."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(receiver), host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}{PATH}"
    finally:
        server.should_exit = True
        thread.join(20)
