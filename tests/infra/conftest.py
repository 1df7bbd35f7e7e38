"""Services that are slow to start are started once for all tests of infra."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services import mlflow_server


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real MLflow server on SQLite, over HTTP."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url
