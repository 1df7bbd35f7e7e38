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
        name = device.replace(":", "-").replace("/", "-")
        self.path = Path(tempfile.gettempdir()) / f"tunewright-device-{name}.lock"
        self._device = device
        self._wait_s = wait_s
        self._fd: int | None = None

    def acquire(self, holder: str) -> None:
        """Take the device and say who has it. Raises DeviceBusy, which names the holder."""
        if self._fd is not None:
            return
        fd = self._open()
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    text = os.pread(fd, 4096, 0).decode(errors="replace")
                    os.close(fd)
                    raise DeviceBusy(_busy_message(self._device, text)) from None
                time.sleep(0.2)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "holder": holder, "since": time.time()}).encode(), 0)
        self._fd = fd

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            # Where the kernel protects files in /tmp, O_CREAT on another user's is refused, even to root.
            return os.open(self.path, os.O_RDWR)
        mask = os.umask(0)
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        finally:
            os.umask(mask)

    def release(self) -> None:
        """Give the device back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


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
