"""At most one run tunes a model for a target at a time: a lease in the object store.

    leases/<hash of what is held>/<number>/taken.json        who holds it, and which dead runs it has to clear up after;
                                                             the first to write a number has it
    leases/<hash of what is held>/<number>/cleared.json      it has done so
    leases/<hash of what is held>/<number>/beat-<count>.json the holder lives
    leases/<hash of what is held>/<number>/released.json     the holder is done

Append-only like all of the store. A holder that died is known by its silence: on its own machine at
once, since its process is gone; elsewhere when no beat has come for ``EXPIRY_S`` by the waiting run's own
clock, so that machines' clocks need not agree.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import psutil

from infra.object_store import ObjectMissing, ObjectStore
from tasks.errors import RunInProgress, StoreError
from tasks.records import short_hash

logger = logging.getLogger("tunewright")

BEAT_S = 20.0
EXPIRY_S = 90.0
_POLL_S = 2.0


class Lease:
    """The right to tune ``model`` for ``target_key``; a context manager that takes it and gives it back."""

    def __init__(self, store: ObjectStore, model: str, target_key: str, run_id: str) -> None:
        self._store = store
        self._what = f"{model} for {target_key}"
        self._root = f"leases/{short_hash(model, target_key)}"
        self._run_id = run_id
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")
        #: Set when another run has taken the lease, because this one was silent for too long.
        self.lost = False
        #: The runs that held it before, ended without giving it back, and were not cleared up after.
        self.died: tuple[str, ...] = ()

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, waiting for as long as a silent holder may still live.

        ``tell`` hears for whom this run waits. Raises RunInProgress, which names the holder; StoreError.
        """
        latest = self._latest()
        if latest and self._holder(latest)["run_id"] == self._run_id:
            self._number = latest  # taken by an earlier try, whose answer was lost
        else:
            if latest and not self._is_free(latest):
                self._outwait(latest, tell)
            if not self._store.put(self._key("taken", latest + 1), self._note()):
                raise RunInProgress(f"{self._describe(latest + 1)}; wait for it")
            self._number = latest + 1
        self._thread.start()

    def release(self) -> None:
        """Give it back; a lease that cannot be given back expires."""
        if not self._number or self._ended.is_set():
            return
        self._ended.set()
        with suppress(StoreError):
            self._store.put(self._key("released"), self._note())

    def cleared(self) -> None:
        """Note that nothing is left of the runs in ``died``. Raises StoreError."""
        self._store.put(self._key("cleared"), self._note())

    def check(self) -> None:
        """Raise RunInProgress where another run has taken the lease meanwhile."""
        if self.lost:
            raise RunInProgress(f"{self._describe(self._number + 1)}: it took this run, silent too long, for dead")

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_S):
            count += 1
            try:
                self._store.put(self._key(f"beat-{count:06d}"), self._note())
                self.lost = self._latest() > self._number
            except StoreError as error:
                logger.warning("the lease is not renewed: %s", error)

    def _latest(self) -> int:
        """The newest lease's number, 0 for none."""
        keys = [key for key in self._store.list(f"{self._root}/") if key.endswith("/taken.json")]
        return max((int(key.split("/")[-2]) for key in keys), default=0)

    def _is_free(self, number: int) -> bool:
        if self._store.exists(self._key("released", number)):
            return True
        holder = self._holder(number)
        if holder["host"] != socket.gethostname() or _lives(holder):
            return False
        self._succeed(number, holder)
        return True

    def _outwait(self, number: int, tell: Callable[[str], None]) -> None:
        """Return when the lease is free or its holder silent; raise RunInProgress at the first sign of life."""
        holder = self._holder(number)
        if holder["host"] == socket.gethostname():
            raise RunInProgress(f"{self._describe(number)}; wait for it")
        tell(f"{self._describe(number)}; waiting to see whether it lives")
        before, deadline = self._beats(number), time.monotonic() + EXPIRY_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if self._store.exists(self._key("released", number)):
                return
            if self._beats(number) != before:
                raise RunInProgress(f"{self._describe(number)}; wait for it")
        self._succeed(number, holder)

    def _succeed(self, number: int, holder: dict[str, Any]) -> None:
        """Take over from a dead holder, which may have died before it had cleared up after the one before it."""
        left = () if self._store.exists(self._key("cleared", number)) else holder["died"]
        self.died = (str(holder["run_id"]), *map(str, left))

    def _beats(self, number: int) -> int:
        return sum(1 for _ in self._store.list(f"{self._root}/{number:08d}/beat-"))

    def _holder(self, number: int) -> dict[str, Any]:
        try:
            note = json.loads(self._store.get(self._key("taken", number)))
        except (ObjectMissing, ValueError):
            note = {}
        unknown = {"run_id": "an unknown run", "host": "", "pid": 0, "started": 0.0, "at": 0.0, "died": ()}
        return {**unknown, **note}

    def _describe(self, number: int) -> str:
        holder = self._holder(number)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(holder["at"]))
        return (
            f"{self._what} is being tuned by run {holder['run_id']} on {holder['host']}, "
            f"process {holder['pid']}, since {since} UTC"
        )

    def _note(self) -> bytes:
        me = psutil.Process()
        note = {
            "run_id": self._run_id, "host": socket.gethostname(), "pid": os.getpid(),
            "started": me.create_time(), "at": time.time(), "what": self._what,
            "died": self.died,
        }  # fmt: skip
        return json.dumps(note).encode()

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._root}/{self._number if number is None else number:08d}/{name}.json"


def _lives(holder: dict[str, Any]) -> bool:
    """Is the holder's process, one of this machine, still there?"""
    try:
        # The start time tells a process from a later one with the same number.
        started = float(psutil.Process(int(holder["pid"])).create_time())
    except psutil.NoSuchProcess:
        return False
    return abs(started - float(holder["started"])) < 2.0
