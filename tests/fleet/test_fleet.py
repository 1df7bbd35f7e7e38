"""A fleet as it is run: a scheduler with TLS, two agents, Prefect, MLflow and S3 over HTTP; and what may befall it."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import onnx
import pytest

from tasks.engines.measuring.device_lock import DeviceLock
from tasks.engines.measuring.journal import read_journal
from tasks.records import TuningRecord
from tests.fleet.fleet import LocalFleet, local_fleet, stored_records
from tests.flows.command import Command, last_json, wait_for
from tests.models import conv_model

BUCKET = "tunewright-test"
DEVICES = ("cpu:0", "cpu:1")
#: Two cores carry all of this and whatever else the machine does.
RUN_S = 560


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, prefect_url: str, mlflow_url: str, s3_url: str
) -> Iterator[LocalFleet]:
    """Two agents, one a core; their engines are real, and turn to poison when a test says so."""
    folder = tmp_path_factory.mktemp("fleet")
    settings = {
        "PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url,
        "TUNEWRIGHT_STORE": f"s3://{BUCKET}/{folder.name}", "AWS_ENDPOINT_URL": s3_url,
    }  # fmt: skip
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\n[ -e {folder / 'no-start'} ] && exit 3\n"
        f'exec {sys.executable} {Path(__file__).parent / "poisoned_engine.py"} "$@"\n'
    )
    python.chmod(0o755)
    poisoned = {"TUNEWRIGHT_RELAX_PYTHON": str(python), "POISON": str(folder / "poison")}
    with local_fleet(folder, settings) as fleet:
        for device in DEVICES:
            fleet.start_agent(device, poisoned)
        fleet.wait_for_agents(*DEVICES)
        yield fleet


def records_in(s3_url: str, fleet: LocalFleet) -> list[TuningRecord]:
    """Every record in the fleet's store."""
    return stored_records(s3_url, BUCKET, f"{fleet.folder.name}/records/")


def save_model(fleet: LocalFleet, name: str, seed: int, size: int) -> str:
    """A small model whose workloads no other test has."""
    path = fleet.folder / f"{name}.onnx"
    onnx.save(conv_model(seed, size), path)
    return str(path)


def searched(records: list[TuningRecord]) -> list[TuningRecord]:
    return [record for record in records if record.phase == "search"]


def journalled(folder: Path) -> list[TuningRecord]:
    """What lies in an agent's journals; one that is stored meanwhile is gone."""
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(FileNotFoundError):
            found += list(read_journal(path))
    return found


def test_an_agent_killed_in_a_session_costs_at_most_the_trial_in_flight(fleet: LocalFleet, s3_url: str) -> None:
    command = fleet.command()
    model = save_model(fleet, "killed", 0, 28)
    before = {record.record_id for record in records_in(s3_url, fleet)}
    running = command.start("tune", model, "--trials", "32", "--name", "fleet-killed")
    journals = fleet.folder / "home-cpu-1" / "agents" / "cpu-1" / "journals"
    try:
        wait_for(lambda: bool(searched(journalled(journals))) or running.poll() is not None, RUN_S, "a search on cpu:1")
        victim = fleet.worker("cpu:1")
        victim.kill()
        acknowledged = {record.record_id for record in journalled(journals)}
        output, error = running.communicate(timeout=RUN_S)
    finally:
        running.kill()
    assert running.returncode == 0, error[-3000:]
    records = [record for record in records_in(s3_url, fleet) if record.record_id not in before]
    assert max(Counter(record.record_id for record in records).values()) == 1
    assert max(Counter((r.workload_key, r.candidate_key) for r in searched(records)).values()) == 1
    assert acknowledged <= {record.record_id for record in records}
    assert {record.device for record in records} == set(DEVICES)
    assert last_json(output)["trials"] == len(searched(records)) == 32
    assert not [record for record in records if record.failure and record.failure.kind == "device_lost"]
    assert champion_exists(command, "fleet-killed")
    fleet.wait_for_agents(*DEVICES)
    assert fleet.listed()["cpu:0"]["activity"]["trials"] > 0


def test_a_task_that_kills_its_agents_is_quarantined_and_the_run_goes_on(fleet: LocalFleet, s3_url: str) -> None:
    command = fleet.command()
    model = save_model(fleet, "poison", 1, 20)
    before = {record.record_id for record in records_in(s3_url, fleet)}
    poison = fleet.folder / "poison"
    poison.write_text("fused_conv2d_add_relu")
    try:
        # Enough for every task to have its turn.
        done = command.run("tune", model, "--trials", "64", "--name", "fleet-poison", timeout_s=RUN_S)
    finally:
        poison.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    records = [record for record in records_in(s3_url, fleet) if record.record_id not in before]
    names = {record.task_name for record in records if record.phase == "default"}
    assert "fused_conv2d_add_relu" in names
    assert "fused_conv2d1_add1_relu1" in {record.task_name for record in searched(records)}
    assert "fused_conv2d_add_relu" not in {record.task_name for record in searched(records)}
    assert "fused_conv2d_add_relu: quarantined" in done.stdout
    fleet.wait_for_agents(*DEVICES)


def test_an_agent_whose_engine_does_not_start_leaves_and_comes_back(fleet: LocalFleet) -> None:
    model = save_model(fleet, "no-start", 3, 22)
    no_start = fleet.folder / "no-start"
    no_start.touch()
    try:
        for engine in fleet.worker("cpu:1").children():
            engine.kill()
        # Whatever that agent had been given and not begun goes to the other one.
        done = fleet.command().run("tune", model, "--trials", "8", "--name", "fleet-no-start", timeout_s=RUN_S)
        wait_for(lambda: "its engine does not start" in fleet.log("cpu:1"), 60, "the agent says why")
        assert set(fleet.listed()) == {"cpu:0"}
    finally:
        no_start.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    fleet.wait_for_agents(*DEVICES)


def test_an_agent_that_is_stopped_hands_its_session_back(fleet: LocalFleet, s3_url: str) -> None:
    model = save_model(fleet, "stopped", 2, 24)
    before = {record.record_id for record in records_in(s3_url, fleet)}
    running = fleet.command().start("tune", model, "--trials", "32", "--name", "fleet-stopped")
    journals = fleet.folder / "home-cpu-1" / "agents" / "cpu-1" / "journals"
    agent = fleet.processes["cpu:1"]
    try:
        wait_for(lambda: bool(searched(journalled(journals))) or running.poll() is not None, RUN_S, "a search on cpu:1")
        agent.send_signal(signal.SIGINT)
        assert agent.wait(120) == 0, fleet.log("cpu:1")
        assert not list(journals.glob("*.jsonl")), "what was measured is stored before the agent ends"
        output, error = running.communicate(timeout=RUN_S)
    finally:
        running.kill()
    assert running.returncode == 0, error[-3000:]
    records = [record for record in records_in(s3_url, fleet) if record.record_id not in before]
    assert last_json(output)["trials"] == len(searched(records)) == 32
    assert max(Counter((r.workload_key, r.candidate_key) for r in searched(records)).values()) == 1
    assert not [record for record in records if record.failure and record.failure.kind == "device_lost"]
    assert set(fleet.listed()) == {"cpu:0"}


def test_an_agent_does_not_start_on_a_device_in_use_and_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Locks lie there; the fleet of these tests has the real ones.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = DeviceLock("cpu:0")
    lock.acquire("a run of somebody else")
    try:
        done = Command(tmp_path / "home", {"TMPDIR": str(tmp_path)}).run(
            "agent", "--device", "cpu:0", "--scheduler", "tcp://127.0.0.1:1"
        )
    finally:
        lock.release()
    assert done.returncode == 2
    assert "a run of somebody else" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("scheduler", "--host", "0.0.0.0"),
        ("agents", "--scheduler", "tcp://192.0.2.1:8786"),
        ("agents", "--scheduler", "tls://192.0.2.1:8786"),
    ],
)
def test_nothing_leaves_loopback_without_certificates(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = Command(tmp_path / "home").run(*arguments)
    assert done.returncode == 2
    assert "certs" in done.stderr
    assert "Traceback" not in done.stderr


def champion_exists(command: Command, name: str) -> bool:
    """Does the registry's alias point at the model of a run?"""
    from mlflow import MlflowClient

    client = MlflowClient(command.settings["MLFLOW_TRACKING_URI"])
    return bool(client.get_model_version_by_alias(name, "champion").version)
