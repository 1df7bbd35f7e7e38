"""Runs that are disturbed: engines killed, the command stopped, the device taken."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import onnx
import psutil
import pytest

from tasks.engines.measuring.device_lock import DeviceLock
from tests.flows.command import Command, last_json, wait_for
from tests.models import conv_model


@pytest.fixture
def command(tmp_path: Path, prefect_url: str, mlflow_url: str) -> Command:
    """A command with a home of its own and a directory store."""
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    return Command(tmp_path / "home", {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url})


def _searches(command: Command) -> bool:
    """Has a search trial been measured?"""
    journals = (path.read_bytes() for path in (command.home / "journals").glob("*.jsonl"))
    with suppress(FileNotFoundError):  # a journal that is stored goes
        return any(b'"phase":"search"' in lines for lines in journals)
    return False


def _model(command: Command) -> str:
    return str(command.home.parent / "convs.onnx")


def test_a_killed_engine_costs_one_trial(command: Command) -> None:
    running = command.start("tune", _model(command), "--trials", "48")
    try:
        wait_for(lambda: _searches(command), 200, "search trials")
        engine = command.engine()
        assert engine is not None
        engine.kill()
        output, error = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 0, error
    line = last_json(output)
    records = command.stored()
    lost = [record for record in records if record.failure and record.failure.kind == "device_lost"]
    assert len(lost) <= 1
    assert line["trials"] == len([record for record in records if record.phase == "search"])
    assert max(Counter(record.record_id for record in records).values()) == 1
    wait_for(lambda: not command.processes(), 20, "all processes of the run have ended")


def test_ctrl_c_stores_what_was_measured_and_the_same_command_continues(command: Command) -> None:
    running = command.start("tune", _model(command), "--trials", "64")
    try:
        wait_for(lambda: _searches(command), 200, "search trials")
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, error
    assert "stopped" in error
    assert "Traceback" not in error
    wait_for(lambda: not command.processes(), 20, "all processes of the run have ended")
    measured = command.stored()
    assert any(record.phase == "search" for record in measured)
    assert command.journalled() == 0
    done = command.run("tune", _model(command), "--trials", "16")
    assert done.returncode == 0, done.stderr
    records = command.stored()
    assert {record.record_id for record in measured} <= {record.record_id for record in records}
    defaults = Counter(r.workload_key for r in records if r.phase == "default")
    assert set(defaults.values()) == {1}
    searched = Counter((r.workload_key, r.candidate_key) for r in records if r.phase == "search")
    assert max(searched.values()) == 1


def test_a_killed_command_leaves_journals_that_the_next_one_stores(command: Command) -> None:
    running = command.start("tune", _model(command), "--trials", "64")
    try:
        wait_for(lambda: command.journalled() > 2, 200, "records in a journal")
    finally:
        running.kill()
        running.communicate()
    wait_for(lambda: not _ours(command.processes()), 20, "the engine has ended with its parent")
    acknowledged = command.journalled() + len(command.stored())
    done = command.run("tune", _model(command), "--trials", "4")
    assert done.returncode == 0, done.stderr
    assert "recovered from the journals" in done.stdout
    records = command.stored()
    assert len(records) >= acknowledged
    assert max(Counter(record.record_id for record in records).values()) == 1


def test_a_second_run_waits_for_the_device_and_says_who_has_it(command: Command) -> None:
    devices = sorted(psutil.Process().cpu_affinity() or [])
    lock = DeviceLock(f"cpu:{devices[0]}-{len(devices) - 1}")
    lock.acquire("a test")
    running = command.start("tune", _model(command), "--trials", "4")
    try:
        assert running.stdout is not None
        for text in running.stdout:
            if "is in use" in text:
                break
        assert "a test" in text, "the run says who has the device"
        assert running.poll() is None
        lock.release()
        output, error = running.communicate(timeout=200)
    finally:
        running.kill()
    assert running.returncode == 0, error
    assert last_json(output)["trials"] == 4


def _ours(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if any("relax.worker" in part for part in process.cmdline())]
