"""Winograd beside the direct conv: the same outputs from the same arguments, raced, and built where it wins."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.fresh import in_fresh

#: Channels, columns, height, width, padding, stride, dilation, groups, batch; and what is behind the conv.
ELIGIBLE = {
    "square": (32, 48, 27, 27, 1, 1, 1, 1, 1, "relu"),
    "small, columns to fill up": (16, 92, 13, 13, 1, 1, 1, 1, 1, "relu"),
    "no padding, two pictures": (16, 32, 18, 14, 0, 1, 1, 1, 2, "relu"),
    "wide, with a sum": (48, 48, 12, 80, 1, 1, 1, 1, 1, "sum"),
    "alone, without bias": (16, 32, 30, 30, 1, 1, 1, 1, 1, ""),
}
OTHERS = {
    "steps of two": (32, 32, 28, 28, 1, 2, 1, 1, 1, "relu"),
    "dilated": (32, 32, 28, 28, 2, 1, 2, 1, 1, "relu"),
    "groups": (32, 32, 28, 28, 1, 1, 1, 2, 1, "relu"),
    "depthwise": (32, 32, 28, 28, 1, 1, 1, 32, 1, "relu"),
    "few channels": (8, 32, 28, 28, 1, 1, 1, 1, 1, "relu"),
    "small picture": (32, 32, 7, 7, 1, 1, 1, 1, 1, "relu"),
}


def conv(case: tuple[Any, ...]) -> onnx.ModelProto:
    """One conv of 3 x 3 and what is behind it."""
    channels, columns, high, wide, padding, stride, dilation, groups, batch, behind = case
    weight = np.random.default_rng(0).uniform(-1, 1, (columns, channels // groups, 3, 3)).astype(np.float32)
    weights = {"w": weight / np.float32(3 * math.sqrt(channels)), "b": weight[:, 0, 0, 0].copy()}
    attributes = {"pads": [padding] * 4, "strides": [stride] * 2, "dilations": [dilation] * 2, "group": groups}
    nodes = [helper.make_node("Conv", ["x", "w", *(["b"] if behind else [])], ["c"], **attributes)]
    if behind == "sum":
        nodes += [helper.make_node("Add", ["c", "x"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
    else:
        nodes.append(helper.make_node("Relu" if behind else "Identity", ["c"], ["y"]))
    value = helper.make_tensor_value_info
    shape = [batch, channels, high, wide]
    kept = [numpy_helper.from_array(array, name) for name, array in weights.items() if behind or name != "b"]
    graph = helper.make_graph(nodes, "conv", [value("x", TensorProto.FLOAT, shape)],
                              [value("y", TensorProto.FLOAT, None)], kept)  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def compare(folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """In a fresh interpreter: by case the implementations, those with a schedule, and their differences."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    import tvm

    from tasks.engines.relax import frontend, search, subgraphs, targets
    from tasks.engines.relax.implementations import Workload
    from tests.infra import sample_records

    target = targets.to_tvm(targets.resolve("cpu", 2))

    def output(mod: Any) -> Any:
        arrays = [
            np.random.default_rng(place).uniform(-1, 1, shape).astype(dtype)
            for place, (shape, dtype) in enumerate(subgraphs.arguments(mod))
        ]
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        tvm.tirx.build(mod, target=target)["main"](*tensors)
        return tensors[-1].numpy()

    found: dict[str, Any] = {}
    for name, case in cases.items():
        path = Path(folder) / "conv.onnx"
        onnx.save(conv(tuple(case)), path)
        inventory = subgraphs.take_inventory(frontend.fuse(frontend.translate(str(path))[0], target))
        (subgraph,) = [each for each in inventory.subgraphs if each.anchor_operator == "conv2d"]
        kept = inventory.workloads[subgraph.workload_key]
        workload = Workload.from_text(kept.to_text())
        assert subgraphs.structural_key(workload.mod) == subgraph.workload_key
        sketches = workload.sketches(target)
        wanted = output(workload.mod)
        differences = [float(np.abs(output(s.mod) - wanted).max() / np.abs(wanted).max()) for s in sketches.values()]
        for implementation, sketch in sketches.items():
            record = replace(
                sample_records.record(1), schedule=search.trace_text(sketch.trace), implementation=implementation,
                candidate_key=subgraphs.structural_key(sketch.mod),
            )  # fmt: skip
            search.replay_record(kept, record, target)
            try:
                search.replay_record(kept, replace(record, candidate_key="0" * 16), target)
            except ValueError:
                continue
            raise AssertionError("another version's record was replayed")
        found[name] = [list(subgraph.implementations), list(sketches), differences]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("convs"))
    answer: dict[str, Any] = in_fresh(compare, folder, {**ELIGIBLE, **OTHERS}, timeout_s=300)
    return answer


@pytest.mark.parametrize("name", ELIGIBLE)
def test_every_plan_computes_what_the_direct_conv_does(found: dict[str, Any], name: str) -> None:
    implementations, scheduled, differences = found[name]

    assert implementations == scheduled
    assert scheduled
    # The transforms of F(4x4, 3x3) lose a digit or two of seven.
    assert 0 < max(differences) < 5e-5


@pytest.mark.parametrize("name", OTHERS)
def test_what_winograd_cannot_do_or_would_lose_is_not_offered(found: dict[str, Any], name: str) -> None:
    assert found[name][0] == []


def race(folder: str) -> dict[str, Any]:
    """In a fresh interpreter: what a search proposes where Winograd is far ahead, and where it is not."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tasks.engines.relax import frontend, subgraphs, targets
    from tasks.engines.relax.cost_model import Samples, XgbCostModel
    from tasks.engines.relax.search import TaskSearch
    from tests.infra import sample_records

    target = targets.to_tvm(targets.resolve("cpu", 2))
    onnx.save(conv(ELIGIBLE["square"]), Path(folder) / "conv.onnx")
    inventory = subgraphs.take_inventory(frontend.fuse(frontend.translate(f"{folder}/conv.onnx")[0], target))
    (subgraph,) = [each for each in inventory.subgraphs if each.implementations]
    path = Path(folder) / "workload.json"
    path.write_text(inventory.workloads[subgraph.workload_key].to_text())
    task = replace(sample_records.task(0), workload_path=str(path))
    answers = {}
    for name, latency_us in (("ahead", 50.0), ("behind", 90.0)):
        search = TaskSearch(task, target, XgbCostModel(Samples(), 2, 0))
        search.learn([sample_records.record(0, 100.0)])
        first = search.propose(16, 1)
        search.report(first, [latency_us] * len(first))
        second = search.propose(4, 2)
        answers[name] = [[c.implementation for c in first], [c.implementation for c in second], search.exhausted]
        answers[f"{name} best"] = search.best_us
    # What another session measured of it is not proposed again.
    known = [
        replace(sample_records.record(1, 50.0), candidate_key=c.key, schedule=c.trace, implementation=c.implementation)
        for c in first
    ]
    search = TaskSearch(task, target, XgbCostModel(Samples(), 2, 0))
    search.learn([sample_records.record(0, 100.0), *(replace(r, record_id=f"r{i}") for i, r in enumerate(known))])
    return {**answers, "again": len(search.propose(4, 1)), "implementations": list(subgraph.implementations)}


def test_the_search_measures_it_first_and_gives_the_direct_conv_up_where_it_is_far_behind(tmp_path: Path) -> None:
    told = in_fresh(race, str(tmp_path))

    assert told["ahead"] == [told["implementations"], [], True]
    assert told["ahead best"] == 50.0
    first, second, exhausted = told["behind"]
    assert (first, second, exhausted) == (told["implementations"], [""] * 4, False)
    assert told["again"] == 0


def tune_and_build(folder: str) -> dict[str, Any]:
    """In a fresh interpreter: a session on a conv, and an artifact built from its fastest Winograd record."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tasks.engines.interface import BuildRequest, ExecutionRequest
    from tasks.engines.measuring.engine import EngineOptions
    from tasks.engines.measuring.zygote import Zygote
    from tasks.engines.relax import candidates, execution
    from tasks.engines.relax.engine import RelaxEngine
    from tasks.import_model import OnnxRuntimeModel, import_model_file, seeded_inputs
    from tasks.model_source import fetch
    from tasks.records import MeasureSettings, Session

    home = Path(folder)
    onnx.save(conv(ELIGIBLE["small, columns to fill up"]), home / "model.onnx")
    model = import_model_file(fetch(str(home / "model.onnx"), home), {}, home)
    inputs = seeded_inputs(model, 0)
    np.savez(home / "inputs.npz", **inputs)
    roles = {"build": candidates.make_builder, "run": candidates.make_runner, "execute": execution.make_executor}
    engine = RelaxEngine(EngineOptions("cpu", "cpu:0-1", 2, folder), Zygote(roles))
    fused = engine.fuse(engine.import_model(model), "subgraph")
    (task,) = [each for each in engine.extract(fused, f"{folder}/workloads") if each.subgraph.implementations]
    session = Session(
        session_id="s", run_id="run", phase="default", tasks=(task,), trials=0, seed=1, reason="a test",
        settings=MeasureSettings(repeat=1, min_repeat_ms=1), journal_path=f"{folder}/s.jsonl",
    )  # fmt: skip
    records: list[Any] = []

    def hear(event: str, data: Any) -> None:
        if event == "record":
            records.append(data)

    engine.tune(session, hear, lambda: False)
    engine.tune(replace(session, session_id="t", phase="search", trials=2, journal_path=f"{folder}/t.jsonl"), hear,
                lambda: False)  # fmt: skip
    others = [record for record in records if record.implementation.startswith("winograd")]
    best = {task.workload_key: (others[0],)}
    artifact = engine.build(BuildRequest(fused, best, f"{folder}/built", True))
    engine.execute(ExecutionRequest(artifact.path, f"{folder}/inputs.npz", 1, f"{folder}/outputs.npz"))
    expected = OnnxRuntimeModel(model, 1).run(inputs)
    with np.load(home / "outputs.npz") as outputs:
        errors = [float(np.abs(outputs[name] - expected[name]).max()) for name in expected]
    engine.close()
    return {
        "failures": [record.failure.message for record in records if record.failure], "errors": errors,
        "implementations": [record.implementation for record in others],
        "built": [c.implementation for c in artifact.choices if c.workload_key == task.workload_key],
    }  # fmt: skip


def test_a_model_is_built_with_it_and_says_so(tmp_path: Path) -> None:
    told = in_fresh(tune_and_build, str(tmp_path))

    assert told["failures"] == []
    assert len(told["implementations"]) == 2
    assert told["built"] == told["implementations"][:1]
    # Sums of 144 terms of about one, transformed.
    assert 0 < max(told["errors"]) < 1e-4
