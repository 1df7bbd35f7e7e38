"""What every engine must do, over the engines there are: each runs as a real child process.

The model is the PP-OCR direction classifier (real weights, some fifty subgraphs). The tests of one engine
share its child and build on the fixtures below, which hold what earlier verbs gave.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import BuildRequest, ExecutionRequest, best_first, is_outdated
from tasks.engines.measuring.journal import read_journal
from tasks.engines.wire import to_line
from tasks.errors import DeviceBusy, EngineCrashed, ModelError, StoreError, TargetError
from tasks.import_model import import_model_file, reference_outputs, seeded_inputs
from tasks.model_source import fetch
from tasks.records import (
    FusedModule,
    ImportedModule,
    MeasureSettings,
    ModelFile,
    Session,
    SessionResult,
    TuningRecord,
    TuningTask,
)
from tests.models import beginning_of_classifier, packaged_shapes
from tests.relay import needs_relay, relay_python

THREADS = min(2, len(os.sched_getaffinity(0)))
#: Short timings: these tests look at what is recorded, not at how fast it is.
QUICK = MeasureSettings(repeat=2, min_repeat_ms=2)
SEARCHED = 6

#: Name and interpreter of every engine. The relay engine lives in an environment of its own.
ENGINES = {"relax": sys.executable, "relay": str(relay_python())}


def options_for(engine: str, target: str = "cpu", device: str = "cpu:0-1") -> ChildOptions:
    # A device of its own name: other tests, or a run beside them, may hold the usual one.
    return ChildOptions(engine, ENGINES[engine], target, f"{device}", THREADS, step_timeout_s=300.0)


@pytest.fixture(scope="module", params=["relax", pytest.param("relay", marks=needs_relay)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    # A folder for temporary files of its own, so that no other run's lock or left-over is met.
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
    with EngineChild(options_for(request.param)) as child:
        yield child
    patch.undo()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    folder = tmp_path_factory.mktemp("model")
    path = beginning_of_classifier(folder / "classifier.onnx")
    return import_model_file(fetch(str(path), folder), packaged_shapes("classifier"), folder)


@pytest.fixture(scope="module")
def imported(engine: EngineChild, model: ModelFile) -> ImportedModule:
    return engine.import_model(model)


@pytest.fixture(scope="module")
def fused(engine: EngineChild, imported: ImportedModule) -> FusedModule:
    return engine.fuse(imported, "subgraph")


@pytest.fixture(scope="module")
def tasks(engine: EngineChild, fused: FusedModule, tmp_path_factory: pytest.TempPathFactory) -> tuple[TuningTask, ...]:
    return engine.extract(fused, str(tmp_path_factory.mktemp("workloads")))


@dataclasses.dataclass
class Heard:
    """A session's records as they came, and its result."""

    session: Session
    records: list[TuningRecord]
    result: SessionResult


class Sessions:
    """Runs sessions on an engine and checks of each what holds for all."""

    def __init__(self, engine: EngineChild, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.numbers = itertools.count(1)

    def make(self, phase: str, tasks: Sequence[TuningTask], known: Sequence[TuningRecord] = (), **rest: Any) -> Session:
        name = f"session-{next(self.numbers)}"
        known_path = self.folder / f"{name}-known.jsonl"
        known_path.write_text("".join(to_line(record) for record in known))
        made = Session(
            session_id=name, run_id="run", phase=phase, tasks=tuple(tasks), trials=0, seed=3, reason="a test",
            settings=QUICK, journal_path=str(self.folder / f"{name}.jsonl"), known_path=str(known_path), first_trial=1,
        )  # fmt: skip
        return dataclasses.replace(made, **rest)

    def run(self, session: Session, on_record: Any = None) -> Heard:
        heard: list[TuningRecord] = []

        def listen(record: TuningRecord) -> None:
            heard.append(record)
            # On the disk before anybody hears of it; the child may be further already.
            assert list(read_journal(session.journal_path))[: len(heard)] == heard
            if on_record:
                on_record(record)

        result = self.engine.tune(session, listen)
        assert result.session_id == session.session_id
        assert result.records == len(heard)
        assert list(read_journal(session.journal_path)) == heard
        return Heard(session, heard, result)


@pytest.fixture(scope="module")
def sessions(engine: EngineChild, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    return Sessions(engine, tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def defaults(sessions: Sessions, tasks: Sequence[TuningTask]) -> Heard:
    return sessions.run(sessions.make("default", [tasks[0], *tasks[-2:]]))


@pytest.fixture(scope="module")
def search(sessions: Sessions, tasks: Sequence[TuningTask], defaults: Heard) -> Heard:
    session = sessions.make("search", tasks[:1], defaults.records, trials=SEARCHED, first_trial=5)
    return sessions.run(session)


def execute(engine: EngineChild, model: ModelFile, artifact: str, folder: Path, seed: int = 0) -> Any:
    inputs, outputs = folder / f"inputs-{seed}.npz", folder / "outputs.npz"
    np.savez(inputs, **seeded_inputs(model, seed))
    engine.execute(ExecutionRequest(artifact, str(inputs), 0, str(outputs)))
    with np.load(outputs) as stored:
        return {name: stored[name] for name in stored.files}


def assert_right(actual: Any, model: ModelFile, seed: int = 0) -> None:
    expected = reference_outputs(model, seeded_inputs(model, seed), THREADS)
    assert set(actual) == set(expected)
    for name, want in expected.items():
        assert actual[name].dtype == want.dtype
        # float32 sums in another order through some ten layers: 1e-5 of the largest output at most.
        np.testing.assert_allclose(actual[name], want, atol=1e-4 * np.abs(want).max(), rtol=0)


def test_describe_names_versions_target_and_device(engine: EngineChild) -> None:
    info = engine.describe()

    assert info.engine == engine.options.engine
    assert info.tvm_version and info.python_version
    # The package that TVM came in is named with its version, which the TVM version tells too.
    assert any("tvm" in name and number in info.tvm_version for name, number in info.versions.items())
    assert info.target.key.startswith(info.target.kind)
    assert json.loads(info.target.spec)
    assert info.target.threads == THREADS
    assert info.device == engine.options.device
    assert engine.describe() == info


def test_import_counts_the_operators(imported: ImportedModule, model: ModelFile) -> None:
    graph = onnx.load(model.path).graph
    counts = {op: sum(node.op_type == op for node in graph.node) for op in {node.op_type for node in graph.node}}

    assert imported.operators == counts
    assert imported.model == model
    assert imported.inputs == model.inputs
    assert imported.outputs == model.outputs


@pytest.mark.parametrize("granularity", ["subgraph", "operator"])
def test_fuse_lists_subgraphs_and_calls(engine: EngineChild, imported: ImportedModule, granularity: str) -> None:
    fused = engine.fuse(imported, granularity)
    names = [subgraph.name for subgraph in fused.subgraphs]

    assert fused.granularity == granularity
    assert len(set(names)) == len(names)
    assert len({subgraph.workload_key for subgraph in fused.subgraphs}) == len(names)
    assert {call.subgraph for call in fused.calls} == set(names)
    for subgraph in fused.subgraphs:
        assert subgraph.weight == sum(call.subgraph == subgraph.name for call in fused.calls)
        assert subgraph.operators
        assert subgraph.anchor_operator in subgraph.operators
        assert subgraph.inputs and subgraph.outputs
        assert subgraph.flops >= 0
        assert subgraph.bytes_moved > 0
        assert subgraph.output_dtype == subgraph.outputs[-1].dtype
    for index, call in enumerate(fused.calls):
        assert all(0 <= feeder < index for feeder in call.feeds_from)
    # One input, one chain of layers: only the first call has no kernel before it.
    assert any(len(subgraph.operators) > 1 for subgraph in fused.subgraphs)
    assert sum(not call.feeds_from for call in fused.calls) < len(fused.calls) / 2


def test_extract_gives_one_task_a_workload_heaviest_first(
    fused: FusedModule, tasks: Sequence[TuningTask], engine: EngineChild
) -> None:
    assert {task.workload_key for task in tasks} == {subgraph.workload_key for subgraph in fused.subgraphs}
    assert len({task.workload_key for task in tasks}) == len(tasks)
    assert sum(task.weight for task in tasks) == len(fused.calls)
    shares = [task.expected_share for task in tasks]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1.0)
    for task in tasks:
        assert task.target_key == engine.describe().target.key
        assert task.subgraph.workload_key == task.workload_key
        # The model's weights are 0.5 MB; a workload is its IR alone.
        assert Path(task.workload_path).stat().st_size < 200_000


def test_operator_granularity_tunes_anchors(engine: EngineChild, imported: ImportedModule, tmp_path: Path) -> None:
    fused = engine.fuse(imported, "operator")
    tasks = engine.extract(fused, str(tmp_path))

    assert {task.workload_key for task in tasks} == {subgraph.anchor_key for subgraph in fused.subgraphs}
    assert sum(task.weight for task in tasks) == len(fused.calls)
    assert len(tasks) <= len(fused.subgraphs)


def test_a_default_session_measures_each_task_once(defaults: Heard) -> None:
    # In the order in which they are built.
    assert sorted(r.workload_key for r in defaults.records) == sorted(t.workload_key for t in defaults.session.tasks)
    for record in defaults.records:
        assert record.phase == "default"
        assert record.schedule == ""
        assert record.measurement is not None, record.failure
        assert record.measurement.settings == QUICK
        assert len(record.measurement.latencies_us) == QUICK.repeat
    assert defaults.result.failures == {}


def test_a_default_says_which_version_of_the_schedules_it_is(defaults: Heard) -> None:
    assert not any(is_outdated(record) for record in defaults.records)


def test_a_default_that_is_known_is_not_measured_again(sessions: Sessions, defaults: Heard) -> None:
    again = sessions.run(sessions.make("default", defaults.session.tasks, defaults.records[:2]))
    assert [record.workload_key for record in again.records] == [defaults.records[2].workload_key]


def test_a_search_session_measures_distinct_candidates(search: Heard, engine: EngineChild) -> None:
    info = engine.describe()

    assert len(search.records) == SEARCHED
    assert [record.trial for record in search.records] == list(range(5, 5 + SEARCHED))
    assert len({record.candidate_key for record in search.records}) == SEARCHED
    assert len({record.record_id for record in search.records}) == SEARCHED
    for record in search.records:
        assert (record.measurement is None) != (record.failure is None)
        assert record.phase == "search"
        assert json.loads(record.schedule)
        assert record.workload_key == search.session.task.workload_key
        assert (record.engine, record.tvm_version, record.target_key, record.device) == (
            info.engine, info.tvm_version, info.target.key, info.device,
        )  # fmt: skip
        assert (record.session_id, record.run_id) == (search.session.session_id, "run")
        assert abs(record.started_at - time.time()) < 3600
    assert any(record.measurement for record in search.records)
    kinds = [record.failure.kind for record in search.records if record.failure]
    assert search.result.failures == {kind: kinds.count(kind) for kind in kinds}
    assert search.result.seconds["total"] > 0


def test_candidates_are_timed_beside_the_default(defaults: Heard, search: Heard) -> None:
    assert all(record.measurement.slowdowns == () for record in defaults.records if record.measurement)
    measured = [record.measurement for record in search.records if record.measurement]
    assert measured
    for measurement in measured:
        assert len(measurement.slowdowns) == len(measurement.latencies_us)
        # Both are the default schedule on this machine, however busy it is.
        assert all(0.02 < slowdown < 50 for slowdown in measurement.slowdowns)


@pytest.mark.parametrize("index", [0, 1])
def test_a_session_keeps_to_its_slice_of_the_space(
    sessions: Sessions, tasks: Sequence[TuningTask], search: Heard, index: int
) -> None:
    session = sessions.make("search", tasks[:1], search.records, trials=4, slice_index=index, slice_count=2)
    keys = [record.candidate_key for record in sessions.run(session).records]

    assert keys
    assert {int(key[:8], 16) % 2 for key in keys} == {index}


def test_with_a_cold_cache_single_calls_are_timed(sessions: Sessions, tasks: Sequence[TuningTask]) -> None:
    cold = dataclasses.replace(QUICK, flush_cache=True, number=1, min_repeat_ms=0, repeat=15)
    records = sessions.run(sessions.make("default", tasks[:1], settings=cold)).records
    found = sessions.run(sessions.make("search", tasks[:1], records, trials=1, settings=cold)).records

    assert [record.phase for record in (*records, *found)] == ["default", "search"]
    assert records[0].measurement is not None
    assert records[0].measurement.settings == cold
    assert len(records[0].measurement.latencies_us) == 15


def test_no_trial_is_begun_after_stop_at(sessions: Sessions, search: Heard) -> None:
    session = sessions.make("search", search.session.tasks, search.records, trials=4, stop_at=time.time() - 1)
    assert sessions.run(session).records == []


def test_no_default_is_begun_after_stop_at(sessions: Sessions, tasks: Sequence[TuningTask]) -> None:
    assert sessions.run(sessions.make("default", tasks[-3:-2], stop_at=time.time() - 1)).records == []


def test_sigterm_ends_a_session_after_the_trial_in_work(engine: EngineChild, sessions: Sessions, search: Heard) -> None:
    session = sessions.make("search", search.session.tasks, search.records, trials=SEARCHED)
    heard = sessions.run(session, lambda record: engine.finish_trial())

    # The signal may come when the next trial has begun already.
    assert 1 <= len(heard.records) < SEARCHED
    assert engine.describe() is not None


def test_sigkill_loses_only_the_trial_in_flight(
    engine: EngineChild, sessions: Sessions, tasks: Sequence[TuningTask], defaults: Heard
) -> None:
    # Long timings, so that the kill meets one.
    slow = dataclasses.replace(QUICK, repeat=5, min_repeat_ms=400)
    session = sessions.make("default", defaults.session.tasks, settings=slow)
    heard: list[TuningRecord] = []

    def kill_in_the_next() -> None:
        while engine.in_flight is None:
            time.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)

    def on_record(record: TuningRecord) -> None:
        heard.append(record)
        threading.Thread(target=kill_in_the_next).start()

    with pytest.raises(EngineCrashed, match="SIGKILL"):
        engine.tune(session, on_record)
    assert len(heard) == 1
    assert list(read_journal(session.journal_path)) == heard
    assert engine.in_flight is not None
    missing = {task.workload_key for task in session.tasks} - {heard[0].workload_key}
    assert engine.in_flight["workload_key"] in missing
    assert engine.in_flight["phase"] == "default"
    assert {"candidate_key", "trial", "trace", "task_name"} <= set(engine.in_flight)

    # The same work goes on in a new process, and does only what is missing.
    engine.restart()
    rest = sessions.run(sessions.make("default", session.tasks, list(read_journal(session.journal_path))))
    assert {record.workload_key for record in rest.records} == missing
    assert len(rest.records) == len(missing)


def test_a_full_disk_is_a_store_error_and_the_next_session_is_none_the_worse(
    engine: EngineChild, sessions: Sessions, defaults: Heard
) -> None:
    # A device that is always full, in the place of the journal.
    with pytest.raises(StoreError, match="free some disk space"):
        sessions.run(sessions.make("default", defaults.session.tasks, journal_path="/dev/full"))

    again = sessions.run(sessions.make("default", defaults.session.tasks[-1:]))
    assert [record.workload_key for record in again.records] == [defaults.session.tasks[-1].workload_key]


def test_a_device_in_use_is_refused_with_the_name_of_its_user(
    engine: EngineChild, sessions: Sessions, defaults: Heard
) -> None:
    with EngineChild(engine.options) as second, pytest.raises(DeviceBusy) as caught:
        second.tune(sessions.make("default", defaults.session.tasks[-1:]), lambda record: None)
    assert "\n" not in str(caught.value)
    for part in (engine.options.device, str(engine.pid), "run"):
        assert part in str(caught.value)


def test_keys_are_the_same_in_another_process(
    engine: EngineChild, fused: FusedModule, tasks: Sequence[TuningTask], tmp_path: Path
) -> None:
    engine.restart()
    again = engine.extract(fused, str(tmp_path))

    assert [task.workload_key for task in again] == [task.workload_key for task in tasks]
    assert [task.subgraph for task in again] == [task.subgraph for task in tasks]
    assert [Path(t.workload_path).read_text() for t in again] == [Path(t.workload_path).read_text() for t in tasks]


def test_what_is_known_is_not_measured_again_in_another_process(
    engine: EngineChild, sessions: Sessions, defaults: Heard, search: Heard
) -> None:
    engine.restart()
    bad = dataclasses.replace(search.records[0], record_id="bad", candidate_key="bad", schedule='[["no such trace"]]')
    known = [*defaults.records, *search.records, bad]
    # The same seed as before: what comes now would be the same without the records.
    session = sessions.make("search", search.session.tasks, known, trials=SEARCHED, first_trial=11)
    second = sessions.run(session)

    assert len(second.records) == SEARCHED
    assert {r.candidate_key for r in second.records}.isdisjoint(r.candidate_key for r in known)
    assert "1" in second.result.note  # the record that does not replay is reported


def test_a_confirm_session_times_the_best_again(sessions: Sessions, defaults: Heard, search: Heard) -> None:
    known = [*defaults.records, *search.records]
    heard = sessions.run(sessions.make("confirm", search.session.tasks, known, trials=2))

    ranked = best_first([r for r in known if r.workload_key == search.session.task.workload_key])
    best = [record.candidate_key for record in ranked[:2]]
    # The default schedule is confirmed with them where it comes near.
    near = [r for r in ranked[2:] if not r.schedule and (r.latency_us or 0) < 2 * (ranked[0].latency_us or 0)]
    best += [record.candidate_key for record in near]
    assert [record.phase for record in heard.records] == ["confirm"] * len(best)
    assert {record.candidate_key for record in heard.records} == set(best)
    by_key = {record.candidate_key: record for record in ranked}
    for record in heard.records:
        assert record.schedule == by_key[record.candidate_key].schedule
        assert record.record_id != by_key[record.candidate_key].record_id
        assert record.measurement is not None, record.failure
        assert len(record.measurement.latencies_us) > QUICK.repeat  # several turns


def test_the_death_of_the_fork_server_is_a_crash_of_the_engine(
    engine: EngineChild, sessions: Sessions, defaults: Heard
) -> None:
    engine.restart()
    engine.describe()
    (server,) = psutil.Process(engine.pid).children()
    server.kill()
    try:
        with pytest.raises(EngineCrashed):
            sessions.run(sessions.make("default", defaults.session.tasks[-1:]))
    finally:
        engine.restart()


def test_an_untuned_build_says_what_no_record_covers_and_is_right(
    engine: EngineChild, fused: FusedModule, model: ModelFile, tmp_path: Path
) -> None:
    artifact = engine.build(BuildRequest(fused, {}, str(tmp_path / "artifact"), tuned=False))

    assert not artifact.tuned
    assert set(artifact.uncovered) == {subgraph.name for subgraph in fused.subgraphs}
    files = {path.name for path in Path(artifact.path).iterdir()}
    assert {"manifest.json", "loader.py"} < files
    assert artifact.size_bytes == sum(path.stat().st_size for path in Path(artifact.path).iterdir())
    for seed in (0, 1):
        assert_right(execute(engine, model, artifact.path, tmp_path, seed), model, seed)
    latency = engine.execute(ExecutionRequest(artifact.path, str(tmp_path / "inputs-0.npz"), 4))
    assert len(latency.samples_ms) == 4
    assert all(0 < sample_ms < 10_000 for sample_ms in latency.samples_ms)


def test_every_layout_computes_the_same(
    engine: EngineChild, imported: ImportedModule, model: ModelFile, tmp_path: Path
) -> None:
    for layout in engine.describe().layouts[1:]:
        fused = engine.fuse(dataclasses.replace(imported, layout=layout), "subgraph")
        artifact = engine.build(BuildRequest(fused, {}, str(tmp_path / layout), tuned=False))
        assert_right(execute(engine, model, artifact.path, tmp_path), model)


def test_a_tuned_build_names_its_records_and_runs_without_tunewright(
    engine: EngineChild, fused: FusedModule, model: ModelFile, search: Heard, tmp_path: Path
) -> None:
    best = best_first(search.records)
    garbage = dataclasses.replace(best[0], record_id="garbage", schedule='[["no such trace"]]')
    artifact = engine.build(
        BuildRequest(fused, {search.session.task.workload_key: (garbage, *best)}, str(tmp_path / "artifact"), True)
    )

    assert artifact.tuned
    chosen = [choice for choice in artifact.choices if choice.record_id]
    assert [choice.record_id for choice in chosen] == [best[0].record_id]
    assert chosen[0].workload_key == search.session.task.workload_key
    assert chosen[0].latency_us == best[0].latency_us
    assert "garbage" in chosen[0].note  # the one that does not replay is skipped and named
    assert len(artifact.uncovered) == len(fused.subgraphs) - 1
    manifest = json.loads((Path(artifact.path) / "manifest.json").read_text())
    assert manifest["model"]["digest"] == model.digest
    assert best[0].record_id in json.dumps(manifest["subgraphs"])
    assert_right(execute(engine, model, artifact.path, tmp_path), model)
    assert_right(load_alone(engine, artifact.path, tmp_path), model)


def load_alone(engine: EngineChild, artifact: str, folder: Path) -> Any:
    """The artifact's outputs on ``inputs-0.npz``, by a process that has the artifact and its engine's TVM only."""
    program = (
        "import sys, numpy; sys.path.insert(0, sys.argv[1])\n"
        "from loader import CompiledModel\n"
        "model = CompiledModel(sys.argv[1])\n"
        "numpy.savez(sys.argv[3], **model.run(dict(numpy.load(sys.argv[2]))))\n"
        "assert not {'tasks', 'mlflow'} & set(sys.modules)"
    )
    arguments = [artifact, str(folder / "inputs-0.npz"), str(folder / "alone.npz")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [engine.options.python, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "alone.npz") as stored:
        return {name: stored[name] for name in stored.files}


def test_a_subgraph_whose_records_are_all_useless_gets_the_default(
    engine: EngineChild, fused: FusedModule, search: Heard, tmp_path: Path
) -> None:
    garbage = dataclasses.replace(best_first(search.records)[0], record_id="garbage", schedule="not even JSON")
    key = search.session.task.workload_key
    artifact = engine.build(BuildRequest(fused, {key: (garbage,)}, str(tmp_path / "artifact"), True))

    choice = next(choice for choice in artifact.choices if choice.workload_key == key)
    assert choice.record_id == ""
    assert "garbage" in choice.note
    assert set(artifact.uncovered) == {subgraph.name for subgraph in fused.subgraphs}


def test_operator_granularity_builds_with_what_the_anchor_alone_taught(
    engine: EngineChild, sessions: Sessions, imported: ImportedModule, model: ModelFile, tmp_path: Path
) -> None:
    fused = engine.fuse(imported, "operator")
    task = engine.extract(fused, str(tmp_path / "workloads"))[0]
    found = sessions.run(sessions.make("search", [task], trials=2)).records
    assert [record.workload_key for record in found] == [task.workload_key] * 2
    best = {task.workload_key: best_first(found)}
    assert best[task.workload_key], [record.failure for record in found]
    artifact = engine.build(BuildRequest(fused, best, str(tmp_path / "artifact"), True))

    covered = {subgraph.name for subgraph in fused.subgraphs if subgraph.anchor_key == task.workload_key}
    choices = {choice.name: choice for choice in artifact.choices}
    for name in covered:  # each is built by the record, or says why it could not be
        assert choices[name].record_id or choices[name].note
    assert set(artifact.uncovered) >= {subgraph.name for subgraph in fused.subgraphs} - covered
    assert_right(execute(engine, model, artifact.path, tmp_path), model)


def test_operators_without_a_converter_are_one_error_with_all_of_them(engine: EngineChild, tmp_path: Path) -> None:
    # No engine translates these, onnxruntime runs them.
    sizes = [numpy_helper.from_array(np.array(size, np.int64), name) for size, name in ((2, "step"), (4, "length"))]
    graph = helper.make_graph(
        [
            helper.make_node("Det", ["x"], ["a"], name="first_determinant"),
            helper.make_node("Det", ["y"], ["b"], name="second_determinant"),
            helper.make_node("STFT", ["z", "step", "", "length"], ["c"], name="spectrum"),
            helper.make_node("Relu", ["y"], ["d"], name="harmless"),
        ],
        "unsupported",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 4]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 3]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 16, 1]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "abcd"],
        sizes,
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(ModelError) as caught:
        engine.import_model(import_model_file(fetch(str(path), tmp_path), {}, tmp_path))

    assert "\n" not in str(caught.value)
    for part in ("Det", "first_determinant", "second_determinant", "STFT", "spectrum"):
        assert part in str(caught.value)
    assert "harmless" not in str(caught.value)


@pytest.mark.parametrize("target", ["gpu3000", '{"kind": "nonsense"}', '{"kind": ', "{}"])
def test_an_unknown_target_is_one_line(target: str) -> None:
    with EngineChild(options_for("relax", target)) as child, pytest.raises(TargetError) as caught:
        child.describe()
    assert "\n" not in str(caught.value)
    assert "target" in str(caught.value)


def test_cuda_without_a_device_compiles_but_does_not_measure(model: ModelFile, tmp_path: Path) -> None:
    with EngineChild(options_for("relax", '{"kind": "cuda", "arch": "sm_80"}', "cuda:0")) as child:
        fused = child.fuse(child.import_model(model), "subgraph")
        tasks = child.extract(fused, str(tmp_path / "workloads"))
        sessions = Sessions(child, tmp_path)
        with pytest.raises(TargetError) as caught:
            sessions.run(sessions.make("default", tasks[:1]))
        assert "cuda:0" in str(caught.value)
        artifact = child.build(BuildRequest(fused, {}, str(tmp_path / "artifact"), tuned=False))
        assert artifact.size_bytes > 0
        with pytest.raises(TargetError):
            child.execute(ExecutionRequest(artifact.path, str(tmp_path / "none.npz"), 1))


def test_an_engine_that_is_closed_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    child = EngineChild(options_for("relax"))
    child.describe()
    child.close()
    assert list(tmp_path.glob("tunewright-engine-*")) == []
