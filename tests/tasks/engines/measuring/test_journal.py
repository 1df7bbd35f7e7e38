"""The journal against cut lines, full disks, kills and second writers."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks.engines.measuring.journal import Journal, is_live, read_journal
from tasks.engines.wire import to_line
from tasks.records import TuningRecord
from tests.fresh import in_fresh, start_fresh
from tests.infra.sample_records import record


def write(path: Path, count: int, start: int = 1) -> list[TuningRecord]:
    records = [record(trial) for trial in range(start, start + count)]
    with Journal(path) as journal:
        for each in records:
            journal.append(each)
    return records


def test_what_is_appended_is_read_in_order_and_across_sessions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "j.jsonl"
    first = write(path, 3)
    second = write(path, 2, start=9)

    assert list(read_journal(path)) == [*first, *second]


def test_a_failed_trial_is_kept_like_a_measured_one(tmp_path: Path) -> None:
    failed = record(3, latency_us=None, predicted_us=12.5)
    with Journal(tmp_path / "j") as journal:
        journal.append(failed)

    assert list(read_journal(tmp_path / "j")) == [failed]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_half_line_is_left_out_and_healed(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = write(path, 3)
    os.truncate(path, path.stat().st_size - cut)

    assert list(read_journal(path)) == whole[:2]
    more = write(path, 1, start=7)  # not glued to the half line
    assert list(read_journal(path)) == [*whole[:2], *more]
    assert len(path.read_bytes().splitlines()) == 3


def test_a_file_that_is_nothing_but_a_half_line_is_healed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"record_id": "r')

    assert list(read_journal(path)) == []
    whole = write(path, 1)
    assert list(read_journal(path)) == whole


@pytest.mark.parametrize(
    "garbage",
    [b"", b"garbage", b"\xff\xfe\x00\x80", b"\0" * 100, b"null", b"[1, 2]", b'"text"', b"{}", b'{"record_id": "a"}',
     b"[" * 100_000],
    ids=["empty", "text", "bytes", "zeros", "null", "list", "string", "object", "fields missing", "deep"],
)  # fmt: skip
def test_a_line_that_is_no_record_is_left_out(garbage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = write(path, 2)
    with path.open("ab") as lines:
        lines.write(garbage + b"\n")
    second = write(path, 1, start=5)

    assert list(read_journal(path)) == [*first, *second]


def test_a_record_that_breaks_the_rules_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    good = write(path, 1)
    plain = json.loads(to_line(good[0]))
    with path.open("a") as lines:
        lines.write(json.dumps({**plain, "measurement": None, "failure": None}) + "\n")
        lines.write(json.dumps({**plain, "measurement": "fast"}) + "\n")

    assert list(read_journal(path)) == good


def hold(path: str, announce: str) -> None:
    """Hold a journal with one record until killed."""
    with Journal(path) as journal:
        journal.append(record(1))
        Path(announce).touch()
        signal.pause()


def open_second(path: str) -> list[str]:
    try:
        Journal(path)
    except BlockingIOError:
        return ["blocked"]
    return ["opened"]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_fresh(hold, str(tmp_path / "j"), str(tmp_path / "held"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "held").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    assert (tmp_path / "held").exists()
    yield process
    process.kill()
    process.communicate()


def test_one_writer_at_a_time_and_its_death_frees_the_journal(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert is_live(path)
    assert in_fresh(open_second, str(path)) == ["blocked"]
    with pytest.raises(BlockingIOError):
        Journal(path)
    open_files = psutil.Process().num_fds()
    with pytest.raises(BlockingIOError):
        Journal(path)
    assert psutil.Process().num_fds() == open_files

    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert not is_live(path)
    write(path, 1, start=2)
    assert [r.trial for r in read_journal(path)] == [1, 2]


def test_asking_whether_it_is_live_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    # The one who asks takes the lock for a moment; a session must not fail for that.
    path = tmp_path / "j"
    write(path, 1)
    asker = os.open(path, os.O_RDONLY)
    fcntl.flock(asker, fcntl.LOCK_SH)
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        os._exit(0)  # the lock goes with the last copy of the descriptor
    os.close(asker)
    try:
        write(path, 1, start=2)
    finally:
        os.waitpid(pid, 0)
    assert len(list(read_journal(path))) == 2


def append_until_full(path: str, pad: int) -> list[int]:
    """Append until the disk is full, then once more; the acknowledged records and the size after each failure."""
    done, sizes = 0, []
    long = replace(record(1), schedule="x" * pad)
    with Journal(path) as journal:
        while len(sizes) < 2:
            try:
                journal.append(replace(long, trial=done + 1))
                done += 1
            except OSError:
                sizes.append(Path(path).stat().st_size)
    return [done, *sizes]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_no_half_line_and_the_journal_goes_on_with_room(small_disk: Path) -> None:
    path = small_disk / "j"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(30_000))
    done, size, again = append_until_full(str(path), 3000)

    assert done > 1
    assert size == again
    assert path.read_bytes().endswith(b"\n")
    assert [r.trial for r in read_journal(path)] == list(range(1, done + 1))
    ballast.unlink()
    write(path, 1, start=1000)
    assert [r.trial for r in read_journal(path)] == [*range(1, done + 1), 1000]


def with_a_file_size_limit(path: str, limit: int) -> list[int]:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return append_until_full(path, 100)


def test_a_quota_in_the_middle_of_a_line_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    # 10,000 bytes end in the middle of some line, so that a part of it fits.
    done, size, again = in_fresh(with_a_file_size_limit, str(path), 10_000)

    assert size == again == path.stat().st_size < 10_000
    assert [r.trial for r in read_journal(path)] == list(range(1, done + 1))


def write_and_acknowledge(path: str) -> None:
    """Append for ever, printing each number once the journal has it."""
    with Journal(path) as journal:
        for trial in range(1, 1_000_000):
            journal.append(record(trial))
            os.write(1, f"{trial}\n".encode())


@pytest.mark.parametrize("after", [1, 40, 173])
def test_sigkill_loses_nothing_that_was_acknowledged(after: int, tmp_path: Path) -> None:
    process = start_fresh(write_and_acknowledge, str(tmp_path / "j"))
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    # Not communicate(): what readline() has read ahead would be missing.
    acknowledged = [*range(1, after + 1), *(int(line) for line in process.stdout.read().split())]
    process.communicate()

    stored = [r.trial for r in read_journal(tmp_path / "j")]
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) <= len(acknowledged) + 1  # one may be on the disk and not acknowledged yet
    write(tmp_path / "j", 1, start=stored[-1] + 1)
    assert len(list(read_journal(tmp_path / "j"))) == len(stored) + 1
