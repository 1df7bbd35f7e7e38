"""Tuning records as one small file, so that a table of latencies can be repeated in minutes."""

from __future__ import annotations

import lzma
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tasks.engines.wire import from_line, to_line
from tasks.records import TuningRecord


def write_records(path: Path, records: Iterable[TuningRecord]) -> None:
    """Each record once, sorted, a line each, compressed: traces are long and much alike."""
    distinct = {record.record_id: record for record in records}
    lines = [to_line(distinct[record_id]) for record_id in sorted(distinct)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("".join(f"{line.rstrip()}\n" for line in lines).encode(), preset=9))


def read_records(path: Path) -> dict[str, list[TuningRecord]]:
    """The records by workload key. Raises OSError, LZMAError."""
    found: dict[str, list[TuningRecord]] = defaultdict(list)
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        record = from_line(TuningRecord, line)
        found[record.workload_key].append(record)
    return dict(found)
