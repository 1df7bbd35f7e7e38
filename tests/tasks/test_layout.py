"""The layout is raced on the real engine, decided once, and looked up from then on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infra.object_store import open_store
from infra.record_store import RecordStore
from tasks import layout
from tasks.engines.child import ChildOptions
from tasks.errands import Finished, OwnHands, run_errand
from tasks.fuse import adopt
from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tasks.records import ImportedModule, MeasureSettings
from tasks.run import TuningRun, close_engines, forget
from tasks.sessions import Errand
from tasks.tune import measure_defaults


class HandsWithoutPrefect(OwnHands):
    """Runs errands in this process as plain calls."""

    def submit(self, errand: Errand) -> None:
        self._finished.append(Finished(errand, run_errand.fn(errand.title, errand)))


def write_model(path: Path, convs: bool) -> Path:
    """Two convs with a pool between them, or two matmuls."""
    random = np.random.default_rng(0).uniform(-1, 1, 10_000).astype("float32")
    if convs:
        nodes = [
            helper.make_node("Conv", ["x", "a"], ["1"], pads=[1, 1, 1, 1]),
            helper.make_node("MaxPool", ["1"], ["2"], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Conv", ["2", "b"], ["y"]),
        ]
        shape, weights = (1, 3, 16, 16), {"a": random[: 16 * 27].reshape(16, 3, 3, 3), "b": random[:512]}
        weights["b"] = weights["b"].reshape(32, 16, 1, 1)
    else:
        nodes = [helper.make_node("MatMul", ["x", "a"], ["1"]), helper.make_node("MatMul", ["1", "b"], ["y"])]
        shape, weights = (4, 32), {"a": random[:1024].reshape(32, 32), "b": random[:2048].reshape(32, 64)}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "small", [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8)), path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TuningRun]:
    store = open_store(str(tmp_path / "store"))
    quick = MeasureSettings(repeat=2, min_repeat_ms=1)
    made = TuningRun(
        "race", ChildOptions("relax", sys.executable, "cpu", "cpu:0-1", 2), tmp_path, store, quick, 0, print
    )
    made.hands = HandsWithoutPrefect()
    info = made.engine.describe()
    made.records = RecordStore(store, info.engine, info.tvm_version, info.target.key)
    yield made
    forget("race")


@pytest.fixture(scope="module", autouse=True)
def _engine_ends() -> Iterator[None]:
    yield
    close_engines()


def imported(run: TuningRun, folder: Path, convs: bool) -> ImportedModule:
    """The model in the engine, its default schedules measured in the preferred layout."""
    model = import_model_file(fetch(str(write_model(folder / "small.onnx", convs)), folder), {}, folder)
    return run.engine.import_model(model)


def test_both_layouts_are_measured_once(run: TuningRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "TRIALS", 2)
    module = imported(run, tmp_path, convs=True)
    assert layout.worth_racing(run, layout.known_layout(run, module, ""), trials=None, minutes=30)
    fused = run.engine.fuse(module, "subgraph")
    adopt(run, run.engine.extract(fused, str(tmp_path / "workloads")))
    measure_defaults(run)
    preferred = run.tasks

    chosen = layout.race_layouts.fn(run.run_id, fused)

    # A known decision is looked up, and nothing is raced again.
    known = layout.known_layout(run, module, "")
    assert known.layout == (chosen.imported.layout or "channels-last")
    assert not layout.worth_racing(run, known, trials=None, minutes=30)
    searched = {r.workload_key for r in run.book.of_run("race") if r.phase == "search"}
    assert searched & {t.workload_key for t in preferred}
    assert searched - {t.workload_key for t in preferred}
    assert {t.workload_key for t in run.tasks} == {subgraph.workload_key for subgraph in chosen.subgraphs}
    assert len(run.notes) == 2
    for name in ("channels-last", "as-imported"):
        assert f"{name} " in run.notes[0]


def test_a_model_without_convs_has_nothing_to_race(run: TuningRun, tmp_path: Path) -> None:
    fused = run.engine.fuse(imported(run, tmp_path, convs=False), "subgraph")
    adopt(run, run.engine.extract(fused, str(tmp_path / "workloads")))

    assert layout.race_layouts.fn(run.run_id, fused) == fused
    assert run.book.of_run("race") == []


def test_who_asks_for_a_layout_gets_it(run: TuningRun, tmp_path: Path) -> None:
    module = layout.known_layout(run, imported(run, tmp_path, convs=True), "as-imported")

    assert module.layout == "as-imported"
    assert not layout.worth_racing(run, module, trials=None, minutes=None)


@pytest.mark.parametrize(("trials", "minutes", "raced"), [(None, 9, False), (479, None, False), (480, 10, True)])
def test_a_small_budget_is_not_spent_on_races(
    trials: int | None, minutes: float | None, raced: bool, run: TuningRun, tmp_path: Path
) -> None:
    assert layout.worth_racing(run, imported(run, tmp_path, convs=True), trials, minutes) is raced
