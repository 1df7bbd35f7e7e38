"""What several tests of the flows share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.command import Command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def deployed_url(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> str:
    """The tests' Prefect server with all that ``tunewright deploy`` registers."""
    home = tmp_path_factory.mktemp("deploy") / "home"
    command = Command(home, {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(home.parent / "prefect")})
    done = command.run("deploy", "--folder", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return prefect_url
