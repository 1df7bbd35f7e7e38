"""What the relay engine makes of small models: their graphs, layouts, configs, tuners. A real child each module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.import_model import import_model_file, reference_outputs, seeded_inputs
from tasks.model_source import fetch
from tasks.records import ModelFile
from tests.contracts.test_engine import QUICK, Sessions
from tests.relay import needs_relay, relay_python

pytestmark = needs_relay


def child(tuner: str = "xgb") -> EngineChild:
    tuned_by = (("TUNEWRIGHT_RELAY_TUNER", tuner),)
    return EngineChild(ChildOptions("relay", str(relay_python()), "cpu", "cpu:0-1", 2, extra_environment=tuned_by))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))  # no other run's device lock is met
    with child() as started:
        yield started
    patch.undo()


def saved(folder: Path, nodes: list[Any], weights: dict[str, Any], ends: tuple[Any, Any]) -> ModelFile:
    """A model of ``nodes``; ``ends`` are shapes by name of the inputs, and names of the outputs."""
    inputs, outputs = ends
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()],
    )  # fmt: skip
    path = folder / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return import_model_file(fetch(str(path), folder), {}, folder)


def weight(*shape: int) -> Any:
    return (np.random.default_rng(len(shape)).standard_normal(shape) / 8).astype("float32")


def twins(folder: Path) -> ModelFile:
    """Two convs of one shape, with other operators fused to each."""
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b"], ["c0"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1", "b"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c1", "r0"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["y"]),
    ]
    weights = {"w0": weight(16, 16, 3, 3), "w1": weight(16, 16, 3, 3) + 0.1, "b": weight(16)}
    return saved(folder, nodes, weights, ({"x": [1, 16, 24, 24]}, ["y"]))


def run(engine: EngineChild, model: ModelFile, artifact: str, folder: Path) -> None:
    """Run and compare with onnxruntime."""
    np.savez(folder / "in.npz", **seeded_inputs(model, 0))
    engine.execute(ExecutionRequest(artifact, str(folder / "in.npz"), 0, str(folder / "out.npz")))
    expected = reference_outputs(model, seeded_inputs(model, 0), 2)
    with np.load(folder / "out.npz") as stored:
        assert set(stored.files) == set(expected)
        for name, want in expected.items():
            # Some dozens of float32 terms in another order.
            np.testing.assert_allclose(stored[name], want, atol=1e-4, rtol=1e-4)


def test_subgraphs_with_one_anchor_have_configs_of_their_own(engine: EngineChild, tmp_path: Path) -> None:
    model = twins(tmp_path)
    fused = engine.fuse(engine.import_model(model), "subgraph")
    convs = [subgraph for subgraph in fused.subgraphs if "conv" in subgraph.anchor_operator]
    assert len(convs) == 2
    assert convs[0].anchor_key == convs[1].anchor_key
    tasks = {task.workload_key: task for task in engine.extract(fused, str(tmp_path / "workloads"))}
    sessions = Sessions(engine, tmp_path)
    best, tiles = {}, []
    for rank, conv in enumerate(convs):
        found = sessions.run(sessions.make("search", [tasks[conv.workload_key]], trials=8)).records
        measured = sorted((r for r in found if r.measurement), key=lambda r: str(r.schedule))
        # Whatever is fast: the two are to be different.
        best[conv.workload_key] = (measured[-rank],)
        tiles.append(json.loads(measured[-rank].schedule)["config"]["entity"])
        assert all(record.implementation == "conv2d_NCHWc.x86" for record in measured)
    assert tiles[0] != tiles[1]
    artifact = engine.build(BuildRequest(fused, best, str(tmp_path / "artifact"), tuned=True))

    chosen = {choice.workload_key: choice.record_id for choice in artifact.choices if choice.record_id}
    assert chosen == {key: records[0].record_id for key, records in best.items()}
    run(engine, model, artifact.path, tmp_path)


def test_neighbouring_convs_agree_on_their_layout(engine: EngineChild, tmp_path: Path) -> None:
    fused = engine.fuse(engine.import_model(twins(tmp_path)), "subgraph")
    transforms = [s for s in fused.subgraphs if set(s.operators) == {"layout_transform"}]
    # One where the chain of convs begins, one at its end; none between them.
    assert sum(subgraph.weight for subgraph in transforms) <= 2


def test_graphs_with_branches_reshapes_and_several_outputs(engine: EngineChild, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("AveragePool", ["c"], ["q"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Concat", ["p", "q"], ["k"], axis=1),
        helper.make_node("Split", ["k"], ["k0", "k1"], axis=1),
        helper.make_node("Mul", ["k0", "k1"], ["m"]),
        helper.make_node("Flatten", ["m"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "h"], ["z"], transB=1),
        helper.make_node("Softmax", ["z"], ["probabilities"]),
        helper.make_node("Reshape", ["k", "flat"], ["features"]),
        helper.make_node("Exp", ["f"], ["e"]),
    ]
    weights = {
        "w": weight(12, 3, 3, 3), "g": weight(10, 12 * 8 * 8), "h": weight(10), "flat": np.array([1, -1], np.int64),
    }  # fmt: skip
    model = saved(tmp_path, nodes, weights, ({"x": [1, 3, 16, 16]}, ["probabilities", "features", "e"]))
    fused = engine.fuse(engine.import_model(model), "subgraph")
    artifact = engine.build(BuildRequest(fused, {}, str(tmp_path / "artifact"), tuned=False))

    run(engine, model, artifact.path, tmp_path)


@pytest.mark.parametrize("tuner", ["ga", "random", "grid"])
def test_every_tuner_searches(tuner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with child(tuner) as engine:
        fused = engine.fuse(engine.import_model(twins(tmp_path)), "subgraph")
        task = engine.extract(fused, str(tmp_path / "workloads"))[0]
        sessions = Sessions(engine, tmp_path)
        first = sessions.run(sessions.make("search", [task], trials=4)).records
        second = sessions.run(sessions.make("search", [task], first, trials=4)).records

    assert len({record.candidate_key for record in (*first, *second)}) == 8
    assert all(record.measurement for record in first), [record.failure for record in first]


def test_a_space_comes_to_its_end_and_what_it_taught_is_kept(engine: EngineChild, tmp_path: Path) -> None:
    fused = engine.fuse(engine.import_model(twins(tmp_path)), "subgraph")
    tasks = engine.extract(fused, str(tmp_path / "workloads"))
    task = next(task for task in tasks if "conv" in task.subgraph.anchor_operator)
    samples = tmp_path / "samples"
    sessions = Sessions(engine, tmp_path)
    session = sessions.make("search", [task], trials=100, settings=QUICK, samples_dir=str(samples))
    heard = sessions.run(session)

    assert heard.result.exhausted
    assert 8 <= len(heard.records) < 100
    assert len({record.schedule for record in heard.records}) == len(heard.records)
    with np.load(samples / f"{session.session_id}.npz") as stored:
        assert {record.schedule for record in heard.records if record.measurement} <= set(stored["schedules"].tolist())
        assert len(stored["schedules"]) == len(stored["lengths"])


@pytest.mark.parametrize("tuner", ["xgb", "random"])
def test_slices_and_stopped_sessions_leave_nothing_of_a_space_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuner: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = twins(tmp_path)
    keys = []
    for cut in (False, True):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        found = []
        with child(tuner) as engine:
            tasks = engine.extract(engine.fuse(engine.import_model(model), "subgraph"), str(folder / "workloads"))
            task = next(task for task in tasks if "conv" in task.subgraph.anchor_operator)
            sessions = Sessions(engine, folder)
            if cut:
                sliced = sessions.make("search", [task], trials=4, slice_index=0, slice_count=2)
                found += sessions.run(sliced).records
                stopped = sessions.make("search", [task], found, trials=8)
                found += sessions.run(stopped, lambda record, engine=engine: engine.finish_trial()).records
            last = sessions.run(sessions.make("search", [task], found, trials=100))
        found += last.records
        assert last.result.exhausted
        keys.append([record.candidate_key for record in found])

    assert sorted(keys[0]) == sorted(keys[1])


def test_a_later_session_begins_with_what_was_best_for_a_like_workload_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with child() as engine:
        fused = engine.fuse(engine.import_model(twins(tmp_path)), "subgraph")
        tasks = engine.extract(fused, str(tmp_path / "workloads"))
        one, other = (task for task in tasks if "conv" in task.subgraph.anchor_operator)
        sessions = Sessions(engine, tmp_path)
        before = sessions.run(sessions.make("search", [one], trials=1)).records
        learned = sessions.run(sessions.make("search", [other], trials=100)).records
        # One trial: of several the records come in the order in which they were built.
        after = sessions.run(sessions.make("search", [one], before, trials=1)).records

    ranked = sorted((record for record in learned if record.latency_us), key=lambda record: record.latency_us or 0.0)
    best = next(record for record in ranked if record.candidate_key != before[0].candidate_key)
    assert [record.candidate_key for record in after] == [best.candidate_key]
