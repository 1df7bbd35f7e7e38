"""What the latency benchmark runs on: light models with numbers in them, records in one small file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.latency_records import read_records, write_records
from benchmarks.packaged_model import packaged_model
from benchmarks.randomised_model import randomise
from tests.infra import sample_records


def test_a_light_model_gets_seeded_weights_and_shows_its_logits(tmp_path: Path) -> None:
    import onnxruntime

    source = packaged_model("shufflenet")
    first, again, other = (randomise(source, tmp_path / f"{i}.onnx", seed) for i, seed in enumerate((0, 0, 1)))
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(first).graph.initializer}
    session = onnxruntime.InferenceSession(str(first), providers=["CPUExecutionProvider"])
    data = np.random.default_rng(0).uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)
    (logits,) = session.run(None, {session.get_inputs()[0].name: data})

    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert [value.name for value in session.get_inputs()] == ["gpu_0/data_0"]
    assert len(np.unique(weights["gpu_0/gconv1_0_w_0"])) > 100
    assert np.isfinite(logits).all()
    # Probabilities would add up to one.
    assert abs(logits.sum() - 1) > 1
    assert len(np.unique(logits)) > 900


def test_records_come_back_from_their_file_each_once(tmp_path: Path) -> None:
    records = [sample_records.record(number) for number in range(3)]
    path = tmp_path / "folder" / "records.xz"
    write_records(path, [*records, records[0]])

    found = read_records(path)

    assert sorted((r for group in found.values() for r in group), key=lambda r: r.record_id) == sorted(
        records, key=lambda r: r.record_id
    )
    assert all(record.workload_key == key for key, group in found.items() for record in group)
