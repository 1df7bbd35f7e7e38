"""A model in which there is nothing to tune goes the whole way all the same."""

from __future__ import annotations

from pathlib import Path

import onnx
from mlflow import MlflowClient
from onnx import TensorProto, helper

from tests.flows.command import Command, last_json


def test_a_model_without_a_kernel_is_published_and_says_so(tmp_path: Path, prefect_url: str, mlflow_url: str) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "identity",
        [value("x", TensorProto.FLOAT, [1, 64])], [value("y", TensorProto.FLOAT, [1, 64])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "identity.onnx")
    command = Command(tmp_path / "home", {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url})
    done = command.run("tune", str(tmp_path / "identity.onnx"), "--trials", "8", timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    line = last_json(done.stdout)
    assert (line["tasks"], line["trials"], line["max_abs_error"]) == (0, 0, 0.0)
    run = MlflowClient(mlflow_url).get_run(line["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert "No subgraph of this model could be tuned and measured" in run.data.tags["mlflow.note.content"]
