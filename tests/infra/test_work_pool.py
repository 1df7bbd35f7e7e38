"""A run whose process is gone does not stay in Running."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from infra.work_pool import TAG, register
from tests.flows.service import prefect_client

SILENCE_S = 20.0


@flow(name="leads a run")
def leads() -> None:
    """Only its name is used."""


def beat(prefect_url: str, run_id: UUID, ago_s: float, tags: list[str]) -> None:
    """The event that a flow's process sends, as flow_engine.py makes it."""
    event: dict[str, Any] = {
        "id": str(uuid4()),
        "occurred": (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run_id}"},
        "related": [
            {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags
        ],
    }  # fmt: skip
    httpx.post(f"{prefect_url}/events", json=[event], timeout=30).raise_for_status()


def test_a_silent_run_of_ours_is_crashed_and_no_other(prefect_url: str, request: pytest.FixtureRequest) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        register(SILENCE_S)
        # The deployments' tests, on the same server, find the usual one again.
        request.addfinalizer(lambda: _register_again(prefect_url))
    with prefect_client(prefect_url) as client:
        silent, living, others = (client.create_flow_run(leads, state=Running()) for _ in range(3))
        beat(prefect_url, silent.id, SILENCE_S + 5, [TAG])
        beat(prefect_url, others.id, SILENCE_S + 5, ["somebody"])
        beat(prefect_url, living.id, 0, [TAG])
        deadline = time.monotonic() + 120
        while client.read_flow_run(silent.id).state_type is StateType.RUNNING and time.monotonic() < deadline:
            beat(prefect_url, living.id, 0, [TAG])
            time.sleep(1)
        ended = client.read_flow_run(silent.id).state
        assert ended is not None and ended.type is StateType.CRASHED
        assert "no heartbeat" in (ended.message or "")
        assert client.read_flow_run(living.id).state_type is StateType.RUNNING
        assert client.read_flow_run(others.id).state_type is StateType.RUNNING


def _register_again(prefect_url: str) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        register()
