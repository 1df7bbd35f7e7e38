"""The local journal of a session: one file, a record a line, on the disk before anybody hears of it.

Standard library only, Python 3.10.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tasks.engines.wire import from_line, to_line
from tasks.records import TuningRecord

#: ``is_live`` takes the lock for a moment, and that must not end a session.
_PATIENCE_S = 1.0


class Journal:
    """Appends records; holds a lock while open, so that a live session is told from a dead one's."""

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending. Raises OSError; BlockingIOError where another process has it open."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._heal()
        except OSError:
            os.close(self._fd)
            raise

    def append(self, record: TuningRecord) -> None:
        """Write ``record`` through to the disk. Raises OSError (a full disk leaves no half line behind)."""
        line = to_line(record).encode()
        start = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, f"only {written} of {len(line)} bytes fit on the disk", str(self.path))
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)
            raise

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def _heal(self) -> None:
        """Cut off a last line that a crash left half written, lest the next record be glued to it."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._fd, whole)


def read_journal(path: str | Path) -> Iterator[TuningRecord]:
    """The whole records in ``path``; a half line or one that is no record is left out."""
    with Path(path).open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(TuningRecord, line)
            except (ValueError, RecursionError):  # the latter for garbage that is one bracket after another
                continue


def is_live(path: str | Path) -> bool:
    """Is a process writing to this journal now?"""
    with Path(path).open("rb") as lines:
        try:
            fcntl.flock(lines.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
