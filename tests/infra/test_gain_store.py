"""What first sessions gained, from run to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infra.gain_store import GainStore
from infra.object_store import DirectoryStore
from tasks.records import FirstSessions
from tests.infra import sample_records


def test_later_runs_know_what_earlier_ones_gained(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    gains = GainStore(store, sample_records.ENGINE, "tiles-1")
    gains.publish("20261129-1", FirstSessions({"conv2d": (0.25, 0.0), "softmax": (0.5,)}, (1, 9)))
    gains.publish("20261130-1", FirstSessions({"conv2d": (0.125,)}, (4,)))
    gains.publish("20261130-1", FirstSessions({"conv2d": (0.75,)}, (7,)))  # a run speaks once
    gains.publish("20261130-2", FirstSessions())

    assert GainStore(store, sample_records.ENGINE, "tiles-1").load() == FirstSessions(
        {"conv2d": (0.25, 0.0, 0.125), "softmax": (0.5,)}, (1, 9, 4)
    )
    assert GainStore(store, replace(sample_records.ENGINE, tvm_version="0.28"), "tiles-1").load() == FirstSessions()
    assert GainStore(store, sample_records.ENGINE, "tiles-2").load() == FirstSessions()


def test_only_the_latest_runs_count(tmp_path: Path) -> None:
    gains = GainStore(DirectoryStore(tmp_path / "store"), sample_records.ENGINE, "")
    for number in range(40):
        gains.publish(f"run-{number:03d}", FirstSessions({"conv2d": (float(number),)}))

    assert gains.load().gains["conv2d"] == tuple(float(number) for number in range(8, 40))


def test_what_earlier_versions_wrote_is_read(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    gains = GainStore(store, sample_records.ENGINE, "tiles-1")
    gains.publish("20261129-1", FirstSessions({"conv2d": (0.25,)}))
    (key,) = store.list("gains/")
    older = DirectoryStore(tmp_path / "older")
    older.put(key, b'{"conv2d": [0.25, 0.0]}')

    assert GainStore(older, sample_records.ENGINE, "tiles-1").load() == FirstSessions({"conv2d": (0.25, 0.0)})
