"""Samples of the cost model: kept in files, each candidate once, damaged files left out."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.fresh import in_fresh


def round_trip(folder: str) -> str:
    """In a fresh interpreter: save two sessions, load them elsewhere; what came back, as text."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import numpy as np

    from tasks.engines.relax.cost_model import Samples

    assert "tvm" in sys.modules
    rows = np.arange(6, dtype="float32").reshape(2, 3)
    first = Samples()
    first.add("w", "a", rows, 10.0)
    first.add("w", "a", rows, 99.0)
    first.save(Path(folder) / "run-0001.npz")
    first.add("w", "b", rows[:1], 20.0)
    first.add("v", "c", rows, float("inf"))
    first.save(Path(folder) / "run-0002.npz")
    first.save(Path(folder) / "run-0003.npz")
    (Path(folder) / "broken.npz").write_bytes(b"PK not a zip")
    second = Samples()
    second.load(Path(folder))
    second.load(Path(folder))
    shapes = [part.shape[0] for part in second.features]
    return f"{len(second)} {shapes} {second.scores().tolist()} {second.has('w', 'b')} {second.has('w', 'c')}"


def test_samples_come_back_once(tmp_path: Path) -> None:
    text = in_fresh(round_trip, str(tmp_path))
    assert text == "3 [2, 1, 2] [1.0, 0.5, 0.0] True False"
    assert sorted(path.name for path in tmp_path.glob("run-*.npz")) == ["run-0001.npz", "run-0002.npz"]
