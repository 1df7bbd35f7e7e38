"""A wrong schedule among the records: the whole path finds it, replaces it, and never uses it again."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from mlflow import MlflowClient

from infra.object_store import open_store
from infra.record_store import RecordStore
from tasks.engines.interface import best_first
from tasks.engines.measuring.journal import Journal
from tasks.records import Measurement, MeasureSettings, TuningRecord
from tests.flows.command import Command, last_json
from tests.models import conv_model

#: A schedule by TVM's own primitives that computes something else: the result of a block is kept in 8 bits.
WRONG = '[[["GetSBlock",[],["{block}","main"],["b0"]],["UnsafeSetDType",["b0"],[0,"int8"],[]]],[]]'


@pytest.fixture
def command(tmp_path: Path, prefect_url: str, mlflow_url: str) -> Command:
    onnx.save(conv_model(seed=9), tmp_path / "convs.onnx")
    return Command(tmp_path / "home", {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url})


def _store(command: Command) -> RecordStore:
    one = command.stored()[0]
    return RecordStore(open_store(str(command.home / "store")), one.engine, one.tvm_version, one.target_key)


def _conv_block(store: RecordStore, workload_key: str) -> str:
    """The name of the convolution's block, which tells its layout."""
    found = re.search(r'"(conv2d(?:_n[a-z]+)?)"', store.get_workload(workload_key).decode())
    assert found is not None
    return found[1]


def _put_wrong(command: Command, good: TuningRecord, block: str, latency_us: float) -> str:
    """Store what a night that checked no outputs would have left: wrong in ``block``, confirmed as fast."""
    trace = WRONG.format(block=block)
    unchecked = Measurement((latency_us,) * 3, MeasureSettings(check_output=False), 0.1, 0.1)
    key, session = f"wrong-{good.workload_key}-{latency_us:g}", f"unchecked-{good.workload_key}-{latency_us:g}"
    path = command.home / f"{session}.jsonl"
    with Journal(path) as journal:
        for phase in ("search", "confirm"):
            journal.append(
                replace(
                    good, record_id=f"{key}-{phase}", run_id="unchecked", session_id=session, candidate_key=key,
                    phase=phase, trial=900, schedule=trace, started_at=time.time(), measurement=unchecked,
                )
            )  # fmt: skip
    assert _store(command).upload_session(path) == 2
    return key


def _tune(command: Command, out: Path, *more: str) -> tuple[dict[str, object], str, set[str]]:
    """The last line, all output, and the records in the artifact."""
    done = command.run(
        "tune", str(command.home.parent / "convs.onnx"), "--name", "mended", "--out", str(out), *more, timeout_s=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = json.loads((out / "manifest.json").read_text())
    return last_json(done.stdout), done.stdout, {choice["record_id"] for choice in manifest["subgraphs"]}


def test_wrong_records_are_found_quarantined_and_replaced(command: Command, mlflow_url: str, tmp_path: Path) -> None:
    _tune(command, tmp_path / "first", "--trials", "8")
    store = _store(command)
    by_workload = store.load()
    good = {key: best_first(records)[0] for key, records in by_workload.items()}
    one, other = sorted(key for key, record in good.items() if "conv2d" in record.task_name)
    best_us = {key: record.latency_us or 0.0 for key, record in good.items()}
    # Of one subgraph the best two are wrong, of the other the best: three to be found, in two rounds.
    wrong = {
        _put_wrong(command, good[one], _conv_block(store, one), best_us[one] / 4),
        _put_wrong(command, good[one], "T_add", best_us[one] / 2),
        _put_wrong(command, good[other], _conv_block(store, other), best_us[other] / 2),
    }

    line, output, used = _tune(command, tmp_path / "second", "--trials", "0")
    # Right: float32 of two layers differs by some 1e-6 of values near one, 8 bits by whole ones.
    assert float(str(line["max_abs_error"])) < 1e-4
    assert not {record for record in used if record.startswith("wrong-")}
    reasons = store.quarantine_reasons()
    assert reasons.keys() == {f"{key}-{phase}" for key in wrong for phase in ("search", "confirm")}
    assert all("differs by up to" in reason for reason in reasons.values())
    assert output.count("is quarantined") >= 3
    note = MlflowClient(mlflow_url).get_run(str(line["mlflow_run_id"])).data.tags["mlflow.note.content"]
    assert "was mended" in note
    for record in (good[one], good[other]):
        assert f"{record.task_name}: record wrong-{record.workload_key}" in note

    line, output, used = _tune(command, tmp_path / "third", "--trials", "4")
    assert "is quarantined" not in output
    assert not {record for record in used if record.startswith("wrong-")}
    assert store.quarantine_reasons() == reasons
    loaded = [record for records in RecordStore.load(_store(command)).values() for record in records]
    of_wrong = [record for record in loaded if record.candidate_key in wrong]
    # What is left of them tells a search that they were tried, and what came of it.
    assert {record.candidate_key for record in of_wrong} == wrong
    assert all(record.failure and record.failure.kind == "wrong_output" for record in of_wrong)
