"""Curves are sent behind the tuning: nobody waits for MLflow, and nothing is lost while it is away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlparse

import pytest
from mlflow import MlflowClient

from infra import background_log
from infra.background_log import BackgroundLog
from tasks.errors import TrackingError
from tests.infra.sample_records import record, task
from tests.services import free_port


def pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire(port: int, url: str) -> Iterator[None]:
    """Connections to ``port`` reach the server at ``url``; after that they are cut and refused."""
    where = urlparse(url)
    ends: list[socket.socket] = []

    def accept(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = listening.accept()
                there = socket.create_connection((where.hostname or "", where.port or 0))
                ends.extend((here, there))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", port)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def test_an_mlflow_that_was_away_gets_everything_once(mlflow_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_log, "RETRY_S", 0.5)
    given = [record(trial, 100.0 - trial) for trial in range(40)]
    port = free_port()
    with wire(port, mlflow_url):
        log = BackgroundLog.start(f"http://127.0.0.1:{port}", "behind", "run", {}, {"tunewright.run_id": "behind"})
        log.log_records(task(0), given[:10])
        log.drain()
        child = log.task_run(task(0))
    # The server is out of reach: tuning goes on, only who must have it in MLflow is told.
    log.log_records(task(0), given[:30])
    log.log_progress(30, 70.0, 1.0)
    with pytest.raises(TrackingError, match="start it"):
        log.drain()
    log.log_records(task(0), given)
    log.log_progress(40, 60.0, 2.0)
    with wire(port, mlflow_url):
        log.drain()
    client = MlflowClient(tracking_uri=mlflow_url)
    rows = client.get_metric_history(child, "best_latency_us")
    assert [(m.step, m.value) for m in rows] == [(trial, 100.0 - trial) for trial in range(40)]
    progress = client.get_metric_history(log.run_id, "model_latency_us")
    assert [(m.step, m.value) for m in progress] == [(30, 70.0), (40, 60.0)]
