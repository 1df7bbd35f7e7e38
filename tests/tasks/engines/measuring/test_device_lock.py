"""One process at a time measures on a device."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.engines.measuring.device_lock import DeviceLock
from tasks.errors import DeviceBusy
from tests.fresh import in_fresh, start_fresh


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lock files of this test alone, also in the processes it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield


def hold(device: str, who: str, announce: str) -> None:
    lock = DeviceLock(device)
    lock.acquire(who)
    Path(announce).touch()
    signal.pause()


def try_to_take(device: str) -> str:
    try:
        DeviceLock(device).acquire("second")
    except DeviceBusy as error:
        return str(error)
    return ""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_fresh(hold, "cuda:0", "night run 7", str(tmp_path / "held"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "held").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_who_has_the_device(holder: subprocess.Popen[str]) -> None:
    for says in (in_fresh(try_to_take, "cuda:0"), try_to_take("cuda:0")):
        assert "\n" not in says
        for part in ("cuda:0", f"process {holder.pid}", "night run 7", "wait for it"):
            assert part in says
    assert try_to_take("cuda:1") == ""


def test_the_death_of_the_holder_frees_the_device(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)

    lock = DeviceLock("cuda:0")
    lock.acquire("next")
    assert f"process {os.getpid()}" in in_fresh(try_to_take, "cuda:0")
    lock.release()
    assert in_fresh(try_to_take, "cuda:0") == ""


def test_one_who_may_wait_gets_the_device_when_it_is_free(holder: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    with pytest.raises(DeviceBusy):
        DeviceLock("cuda:0", wait_s=0.5).acquire("impatient")
    assert time.monotonic() - started >= 0.5

    holder.send_signal(signal.SIGKILL)  # not waited for: it ends while we wait
    DeviceLock("cuda:0", wait_s=30).acquire("patient")


def test_taking_and_releasing_twice_is_harmless() -> None:
    lock = DeviceLock("cpu:0-1")
    lock.release()
    lock.acquire("me")
    lock.acquire("me")
    lock.release()
    lock.release()
    assert in_fresh(try_to_take, "cpu:0-1") == ""


def test_a_refusal_leaves_no_open_file(holder: subprocess.Popen[str]) -> None:
    before = psutil.Process().num_fds()
    for _ in range(5):
        assert try_to_take("cuda:0")
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("garbage", ["", "{", "[]", '"text"', "{}", '{"pid": 1, "since": "x", "holder": "h"}'])
def test_a_lock_file_that_says_nothing_is_still_a_lock(garbage: str, holder: subprocess.Popen[str]) -> None:
    DeviceLock("cuda:0").paths[0].write_text(garbage)
    assert "cuda:0 is in use" in try_to_take("cuda:0")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_another_user_can_take_the_device_after_us(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent != Path(tempfile.gettempdir()).anchor and parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    lock = DeviceLock("cuda:0")
    lock.acquire("root")
    lock.release()

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(65534)
            DeviceLock("cuda:0").acquire("nobody")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
