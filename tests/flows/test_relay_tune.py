"""``--engine relay`` as a user runs it, over real services: tuned, verified, published, served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tasks.import_model import OnnxRuntimeModel, import_model_file, seeded_inputs
from tasks.model_source import fetch
from tests.flows.command import Command, last_json
from tests.models import conv_model
from tests.relay import needs_relay, relay_python

pytestmark = needs_relay

TRIALS = 10


@pytest.fixture(scope="module")
def tuned(
    tmp_path_factory: pytest.TempPathFactory, prefect_url: str, mlflow_url: str
) -> tuple[Command, dict[str, Any], Path]:
    """One run of two convs: the command, its JSON line, the model."""
    folder = tmp_path_factory.mktemp("relay")
    path = folder / "convs.onnx"
    onnx.save(conv_model(), path)
    command = Command(folder / "home", {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url})
    done = command.run(
        "tune", str(path), "--engine", "relay", "--target", "llvm -mtriple=x86_64-linux-gnu -mcpu=core-avx2",
        "--trials", str(TRIALS), "--name", "relay-convs", timeout_s=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return command, last_json(done.stdout), path


def test_every_measurement_is_in_the_store(tuned: tuple[Command, dict[str, Any], Path]) -> None:
    command, line, _ = tuned
    records = command.stored()

    assert line["trials"] == TRIALS
    assert sum(record.phase == "search" for record in records) == TRIALS
    assert {record.phase for record in records} == {"default", "search", "confirm"}
    assert {record.engine for record in records} == {"relay"}
    assert len({record.record_id for record in records}) == len(records)
    searched = [record for record in records if record.phase == "search"]
    assert all(json.loads(record.schedule)["implementation"] == record.implementation for record in searched)
    assert line["max_abs_error"] < 1e-4


SERVES = """
import sys, mlflow, numpy
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/relay-convs@champion")
inputs = dict(numpy.load(sys.argv[2]))
numpy.savez(sys.argv[3], **model.predict(inputs))
"""


def test_the_published_model_runs_by_the_engines_interpreter(
    tuned: tuple[Command, dict[str, Any], Path], mlflow_url: str, tmp_path: Path
) -> None:
    command, _, path = tuned
    model = import_model_file(fetch(str(path), tmp_path), {}, tmp_path)
    inputs = seeded_inputs(model, 3)
    np.savez(tmp_path / "in.npz", **inputs)
    arguments = [mlflow_url, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    environment = {**command.environment(), "TUNEWRIGHT_RELAY_PYTHON": str(relay_python())}
    done = subprocess.run(
        [sys.executable, "-c", SERVES, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr[-3000:]
    expected = OnnxRuntimeModel(model, 1).run(inputs)
    with np.load(tmp_path / "out.npz") as stored:
        for name, want in expected.items():
            np.testing.assert_allclose(stored[name], want, atol=1e-5, rtol=1e-4)


def test_exported_trials_are_a_log_that_tvm_reads(tuned: tuple[Command, dict[str, Any], Path], tmp_path: Path) -> None:
    command, _, _ = tuned
    log = tmp_path / "log.json"
    done = command.run(
        "records", "export", str(log), "--target", "llvm -mtriple=x86_64-linux-gnu -mcpu=core-avx2", timeout_s=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    program = (
        "import sys\nfrom tvm import autotvm\n"
        "print(sum(r.error_no == 0 for _, r in autotvm.record.load_from_file(sys.argv[1])))"
    )
    read = subprocess.run(
        [str(relay_python()), "-c", program, str(log)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    measured = [r for r in command.stored() if r.phase != "default" and r.schedule and r.measurement]
    assert read.returncode == 0, read.stderr[-2000:]
    assert int(read.stdout.split()[-1]) == len(measured)
