"""Services that are slow to start are started once for all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.services import mlflow_server, prefect_server, s3_server


def pytest_configure(config: pytest.Config) -> None:
    """Each of several test processes has its own folder for temporary files, and with it its own device locks."""
    if hasattr(config, "workerinput"):
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tw-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server on SQLite, over HTTP."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on SQLite: its API's URL."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """An S3 server over HTTP with the bucket ``tunewright-test``."""
    with s3_server() as url:
        yield url
