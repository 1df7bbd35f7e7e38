"""Records survive cut journals, repeated uploads and several writers, each exactly once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from infra.object_store import DirectoryStore, ObjectMissing
from infra.record_store import RecordStore
from tasks.engines import wire
from tasks.errors import StoreError
from tasks.records import TuningRecord
from tests.infra.sample_records import ENGINE, TARGET, record


class CountingStore(DirectoryStore):
    """A directory that counts what is read from it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


def records_in(store: DirectoryStore, cache: Path | None = None) -> RecordStore:
    return RecordStore(store, ENGINE.engine, ENGINE.tvm_version, TARGET.key, cache)


def journal(path: Path, *records: TuningRecord, tail: str = "") -> Path:
    path.write_text("".join(wire.to_line(r) for r in records) + tail)
    return path


def test_a_session_comes_back_by_workload(store: CountingStore, tmp_path: Path) -> None:
    first, second = record(0), record(1, latency_us=None)
    other = record(2, workload_key="workload1", predicted_us=3.5)
    kept = records_in(store)
    assert kept.upload_session(journal(tmp_path / "j.jsonl", second, first, other)) == 3
    assert kept.load() == {"workload0": (first, second), "workload1": (other,)}
    assert kept.load(["workload1", "workload2"]) == {"workload1": (other,), "workload2": ()}
    assert next(store.list("records/")) == "records/relax/0.27.0/cpu-abc/workload0/session.jsonl"


def test_uploading_again_stores_nothing(store: CountingStore, tmp_path: Path) -> None:
    path = journal(tmp_path / "j.jsonl", record(0), record(1))
    kept = records_in(store)
    assert kept.upload_session(path) == 2
    assert kept.upload_session(path) == 0
    assert len(list(store.list("records/"))) == 1


def test_a_session_continued_after_an_upload_loses_and_doubles_nothing(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    for count in (2, 3, 3, 5):
        kept.upload_session(journal(tmp_path / "j.jsonl", *(record(n) for n in range(count))))
    assert [r.trial for r in kept.load()["workload0"]] == [0, 1, 2, 3, 4]
    assert len(list(store.list("records/"))) == 3


def test_parts_of_a_session_are_read_until_its_object_holds_them(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    kept.put_part([record(0), record(1)])
    kept.put_part([record(2)])
    assert [r.trial for r in kept.load()["workload0"]] == [0, 1, 2]
    # Another agent ends the session that the first one, lost for ever, had begun.
    assert kept.upload_session(journal(tmp_path / "elsewhere.jsonl", record(3))) == 1
    store.read.clear()
    assert [r.trial for r in records_in(store).load()["workload0"]] == [0, 1, 2, 3]
    assert not [key for key in store.read if ".part-" in key]
    # The first one was only cut off: what it stores afterwards counts too, at once and at its end.
    kept.put_part([record(4)])
    assert [r.trial for r in records_in(store).load()["workload0"]] == [0, 1, 2, 3, 4]
    mine = journal(tmp_path / "mine.jsonl", *(record(n) for n in (0, 1, 2, 4, 5)))
    assert kept.upload_session(mine) == 1
    assert [r.trial for r in records_in(store).load()["workload0"]] == [0, 1, 2, 3, 4, 5]
    assert kept.upload_session(mine) == 0


def test_session_ids_that_begin_alike_are_kept_apart(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    for number, name in enumerate(("s-10", "s-1", "s")):
        assert kept.upload_session(journal(tmp_path / "j.jsonl", record(number, session_id=name))) == 1
    assert len(kept.load()["workload0"]) == 3


def test_cut_and_garbage_lines_are_skipped_and_counted(store: CountingStore, tmp_path: Path) -> None:
    cut = wire.to_line(record(3))[:-20]
    garbage = 'not json\n{"record_id": "half"}\n[]\n\x00\x00\n\n'
    path = journal(tmp_path / "j.jsonl", record(0), record(1), tail=garbage + cut)
    kept = records_in(store)
    assert kept.upload_session(path) == 2
    assert kept.skipped == 5
    assert [r.trial for r in kept.load()["workload0"]] == [0, 1]
    assert kept.skipped == 0


def test_a_whole_record_whose_line_end_is_missing_may_be_cut(store: CountingStore, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(wire.to_line(record(0)).rstrip("\n"))
    kept = records_in(store)
    assert (kept.upload_session(path), kept.skipped) == (0, 1)


def test_no_journal_is_no_records(store: CountingStore, tmp_path: Path) -> None:
    assert records_in(store).upload_session(tmp_path / "none.jsonl") == 0


def test_unreadable_lines_in_the_store_are_counted_and_not_fatal(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    kept.upload_session(journal(tmp_path / "j.jsonl", record(0)))
    store.put("records/relax/0.27.0/cpu-abc/workload0/bad.jsonl", b"garbage\n" + b'{"a": 1}\n')
    assert len(kept.load()["workload0"]) == 1
    assert kept.skipped == 2
    assert len(kept.load()["workload0"]) == 1
    assert kept.skipped == 2


def test_other_targets_and_versions_never_appear(store: CountingStore, tmp_path: Path) -> None:
    strangers = [
        record(1, target_key="cpu-abcd"),
        record(2, tvm_version="0.28.0"),
        record(3, engine="relay"),
    ]
    kept = records_in(store)
    assert kept.upload_session(journal(tmp_path / "j.jsonl", record(0), *strangers)) == 4
    assert [r.trial for r in kept.load()["workload0"]] == [0]
    # One that lies in the wrong place is refused as well, and counted.
    store.put("records/relax/0.27.0/cpu-abc/workload0/moved.jsonl", wire.to_line(record(4, target_key="x")).encode())
    assert [r.trial for r in kept.load()["workload0"]] == [0]
    assert kept.skipped == 1
    elsewhere = RecordStore(store, "relax", "0.27.0", "cpu-abcd")
    assert [r.trial for r in elsewhere.load()["workload0"]] == [1]


def test_one_record_in_two_sessions_is_one(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    kept.upload_session(journal(tmp_path / "a.jsonl", record(0, session_id="a")))
    kept.upload_session(journal(tmp_path / "b.jsonl", record(0, session_id="b")))
    assert len(kept.load()["workload0"]) == 1


def test_writers_at_once_lose_and_double_nothing(store: CountingStore, tmp_path: Path) -> None:
    def write(count: int) -> None:
        path = journal(tmp_path / f"{count}.jsonl", *(record(n) for n in range(count)))
        records_in(store).upload_session(path)

    threads = [threading.Thread(target=write, args=(count,)) for count in (4, 8, 6, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.trial for r in records_in(store).load()["workload0"]] == list(range(8))


def test_a_cached_object_is_fetched_once(store: CountingStore, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    records_in(store).upload_session(journal(tmp_path / "j.jsonl", record(0)))
    for _ in range(2):
        assert len(records_in(store, cache).load()["workload0"]) == 1
    assert len(store.read) == 1
    # What a power cut left empty is fetched again, new objects are found.
    for path in cache.rglob("*.jsonl"):
        path.write_bytes(b"")
    records_in(store).upload_session(journal(tmp_path / "j.jsonl", record(1, session_id="next")))
    assert len(records_in(store, cache).load()["workload0"]) == 2


def test_quarantined_records_are_left_out(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store)
    kept.upload_session(journal(tmp_path / "j.jsonl", record(0), record(1)))
    assert kept.quarantine("r-1", "wrong output on seed 2")
    assert not kept.quarantine("r-1", "again")
    assert [r.record_id for r in kept.load()["workload0"]] == ["r-0"]
    assert kept.quarantine_reasons() == {"r-1": "wrong output on seed 2"}
    assert list(store.list("quarantine/")) == ["quarantine/relax/0.27.0/cpu-abc/r-1.json"]


def test_workloads_come_back(store: CountingStore, tmp_path: Path) -> None:
    kept = records_in(store, tmp_path / "cache")
    assert kept.put_workload("workload0", b'{"ir": 1}')
    assert not kept.put_workload("workload0", b'{"ir": 2}')
    assert kept.get_workload("workload0") == b'{"ir": 1}'
    with pytest.raises(ObjectMissing):
        kept.get_workload("other")


def test_names_that_lead_elsewhere_are_refused(store: CountingStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not an object key"):
        RecordStore(store, "relax", "..", "cpu")
    with pytest.raises(StoreError, match="not an object key"):
        records_in(store).upload_session(journal(tmp_path / "j.jsonl", record(0, workload_key="..")))
