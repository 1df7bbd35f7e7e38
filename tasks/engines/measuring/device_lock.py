"""One process at a time measures on a device: a lock file, which the kernel opens when its holder ends.

Standard library only, Python 3.10.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path

from tasks.errors import DeviceBusy


class DeviceLock:
    """The right to measure on ``device``, for every user of this machine."""

    def __init__(self, device: str, wait_s: float = 0.0) -> None:
        """``wait_s``: how long ``acquire`` waits for a device in use."""
        folder = Path(tempfile.gettempdir())
        self.paths = tuple(folder / f"tunewright-device-{part}.lock" for part in _parts(device))
        self._device = device
        self._wait_s = wait_s
        self._fds: list[int] = []

    def acquire(self, holder: str) -> None:
        """Take the device and say who has it. Raises DeviceBusy, which names the holder."""
        if self._fds:
            return
        deadline = time.monotonic() + self._wait_s
        try:
            for path in self.paths:
                self._fds.append(self._take(path, deadline))
        except DeviceBusy:
            self.release()
            raise
        text = json.dumps({"pid": os.getpid(), "holder": holder, "since": time.time()}).encode()
        for fd in self._fds:
            os.ftruncate(fd, 0)
            os.pwrite(fd, text, 0)

    def release(self) -> None:
        """Give the device back."""
        while self._fds:
            os.close(self._fds.pop())

    def _take(self, path: Path, deadline: float) -> int:
        fd = _open(path)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    text = os.pread(fd, 4096, 0).decode(errors="replace")
                    os.close(fd)
                    raise DeviceBusy(_busy_message(self._device, text)) from None
                time.sleep(0.2)


def _parts(device: str) -> tuple[str, ...]:
    """What a device consists of: ``cpu:0-3`` is four cores, and another run may want one of them."""
    kind, _, place = device.partition(":")
    if kind == "cuda":
        # Another process may count the machine's GPUs from elsewhere.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = visible[int(place)] if place.isdigit() and int(place) < len(visible) else ""
        device = f"cuda:{number or place}"
    if kind != "cpu":
        return (device.replace(":", "-").replace("/", "-"),)
    first, _, last = place.partition("-")
    if not first.isdigit():
        return tuple(f"cpu-{core}" for core in sorted(os.sched_getaffinity(0)))
    return tuple(f"cpu-{core}" for core in range(int(first), int(last or first) + 1))


def _open(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        # Where the kernel protects files in /tmp, O_CREAT on another user's is refused, even to root.
        return os.open(path, os.O_RDWR)
    mask = os.umask(0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    finally:
        os.umask(mask)


def _busy_message(device: str, text: str) -> str:
    try:
        who = json.loads(text)
        since = time.strftime("%H:%M:%S", time.localtime(float(who["since"])))
        return (
            f"{device} is in use: process {who['pid']} measures on it for {who['holder']} since {since}; "
            "wait for it, or give another device"
        )
    except (ValueError, KeyError, TypeError):
        return f"{device} is in use by another process; wait for it, or give another device"
