"""What a fleet's scheduler knows of agents that are away, with a real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client

from infra.cluster import missing_agents, note_stored, note_unstored


@pytest.fixture
def client() -> Iterator[Any]:
    """A client of a scheduler without agents: whoever has noted something is away."""
    with Client(n_workers=0, processes=False, dashboard_address=None, set_as_default=False) as client:
        yield client


def test_an_agent_that_is_away_is_missed_by_its_run_and_by_whoever_measures_the_same(client: Any) -> None:
    assert missing_agents(client, "run-1", ["a"]) == []
    note_unstored(client, "host/cpu:0", "run-1", ["a", "b"])
    note_unstored(client, "host/cpu:1", "run-1", ["c"])
    assert missing_agents(client, "run-1") == ["host/cpu:0", "host/cpu:1"]
    assert missing_agents(client, "run-2") == []
    assert missing_agents(client, workloads=["b", "x"]) == ["host/cpu:0"]
    assert missing_agents(client, workloads=["x"]) == []


def test_an_agent_that_has_stored_all_is_not_missed(client: Any) -> None:
    note_unstored(client, "host/cpu:0", "run-1", ["a"])
    note_stored(client, "host/cpu:0")
    assert missing_agents(client, "run-1", ["a"]) == []
