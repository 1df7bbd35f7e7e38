"""AutoTVM's log format: what TVM wrote is read, what is written TVM reads."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.autotvm_log import log_lines, read_log, target_text, tvm_number
from tasks.errors import InputError
from tasks.records import EngineInfo, Failure, Measurement, MeasureSettings, Target, TuningRecord
from tests.relay import needs_relay, relay_python

INFO = EngineInfo(
    engine="relay",
    tvm_version="0.16.dev0-hhb-tvm-3.2.3",
    python_version="3.10.13",
    target=Target(
        "llvm", json.dumps({"kind": "llvm", "mcpu": "core-avx2", "num-cores": 2}), "llvm-core-avx2-1", threads=2
    ),
    device="cpu:0-1",
    versions={"hhb-tvm": "3.2.3", "numpy": "1.26.4"},
)
WORKLOAD = [
    "conv2d_NCHWc.x86", ["TENSOR", [1, 64, 56, 56], "float32"], ["TENSOR", [64, 64, 3, 3], "float32"],
    [1, 1], [1, 1, 1, 1], [1, 1], "NCHW", "NCHW", "float32",
]  # fmt: skip
CONFIG = {
    "index": 7, "code_hash": None,
    "entity": [
        ["tile_ic", "sp", [-1, 8]], ["tile_oc", "sp", [-1, 8]], ["tile_ow", "sp", [-1, 14]], ["unroll_kw", "ot", True],
    ],
}  # fmt: skip


def line(**changed: Any) -> str:
    plain = {
        "input": ["llvm -keys=cpu -mcpu=core-avx2", WORKLOAD[0], WORKLOAD[1:], {}], "config": CONFIG,
        "result": [[0.002, 0.004], 0, 1.5, 1.7e9], "version": 0.2, "tvm_version": "0.16.dev0", **changed,
    }  # fmt: skip
    return json.dumps(plain) + "\n"


def record(**changed: Any) -> TuningRecord:
    schedule = {"operator": "nn.conv2d", "implementation": WORKLOAD[0], "workload": WORKLOAD, "config": CONFIG}
    made = TuningRecord(
        record_id="r", run_id="run", session_id="s", engine="relay", tvm_version=INFO.tvm_version,
        target_key=INFO.target.key, workload_key="w", task_name="t", candidate_key="c", trial=1, phase="search",
        schedule=json.dumps(schedule), started_at=1.7e9, device="cpu:0", host="h",
        measurement=Measurement((2000.0, 4000.0), MeasureSettings(), 1.0, 0.5),
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "log.json"
    path.write_text("".join(lines))
    return path


def test_successful_lines_are_read_and_the_others_counted(tmp_path: Path) -> None:
    log = read_log(
        write(
            tmp_path,
            line(),
            line(result=[[1e9], 4, 1.0, 1.7e9]),
            line(input=["llvm -mcpu=skylake-avx512", WORKLOAD[0], WORKLOAD[1:], {}]),
            line(input=["cuda -arch=sm_80", WORKLOAD[0], WORKLOAD[1:], {}]),
            line(version=0.1),
            line(tvm_version="0.12.0"),
            "not a line\n",
        ),
        INFO,
    )

    (entry,) = log.entries
    assert entry.workload == (WORKLOAD[0], *WORKLOAD[1:])
    assert entry.latency_us == pytest.approx(3000.0)
    assert json.loads(entry.schedule)["config"] == CONFIG
    assert log.skipped == {
        "a failed measurement": 1, "another mcpu than core-avx2": 1, "a target of another kind than llvm": 1,
        "log version 0.1": 1, "written by another TVM version": 1, "no line of an AutoTVM log": 1,
    }  # fmt: skip


def test_a_log_of_another_tvm_version_is_one_line_that_names_both(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_log(write(tmp_path, line(tvm_version="0.12.0")), INFO)
    for part in ("0.12.0", "0.16.dev0", "TUNEWRIGHT_RELAY_PYTHON"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}\n", "a\tb\tc\n"])
def test_a_file_that_is_no_log(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no log of AutoTVM"):
        read_log(write(tmp_path, text), INFO)


def test_what_is_exported_is_read_again(tmp_path: Path) -> None:
    failed = record(record_id="f", measurement=None, failure=Failure("run_timeout", "late"))
    default = record(record_id="d", phase="default", schedule="")
    lines = list(log_lines([record(), failed, default], INFO))

    assert len(lines) == 2
    assert json.loads(lines[1])["result"][1] == 7  # AutoTVM's RUN_TIMEOUT
    (entry,) = read_log(write(tmp_path, *lines), INFO).entries
    assert entry.latency_us == pytest.approx(3000.0)
    assert entry.config == CONFIG


READS = """
import json, sys
from tvm import autotvm
for inp, res in autotvm.record.load_from_file(sys.argv[1]):
    entity = inp.config.to_json_dict()["entity"]
    print(json.dumps([inp.task.name, str(inp.target.kind), entity, res.error_no, list(res.costs)]))
"""


@needs_relay
def test_tvm_reads_what_is_exported(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO)
    path = write(tmp_path, *log_lines([record()], info))
    command = [str(relay_python()), "-c", READS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-2000:]
    name, kind, entity, error, costs = json.loads(done.stdout.splitlines()[-1])
    assert (name, kind, error, costs) == ("conv2d_NCHWc.x86", "llvm", 0, [0.002, 0.004])
    assert entity == CONFIG["entity"]


@needs_relay
def test_import_puts_configs_where_searches_find_them(tmp_path: Path) -> None:
    # By this engine's own version, which need not be the one above.
    version_of = [str(relay_python()), "-c", "import tvm; print(tvm.__version__)"]
    number = subprocess.run(version_of, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()[-1]
    log = write(tmp_path, line(tvm_version=number, input=["llvm", WORKLOAD[0], WORKLOAD[1:], {}]))
    command = [sys.executable, "-m", "flows.cli", "records", "import", str(log)]
    environment = {**os.environ, "TUNEWRIGHT_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 configs of 1 workloads" in done.stdout
    (file,) = (tmp_path / "home" / "samples" / "relay").rglob("*.npz")
    with np.load(file) as stored:
        assert json.loads(str(stored["schedules"][0]))["config"] == CONFIG
        assert stored["schedule_latencies_us"].tolist() == [pytest.approx(3000.0)]
    assert list((tmp_path / "home" / "store").rglob(file.name)), "other machines get it from the object store"


def test_versions_and_targets_as_a_log_names_them() -> None:
    assert tvm_number(INFO) == "0.16.dev0"
    assert target_text(INFO) == "llvm -mcpu=core-avx2 -num-cores=2"
