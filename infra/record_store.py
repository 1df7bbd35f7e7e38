"""Tuning records in the object store: append-only, merged by reading.

    records/<engine>/<tvm version>/<target key>/<workload key>/<session id>.jsonl
                                                              /<session id>.part-<first record>-<hash>.jsonl
    workloads/<engine>/<tvm version>/<workload key>.json
    quarantine/<engine>/<tvm version>/<target key>/<record id>.json

There is no lock and no index: any number of agents write, each under names of its own. While a session
runs, its agent stores what comes in as *parts*, so that a machine that is lost for ever loses next to
nothing; the object written at the session's end holds all of them, and readers then leave the parts out.
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
_PART = ".part-"


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
        return sum(self._upload(base, group) for base, group in _by_session(records).items())

    def put_part(self, records: Iterable[TuningRecord]) -> None:
        """Store records of sessions that still run, in journal order and each once. Raises StoreError."""
        for base, group in _by_session(records).items():
            name = f"{group[0].record_id}-{short_hash(*(r.record_id for r in group), length=8)}"
            self.store.put(f"{base}{_PART}{name}.jsonl", _lines(group))

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
            whole = [key for key in keys if _PART not in key]
            read = dict(zip(whole, pool.map(self._read, whole), strict=True))
            seen = {record.record_id for records, _ in read.values() for record in records}
            # A part is whole or absent, and so the session's object holds all of it or nothing.
            parts = [key for key in keys if _PART in key and _first_record(key) not in seen]
            read.update(zip(parts, pool.map(self._read, parts), strict=True))
            for key, (records, bad) in read.items():
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
        further object, since an object never changes. Records that are stored as parts only, by this
        agent or by one that is dead, are stored again with the rest. Returns how many were new.
        """
        missing = {record.record_id: record for record in group}
        key, in_parts, stored_whole = f"{base}.jsonl", set[str](), set[str]()
        for _ in range(2):
            for stored in self.store.list(f"{base}."):
                records = _parse(self._fetch(stored))[0]
                if _PART in stored:
                    in_parts.update(record.record_id for record in records)
                    missing.update((r.record_id, r) for r in records if r.record_id not in missing)
                else:
                    stored_whole.update(record.record_id for record in records)
                    key = ""
            missing = {name: record for name, record in missing.items() if name not in stored_whole}
            if not missing:
                return 0
            key = key or f"{base}.{short_hash(*missing)}.jsonl"
            if self.store.put(key, _lines(missing.values())):
                return len(missing.keys() - in_parts)
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


def _by_session(records: Iterable[TuningRecord]) -> dict[str, list[TuningRecord]]:
    """The records by the beginning of their objects' keys."""
    groups: defaultdict[str, list[TuningRecord]] = defaultdict(list)
    for record in records:
        groups[_session_key(record)].append(record)
    return groups


def _first_record(part_key: str) -> str:
    return part_key.rpartition(_PART)[2].rpartition("-")[0]


def _lines(records: Iterable[TuningRecord]) -> bytes:
    return b"".join(wire.to_line(record).encode() for record in records)


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
