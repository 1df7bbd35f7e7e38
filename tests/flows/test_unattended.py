"""The whole path, with nobody watching: a version is registered, the champion alias points at the tuned model."""

from __future__ import annotations

import pytest

from benchmarks.fleet_service import unattended


@pytest.mark.timeout(1500)
def test_a_registered_version_becomes_a_champion() -> None:
    found = unattended(agents=2, trials=4)
    assert found.ok, found
