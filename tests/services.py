"""The real services that tests talk to over HTTP, as context managers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

#: What moto accepts; it checks no signatures.
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server(bucket: str = "tunewright-test") -> Iterator[str]:
    """An S3 server that holds ``bucket``; yields its endpoint URL and sets credentials meanwhile."""
    import boto3
    from moto.server import ThreadedMotoServer

    before = {name: os.environ.get(name) for name in S3_ENVIRONMENT}
    os.environ.update(S3_ENVIRONMENT)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        boto3.session.Session().client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
        yield endpoint
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def mlflow_server(folder: Path, start_timeout_s: float = 300.0, port: int = 0) -> Iterator[str]:
    """An MLflow server on SQLite, everything below ``folder``; yields its URL.

    One worker: start-up is most of a test's time on two cores.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    # Tests receive webhooks on this machine, by plain HTTP, right after they were registered.
    environment |= {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    environment |= {"MLFLOW_WEBHOOK_CACHE_TTL": "1"}
    # Its job runner, four more processes, has nothing to do here.
    environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "mlflow.log").open("wb") as log:
        # A group of its own: the server starts workers, and all must end with the test.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        _wait_until_healthy(f"{url}/health", process, folder / "mlflow.log", start_timeout_s)
        yield url
    finally:
        _end_group(process)


@contextmanager
def prefect_server(folder: Path, start_timeout_s: float = 180.0) -> Iterator[str]:
    """A Prefect server on SQLite, everything below ``folder``; yields its API's URL."""
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with (folder / "prefect.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_until_healthy(f"{url}/health", process, folder / "prefect.log", start_timeout_s)
        yield url
    finally:
        _end_group(process)


@contextmanager
def service(
    command: Sequence[str], health_url: str, log: Path, environment: Mapping[str, str], start_timeout_s: float = 120.0
) -> Iterator[None]:
    """A server that ``command`` starts, once ``health_url`` answers; it and all that it started end after."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, cwd=log.parent, start_new_session=True
        )
    try:
        _wait_until_healthy(health_url, process, log, start_timeout_s)
        yield
    finally:
        _end_group(process)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.3)
    raise RuntimeError(f"no answer from {url} within {timeout_s} s:\n{log.read_text()[-2000:]}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for sign, wait_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
