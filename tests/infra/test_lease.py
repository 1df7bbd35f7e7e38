"""The lease that keeps two runs of one model and target apart, on a directory store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra import lease as leases
from infra.lease import Lease
from infra.object_store import DirectoryStore
from tasks.errors import RunInProgress


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def held_by(store: DirectoryStore, **changes: object) -> None:
    """A lease on model m for target t, taken by somebody who is not this process."""
    holder = {"run_id": "other-run", "host": "elsewhere", "pid": 1, "started": 0.0, "at": 0.0, **changes}
    store.put(f"leases/{leases.short_hash('m', 't')}/00000001/taken.json", json.dumps(holder).encode())


def held_by_the_dead(store: DirectoryStore, **changes: object) -> None:
    """A lease taken by a process of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(ended.pid).create_time()
    ended.wait()
    held_by(store, host=leases.socket.gethostname(), pid=ended.pid, started=started, **changes)


def test_a_second_run_is_refused_and_told_who_has_it_until_it_is_given_back(store: DirectoryStore) -> None:
    with Lease(store, "m", "t", "first-run"):
        with pytest.raises(RunInProgress, match=r"m for t is being tuned by run first-run on .* process"):
            Lease(store, "m", "t", "second-run").acquire()
        Lease(store, "m", "another-target", "third-run").acquire()
    later = Lease(store, "m", "t", "second-run")
    later.acquire()
    assert later.died == ()
    later.release()


def test_a_holder_whose_process_is_gone_is_replaced_at_once(store: DirectoryStore) -> None:
    held_by_the_dead(store)
    lease = Lease(store, "m", "t", "run")
    lease.acquire()
    assert lease.died == ("other-run",)
    lease.release()


def test_a_holder_that_died_before_it_had_cleared_up_leaves_that_to_the_next(store: DirectoryStore) -> None:
    held_by_the_dead(store, died=["first-run"])
    lease = Lease(store, "m", "t", "run")
    lease.acquire()
    assert lease.died == ("other-run", "first-run")
    lease.release()


def test_what_was_cleared_up_is_nobodys_any_more(store: DirectoryStore) -> None:
    held_by_the_dead(store, died=["first-run"])
    store.put(f"leases/{leases.short_hash('m', 't')}/00000001/cleared.json", b"{}")
    lease = Lease(store, "m", "t", "run")
    lease.acquire()
    assert lease.died == ("other-run",)
    lease.cleared()
    lease.cleared()  # an answer may be lost
    lease.release()


def test_a_holder_elsewhere_is_replaced_only_after_it_was_silent(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRY_S", 0.6)
    monkeypatch.setattr(leases, "_POLL_S", 0.05)
    held_by(store)
    told: list[str] = []

    def beat(text: str) -> None:
        told.append(text)
        # The holder lives: a beat comes while it is being watched.
        key = f"leases/{leases.short_hash('m', 't')}/00000001/beat-000001.json"
        leases.threading.Timer(0.2, store.put, (key, b"{}")).start()

    with pytest.raises(RunInProgress, match="other-run on elsewhere"):
        Lease(store, "m", "t", "run").acquire(beat)
    assert "waiting to see whether it lives" in told[0]
    lease = Lease(store, "m", "t", "run")
    lease.acquire()
    assert lease.died == ("other-run",)
    lease.release()


def test_a_run_that_was_taken_for_dead_notices(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.05)
    lease = Lease(store, "m", "t", "slow-run")
    lease.acquire()
    lease.check()
    store.put(f"leases/{leases.short_hash('m', 't')}/00000002/taken.json", b'{"run_id": "quick-run", "host": "h"}')
    deadline = leases.time.monotonic() + 20
    while not lease.lost and leases.time.monotonic() < deadline:
        leases.time.sleep(0.02)
    with pytest.raises(RunInProgress, match="quick-run"):
        lease.check()
    lease.release()
