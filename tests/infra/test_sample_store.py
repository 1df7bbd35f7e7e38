"""What the cost model learned: one object a run, fetched by other machines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infra.object_store import DirectoryStore
from infra.sample_store import SampleStore
from tasks.records import EngineInfo, Target

INFO = EngineInfo("relax", "0.27", "3.11", Target("llvm", "{}", "llvm-x", 2), "cpu:0-1", {})


def _session_file(samples: SampleStore, session_id: str, latencies_us: list[float]) -> None:
    count = len(latencies_us)
    np.savez(
        samples.folder / f"{session_id}.npz", allow_pickle=False,
        rows=np.arange(count * 2 * 3, dtype=np.float32).reshape(count * 2, 3), lengths=np.full(count, 2),
        workloads=np.array(["w"] * count), candidates=np.array([f"{session_id}-{i}" for i in range(count)]),
        latencies_us=np.array(latencies_us), schedules=np.array([f"[{session_id}]".encode()]),
        schedule_workloads=np.array(["w"]), schedule_latencies_us=np.array([min(latencies_us)]),
    )  # fmt: skip


def test_sessions_become_one_object_that_another_machine_fetches(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    here, there = SampleStore(store, INFO, tmp_path / "here"), SampleStore(store, INFO, tmp_path / "there")
    _session_file(here, "run-0001", [1.0, 2.0])
    _session_file(here, "run-0002", [3.0])
    assert here.unpublished() == {"run"}
    assert here.publish("run") == 3
    assert here.unpublished() == set()
    assert len(list(here.folder.glob("*.npz"))) == 1
    assert here.fetch() == 0, "what was published here is here already"
    assert there.fetch() == 1
    (path,) = there.folder.glob("*.npz")
    with np.load(path, allow_pickle=False) as stored:
        assert stored["latencies_us"].tolist() == [1.0, 2.0, 3.0]
        assert stored["rows"].shape == (6, 3)
        assert stored["lengths"].tolist() == [2, 2, 2]
        assert stored["schedules"].tolist() == [b"[run-0001]", b"[run-0002]"]
        assert stored["schedule_latencies_us"].tolist() == [1.0, 3.0]
    assert there.fetch() == 0


def test_a_run_that_is_published_in_two_parts_loses_neither(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    samples = SampleStore(store, INFO, tmp_path / "home")
    _session_file(samples, "run-0001", [1.0])
    assert samples.publish("run") == 1
    _session_file(samples, "run-0002", [2.0])
    assert samples.publish("run") == 1
    assert samples.publish("run") == 0
    assert SampleStore(store, INFO, tmp_path / "other").fetch() == 2


def test_other_targets_have_samples_of_their_own(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    samples = SampleStore(store, INFO, tmp_path / "home")
    _session_file(samples, "run-0001", [1.0])
    samples.publish("run")
    other = EngineInfo("relax", "0.27", "3.11", Target("llvm", "{}", "llvm-y", 2), "cpu:0-1", {})
    assert SampleStore(store, other, tmp_path / "home").fetch() == 0
