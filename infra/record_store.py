"""Tuning records in the object store: append-only, merged by reading.

    records/<engine>/<tvm version>/<target key>/<workload key>/<session id>.jsonl
    workloads/<engine>/<tvm version>/<workload key>.json
    quarantine/<engine>/<tvm version>/<target key>/<record id>.json

There is no lock and no index: any number of agents write, each under names of its own.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.object_store import ObjectStore, checked_key
from tasks.engines import wire
from tasks.errors import StoreError
from tasks.records import TuningRecord, short_hash

#: Requests in flight while reading: hides the round trip to S3.
READERS = 8


class RecordStore:
    """The records of one engine, TVM version and target. Others' never appear in what it loads.

    ``cache`` is a local directory for objects once read: they never change, so they are fetched once.
    ``skipped`` counts the lines that the latest ``load`` or ``upload_session`` could not read.
    """

    def __init__(
        self, store: ObjectStore, engine: str, tvm_version: str, target_key: str, cache: Path | None = None
    ) -> None:
        self.store = store
        self.skipped = 0
        self._engine = checked_key(f"{engine}/{tvm_version}")
        self._target = checked_key(f"{self._engine}/{target_key}")
        self._identity = (engine, tvm_version, target_key)
        self._cache = cache / short_hash(store.uri("")) if cache else None
        self._parsed: dict[str, tuple[tuple[TuningRecord, ...], int]] = {}

    def upload_session(self, journal_path: Path) -> int:
        """Store what the journal holds and the store does not; returns how many records that were.

        A line that is cut or garbage is skipped and counted in ``skipped``. A record is stored under
        its own engine, TVM version and target, whatever this store reads. Raises StoreError.
        """
        try:
            data = journal_path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise StoreError(f"cannot read journal {journal_path}: {error}") from error
        records, self.skipped = _parse(data)
        groups: defaultdict[str, list[TuningRecord]] = defaultdict(list)
        for record in records:
            groups[_session_key(record)].append(record)
        return sum(self._upload(base, group) for base, group in groups.items())

    def load(self, workload_keys: Iterable[str] | None = None) -> Mapping[str, tuple[TuningRecord, ...]]:
        """The records by workload key, oldest first, each record id once; of all workloads for None.

        Quarantined records are left out, unreadable lines are counted in ``skipped``. A workload that
        was asked for is there even without records. Raises StoreError.
        """
        root = f"records/{self._target}/"
        wanted = None if workload_keys is None else sorted(set(workload_keys))
        prefixes = [root] if wanted is None else [f"{root}{checked_key(key)}/" for key in wanted]
        banned = self.quarantined()
        merged: dict[str, dict[str, TuningRecord]] = {key: {} for key in wanted or ()}
        skipped = 0
        with ThreadPoolExecutor(READERS) as pool:
            listed = pool.map(lambda prefix: list(self.store.list(prefix)), prefixes)
            keys = [key for found in listed for key in found]
            for key, (records, bad) in zip(keys, pool.map(self._read, keys), strict=True):
                skipped += bad
                workload = merged.setdefault(key.removeprefix(root).partition("/")[0], {})
                for record in records:
                    if record.record_id not in banned:
                        workload.setdefault(record.record_id, record)
        self.skipped = skipped
        return {key: _oldest_first(found.values()) for key, found in merged.items()}

    def put_workload(self, key: str, data: bytes) -> bool:
        """Store a workload's IR; False where it is there already. Raises StoreError."""
        return self.store.put(f"workloads/{self._engine}/{key}.json", data)

    def get_workload(self, key: str) -> bytes:
        """A workload's IR as it was stored. Raises ObjectMissing, StoreError."""
        return self._fetch(f"workloads/{self._engine}/{key}.json")

    def quarantine(self, record_id: str, reason: str) -> bool:
        """Let no ``load`` return this record again; False where it was quarantined. Raises StoreError."""
        note = {"record_id": record_id, "reason": reason, "at": time.time(), "host": socket.gethostname()}
        return self.store.put(f"quarantine/{self._target}/{record_id}.json", wire.to_line(note).encode())

    def quarantined(self) -> frozenset[str]:
        """The ids of all quarantined records. Raises StoreError."""
        root = f"quarantine/{self._target}/"
        return frozenset(k.removeprefix(root).removesuffix(".json") for k in self.store.list(root))

    def quarantine_reasons(self) -> dict[str, str]:
        """Why each quarantined record is, by record id. Raises StoreError."""
        root = f"quarantine/{self._target}/"
        return {
            record_id: str(json.loads(self._fetch(f"{root}{record_id}.json"))["reason"])
            for record_id in sorted(self.quarantined())
        }

    def _upload(self, base: str, group: list[TuningRecord]) -> int:
        """Store those of ``group``, one session's records of one workload, that are not stored yet.

        A session that was interrupted, uploaded and continued has more records later: they go into a
        further object, since an object never changes.
        """
        missing = {record.record_id: record for record in group}
        key = f"{base}.jsonl"
        for _ in range(2):
            for stored in self.store.list(f"{base}."):
                for record in _parse(self._fetch(stored))[0]:
                    missing.pop(record.record_id, None)
                key = f"{base}.{short_hash(*missing)}.jsonl"
            if not missing:
                return 0
            if self.store.put(key, b"".join(wire.to_line(r).encode() for r in missing.values())):
                return len(missing)
            # Somebody stored this session meanwhile: see what they did not have.
        return 0

    def _read(self, key: str) -> tuple[tuple[TuningRecord, ...], int]:
        """The records in one object that belong where it lies, and how many lines do not."""
        if key not in self._parsed:
            workload = key.removeprefix(f"records/{self._target}/").partition("/")[0]
            records, bad = _parse(self._fetch(key))
            kept = tuple(r for r in records if _identity(r) == (*self._identity, workload))
            self._parsed[key] = kept, bad + len(records) - len(kept)
        return self._parsed[key]

    def _fetch(self, key: str) -> bytes:
        if self._cache is None:
            return self.store.get(key)
        path = self._cache / checked_key(key)
        # Nothing empty is ever stored: an empty file is a power cut's.
        if path.is_file() and (data := path.read_bytes()):
            return data
        data = self.store.get(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        incoming = path.with_name(f".{uuid.uuid4().hex}")
        incoming.write_bytes(data)
        incoming.replace(path)
        return data


def _identity(record: TuningRecord) -> tuple[str, str, str, str]:
    return record.engine, record.tvm_version, record.target_key, record.workload_key


def _session_key(record: TuningRecord) -> str:
    return checked_key(f"records/{'/'.join(_identity(record))}/{record.session_id}")


def _parse(data: bytes) -> tuple[list[TuningRecord], int]:
    """The records in JSON lines, and how many lines are none. A last line without its end is cut."""
    lines = [line for line in data.splitlines(keepends=True) if line.strip()]
    records = [record for line in lines if (record := _record(line))]
    return records, len(lines) - len(records)


def _record(line: bytes) -> TuningRecord | None:
    try:
        return wire.from_line(TuningRecord, line) if line.endswith(b"\n") else None
    except ValueError:
        return None


def _oldest_first(records: Iterable[TuningRecord]) -> tuple[TuningRecord, ...]:
    return tuple(sorted(records, key=lambda r: (r.started_at, r.trial, r.record_id)))
