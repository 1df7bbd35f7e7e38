"""Bad input: one line that says what and what to do, exit status 2, no traceback, nothing published."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests.flows.command import Command
from tests.models import conv_model, packaged_model
from tests.services import free_port


def _refused(command: Command, *arguments: str) -> str:
    done = command.run(*arguments, timeout_s=120)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tunewright: ")]
    assert len(lines) == 1, done.stderr
    assert not list(command.home.glob("store/artifacts/*"))
    return lines[0]


@pytest.fixture
def command(tmp_path: Path, prefect_url: str, mlflow_url: str) -> Command:
    return Command(tmp_path / "home", {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": mlflow_url})


def test_not_onnx(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("this is not a model")
    assert "model.onnx" in _refused(command, "tune", str(path))


def test_truncated(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    data = packaged_model("classifier").read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "model.onnx" in _refused(command, "tune", str(path), "--shape", "x=1,3,48,192")


def test_a_missing_shape_names_input_dimension_and_flag(command: Command) -> None:
    line = _refused(command, "tune", str(packaged_model("classifier")))
    assert "--shape x=" in line


def test_a_shape_that_cannot_be_read(command: Command) -> None:
    assert "--shape x=1,a" in _refused(command, "tune", str(packaged_model("classifier")), "--shape", "x=1,a")


def test_an_opset_too_new(command: Command, tmp_path: Path) -> None:
    model = conv_model()
    model.opset_import[0].version = 999
    path = tmp_path / "future.onnx"
    path.write_bytes(model.SerializeToString())
    assert "999" in _refused(command, "tune", str(path))


def test_unknown_target(command: Command, tmp_path: Path) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    line = _refused(command, "tune", str(tmp_path / "convs.onnx"), "--target", "abacus")
    assert "abacus" in line
    line = _refused(command, "inspect", str(tmp_path / "convs.onnx"), "--target", '{"kind": "abacus"}')
    assert "abacus" in line


def test_operators_without_converter_are_listed_all_at_once(command: Command, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("LpNormalization", ["x"], ["a"], name="first"),
        helper.make_node("Det", ["a"], ["b"], name="second"),
        helper.make_node("LpNormalization", ["a"], ["c"], name="third"),
    ]
    graph = helper.make_graph(
        nodes, "unknown", [value("x", onnx.TensorProto.FLOAT, [2, 4, 4])],
        [value("b", onnx.TensorProto.FLOAT, [2]), value("c", onnx.TensorProto.FLOAT, [2, 4, 4])],
    )  # fmt: skip
    path = tmp_path / "unknown.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    line = _refused(command, "inspect", str(path))
    for name in ("LpNormalization", "Det", "first", "second", "third"):
        assert name in line


def test_an_unwritable_store(tmp_path: Path, prefect_url: str) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    settings = {"PREFECT_API_URL": prefect_url, "TUNEWRIGHT_STORE": str(blocked / "store")}
    assert "store" in _refused(Command(tmp_path / "home", settings), "tune", str(tmp_path / "convs.onnx"))


def test_an_unreachable_mlflow(tmp_path: Path, prefect_url: str) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    url = f"http://127.0.0.1:{free_port()}"
    settings = {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": url}
    line = _refused(Command(tmp_path / "home", settings), "tune", str(tmp_path / "convs.onnx"))
    assert url in line


def test_a_name_that_no_registry_takes(command: Command, tmp_path: Path) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    assert "--name" in _refused(command, "tune", str(tmp_path / "convs.onnx"), "--name", "a/b")


def test_debug_shows_the_traceback(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("this is not a model")
    done = command.run("tune", str(path), "--debug", timeout_s=120)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_doctor_is_content_here_and_names_what_is_broken(tmp_path: Path, prefect_url: str) -> None:
    healthy = Command(tmp_path / "home", {"PREFECT_API_URL": prefect_url}).run("doctor", timeout_s=120)
    assert healthy.returncode == 0, healthy.stdout
    for part in ("apache-tvm-ffi", "C compiler", "engine relax", "object store", "MLflow", "Prefect"):
        assert part in healthy.stdout
    broken = Command(
        tmp_path / "home",
        {
            "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api",
            "TUNEWRIGHT_RELAX_PYTHON": "/nonexistent/python",
        },
    ).run("doctor", timeout_s=120)
    assert broken.returncode == 2
    assert broken.stdout.count("FAIL") == 2
    assert "TUNEWRIGHT_RELAX_PYTHON" in broken.stdout


def test_inspect_prints_subgraphs_and_tunes_nothing(command: Command, tmp_path: Path) -> None:
    onnx.save(conv_model(), tmp_path / "convs.onnx")
    done = command.run("inspect", str(tmp_path / "convs.onnx"), timeout_s=120)
    assert done.returncode == 0, done.stderr
    # Two convs, and on a CPU, where they run channels last, a transpose at either border.
    assert "4 fused subgraphs in 4 calls" in done.stdout
    assert "conv2d+add+relu" in done.stdout
    assert not (command.home / "store" / "records").exists()
