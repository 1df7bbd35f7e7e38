"""What first sessions gained, from run to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infra.gain_store import GainStore
from infra.object_store import DirectoryStore
from tests.infra import sample_records


def test_later_runs_know_what_earlier_ones_gained(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    gains = GainStore(store, sample_records.ENGINE, "tiles-1")
    gains.publish("20261129-1", {"conv2d": [0.25, 0.0], "softmax": [0.5]})
    gains.publish("20261130-1", {"conv2d": [0.125]})
    gains.publish("20261130-1", {"conv2d": [0.75]})  # a run speaks once
    gains.publish("20261130-2", {})

    assert GainStore(store, sample_records.ENGINE, "tiles-1").load() == {
        "conv2d": (0.25, 0.0, 0.125),
        "softmax": (0.5,),
    }
    assert GainStore(store, replace(sample_records.ENGINE, tvm_version="0.28"), "tiles-1").load() == {}
    assert GainStore(store, sample_records.ENGINE, "tiles-2").load() == {}


def test_only_the_latest_runs_count(tmp_path: Path) -> None:
    gains = GainStore(DirectoryStore(tmp_path / "store"), sample_records.ENGINE, "")
    for number in range(40):
        gains.publish(f"run-{number:03d}", {"conv2d": [float(number)]})

    assert gains.load()["conv2d"] == tuple(float(number) for number in range(8, 40))
