"""Without a Prefect server of the user's, a command has one of its own, which never outlives it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import onnx

from tests.flows.command import Command, last_json, wait_for
from tests.models import conv_model


def test_a_command_brings_its_server_along_and_takes_it_with_it(tmp_path: Path) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    command = Command(tmp_path / "home", {"PREFECT_HOME": str(tmp_path / "prefect")})
    killed = command.start("tune", str(tmp_path / "convs.onnx"), "--trials", "64")
    try:
        wait_for(lambda: bool(command.stored()), 300, "default schedules")
        assert any("flows.embedded_server" in process.cmdline() for process in command.processes())
    finally:
        killed.kill()
        killed.communicate()
    wait_for(lambda: not command.processes(), 60, "everything that the command started has ended")

    done = command.run("tune", str(tmp_path / "convs.onnx"), "--trials", "4")
    assert done.returncode == 0, done.stderr
    assert last_json(done.stdout)["trials"] == 4
    wait_for(lambda: not command.processes(), 60, "everything that the command started has ended")
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        states = [state for (state,) in database.execute("SELECT state_type FROM flow_run ORDER BY start_time")]
    assert states[-1] == "COMPLETED"
