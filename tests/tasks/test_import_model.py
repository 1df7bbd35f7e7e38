"""The import step's parent half, on real models and on each kind of bad one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.errors import ModelError, ShapeError
from tasks.import_model import OnnxRuntimeModel, import_model_file, reference_outputs, seeded_inputs
from tasks.model_source import fetch
from tasks.records import ModelFile, TensorSpec
from tests.models import MODEL_NAMES, matmul_model, packaged_model, packaged_shapes, save_with_external_data

OPSET_TOO_NEW = 999


def import_file(path: Path, work_dir: Path, **shapes: tuple[int, ...]) -> ModelFile:
    return import_model_file(fetch(str(path), work_dir), shapes, work_dir)


def import_packaged(name: str, work_dir: Path) -> ModelFile:
    return import_file(packaged_model(name), work_dir, **packaged_shapes(name))


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def one_op_model(
    op: str, dtype: int = TensorProto.FLOAT, out_dtype: int | None = None, **attributes: object
) -> onnx.ModelProto:
    """y = op(x) for x (1, 8)."""
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], **attributes)],
        "one",
        [helper.make_tensor_value_info("x", dtype, [1, 8])],
        [helper.make_tensor_value_info("y", dtype if out_dtype is None else out_dtype, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def run_file(path: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return list(onnxruntime.InferenceSession(path, options).run(None, inputs))


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_normalised_model_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    model = import_packaged(name, tmp_path)
    inputs = seeded_inputs(model, seed=0)
    expected = reference_outputs(model, inputs, threads=1)

    assert {k: (v.shape, v.dtype.name) for k, v in expected.items()} == {
        spec.name: (spec.shape, spec.dtype) for spec in model.outputs
    }
    for spec, actual in zip(model.outputs, run_file(model.path, inputs), strict=True):
        # Both are onnxruntime in float32; folding BatchNormalization into a conv rounds differently.
        np.testing.assert_allclose(actual, expected[spec.name], rtol=1e-4, atol=1e-5)
    graph = onnx.load(model.path).graph
    assert [value.name for value in graph.input] == [spec.name for spec in model.inputs]
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}


def test_classifier_becomes_a_smaller_static_model(tmp_path: Path) -> None:
    model = import_packaged("classifier", tmp_path)

    assert model.inputs == (TensorSpec("x", (1, 3, 48, 192), "float32"),)
    assert model.outputs == (TensorSpec("save_infer_model/scale_0.tmp_1", (1, 2), "float32"),)
    assert model.opset == 11
    assert model.name == "ch_ppocr_mobile_v2-0_cls_infer"  # MLflow refuses dots in names
    before, after = (len(onnx.load(path).graph.node) for path in (packaged_model("classifier"), model.path))
    assert after < before / 2  # 566 to 179


def test_tvm_translates_the_normalised_models(tmp_path: Path) -> None:
    # In a process of its own: this one stands for the parent, which never imports tvm.
    paths = [import_packaged(name, tmp_path).path for name in ("classifier", "squeezenet")]
    program = (
        "import json, sys, onnx\n"
        "from tvm.relax.frontend.onnx import from_onnx\n"
        "print(json.dumps([len(from_onnx(onnx.load(p))['main'].params) for p in sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 1]
    assert "tvm" not in sys.modules


def test_second_import_reuses_the_normalised_file(tmp_path: Path) -> None:
    first = import_packaged("classifier", tmp_path)
    written_at = Path(first.path).stat().st_mtime_ns

    assert import_packaged("classifier", tmp_path) == first
    assert Path(first.path).stat().st_mtime_ns == written_at
    assert [file.name for file in tmp_path.iterdir()] == [f"{first.digest[:16]}.onnx"]


def test_digest_depends_on_shapes_weights_and_nothing_else(tmp_path: Path) -> None:
    path = saved(matmul_model(), tmp_path / "a.onnx")
    copy = saved(matmul_model(), tmp_path / "b.onnx")
    external = save_with_external_data(matmul_model(), tmp_path / "c" / "m.onnx")
    digest = import_file(path, tmp_path, x=(2, 64)).digest

    assert import_file(copy, tmp_path / "elsewhere", x=(2, 64)).digest == digest
    assert import_file(path, tmp_path, x=(3, 64)).digest != digest
    before = import_file(external, tmp_path, x=(2, 64)).digest
    data = external.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[::-1])
    assert import_file(external, tmp_path, x=(2, 64)).digest != before


def test_external_data_is_read_and_written(tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(), tmp_path / "m" / "model.onnx", "weights/w.bin")
    model = import_file(path.parent, tmp_path / "work", x=(2, 64))
    inputs = seeded_inputs(model, seed=1)

    assert model.name == "m"
    assert Path(model.path).with_suffix(".data").stat().st_size >= 64 * 8 * 4
    weight = numpy_helper.to_array(matmul_model().graph.initializer[0])
    # 64 products of standard normals in float32 round to about 1e-6.
    np.testing.assert_allclose(run_file(model.path, inputs)[0], inputs["x"] @ weight, atol=1e-5)
    np.testing.assert_allclose(reference_outputs(model, inputs, 1)["y"], inputs["x"] @ weight, atol=1e-5)


def test_weights_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    model = matmul_model()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 8]))
    path = saved(model, tmp_path / "m.onnx")

    assert [spec.name for spec in import_file(path, tmp_path, x=(1, 64)).inputs] == ["x"]
    with pytest.raises(ShapeError, match="no input w"):
        import_file(path, tmp_path, x=(1, 64), w=(64, 8))


def test_an_input_that_nothing_uses_stays_an_input(tmp_path: Path) -> None:
    model = matmul_model(rows=1)
    model.graph.input.append(helper.make_tensor_value_info("spare", TensorProto.INT64, [2]))
    imported = import_file(saved(model, tmp_path / "m.onnx"), tmp_path)

    assert [spec.name for spec in imported.inputs] == ["x", "spare"]
    assert [value.name for value in onnx.load(imported.path).graph.input] == ["x", "spare"]
    assert reference_outputs(imported, seeded_inputs(imported, 0), 1)["y"].shape == (1, 8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"this is a text, not a model\n", "not an ONNX model"),
        (b"\x08\x07", "holds no graph"),
    ],
)
def test_a_file_that_is_no_model(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        import_file(path, tmp_path)
    assert_one_line(caught.value, str(path))


def test_truncated_models_at_many_lengths(tmp_path: Path) -> None:
    whole = packaged_model("classifier").read_bytes()
    path = tmp_path / "m.onnx"
    for length in (1, 10, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            import_file(path, tmp_path, x=(1, 3, 48, 192))
        assert_one_line(caught.value, str(path), "again")


def test_opset_too_new_names_both(tmp_path: Path) -> None:
    path = saved(matmul_model(opset=OPSET_TOO_NEW, rows=1), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=rf"opset {OPSET_TOO_NEW} of ai\.onnx.*supports up to \d+") as caught:
        import_file(path, tmp_path / "work")
    assert_one_line(caught.value, "onnxruntime")
    assert not list((tmp_path / "work").iterdir())


def test_operator_unknown_to_onnxruntime_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="FancyRelu") as caught:
        import_file(saved(one_op_model("FancyRelu"), tmp_path / "m.onnx"), tmp_path)
    assert_one_line(caught.value, "onnxruntime", "m.onnx")
    assert "onnxruntime_src" not in str(caught.value)


def test_missing_shape_names_input_dimension_and_flag(tmp_path: Path) -> None:
    with pytest.raises(ShapeError) as caught:
        import_file(packaged_model("recogniser"), tmp_path)
    assert_one_line(caught.value, "input x", "dimension 3 (p2o.DynamicDimension.1)", "--shape x=?,3,?,? with a number")


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"x": (1, 3, 48)}, "has 4 dimensions"),
        ({"x": (1, 4, 48, 192)}, "does not fit"),
        ({"x": (1, 3, 0, 192)}, "positive"),
        ({"x": (1, 3, -1, 192)}, "positive"),
        ({"image": (1, 3, 48, 192)}, r"no input image; its inputs are x \[\?,3,\?,\?\]"),
    ],
)
def test_wrong_shapes(shapes: dict[str, tuple[int, ...]], says: str, tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=says) as caught:
        import_file(packaged_model("classifier"), tmp_path, **shapes)
    assert_one_line(caught.value)


def test_a_static_shape_may_be_given_if_it_is_the_same(tmp_path: Path) -> None:
    path = saved(matmul_model(rows=2), tmp_path / "m.onnx")
    assert import_file(path, tmp_path, x=(2, 64)) == import_file(path, tmp_path)
    with pytest.raises(ShapeError, match="does not fit"):
        import_file(path, tmp_path, x=(3, 64))


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret.bin", "a/../../secret.bin", "..\\secret.bin"])
def test_external_data_outside_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(64 * 8 * 4))
    path = save_with_external_data(matmul_model(rows=1), tmp_path / "m" / "model.onnx")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())

    with pytest.raises(ModelError, match="refused external data") as caught:
        import_file(path, tmp_path / "work")
    assert_one_line(caught.value, "tensor w")


def test_external_data_behind_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(rows=1), tmp_path / "m" / "model.onnx")
    data = path.parent / "weights.bin"
    data.rename(tmp_path / "secret.bin")
    data.symlink_to(tmp_path / "secret.bin")

    with pytest.raises(ModelError, match=r"refused external data 'weights\.bin'") as caught:
        import_file(path, tmp_path / "work")
    assert_one_line(caught.value, "secret.bin")


def test_external_data_of_a_constant_in_a_subgraph_is_checked_too(tmp_path: Path) -> None:
    tensor = helper.make_tensor("t", TensorProto.FLOAT, [1, 8], [0.0] * 8)
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    constant = helper.make_node("Constant", [], ["c"], value=tensor)
    branch = helper.make_graph(
        [constant], "branch", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 8])]
    )
    model = one_op_model("If", TensorProto.BOOL, TensorProto.FLOAT, then_branch=branch, else_branch=branch)
    with pytest.raises(ModelError, match="refused external data"):
        import_file(saved(model, tmp_path / "m.onnx"), tmp_path)


@pytest.mark.parametrize(("kept_bytes", "says"), [(None, "is missing"), (100, "too short: tensor w ends at byte")])
def test_external_data_missing_or_too_short(kept_bytes: int | None, says: str, tmp_path: Path) -> None:
    path = save_with_external_data(matmul_model(rows=1), tmp_path / "m" / "model.onnx")
    data = path.parent / "weights.bin"
    kept = data.read_bytes()[:kept_bytes]
    data.unlink()
    if kept_bytes is not None:
        data.write_bytes(kept)

    with pytest.raises(ModelError, match=says) as caught:
        import_file(path, tmp_path / "work")
    assert_one_line(caught.value, "weights.bin")


def test_output_whose_shape_depends_on_the_data(tmp_path: Path) -> None:
    model = one_op_model("NonZero", out_dtype=TensorProto.INT64)
    with pytest.raises(ModelError, match=r"output y .* depends on the data") as caught:
        import_file(saved(model, tmp_path / "m.onnx"), tmp_path / "work")
    assert_one_line(caught.value)
    assert not list((tmp_path / "work").iterdir())


def test_output_shape_that_only_a_run_shows(tmp_path: Path) -> None:
    # The target of Reshape is computed from x, but always (8, 1): no inference can know.
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("ReduceMin", ["i"], ["m"], keepdims=0),
        helper.make_node("Mul", ["m", "zero"], ["z"]),
        helper.make_node("Add", ["eight", "z"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["c"]),
    ]
    graph = helper.make_graph(
        nodes,
        "run",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([8, 1]), "eight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    imported = import_file(saved(model, tmp_path / "m.onnx"), tmp_path)
    assert imported.outputs == (TensorSpec("c", (8, 1), "float32"),)


def test_string_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="x has dtype"):
        import_file(saved(one_op_model("Identity", TensorProto.STRING), tmp_path / "m.onnx"), tmp_path)


def test_seeded_inputs_are_the_same_for_the_same_seed_only() -> None:
    specs = (
        TensorSpec("a", (4, 64), "float32"),
        TensorSpec("b", (4, 64), "float32"),
        TensorSpec("ids", (64,), "int64"),
        TensorSpec("image", (64,), "uint8"),
        TensorSpec("mask", (64,), "bool"),
    )
    model = ModelFile("s", "n", "d", "p", "o", specs, (), 13)
    first, again, other = (seeded_inputs(model, seed) for seed in (7, 7, 8))

    for spec in specs:
        assert first[spec.name].shape == spec.shape
        assert first[spec.name].dtype.name == spec.dtype
        assert np.array_equal(first[spec.name], again[spec.name])
        assert not np.array_equal(first[spec.name], other[spec.name])
    assert not np.array_equal(first["a"], first["b"])
    assert set(np.unique(first["ids"])) == {0, 1}


def test_onnxruntime_model_times_runs_and_names_a_bad_input(tmp_path: Path) -> None:
    imported = import_packaged("classifier", tmp_path)
    model = OnnxRuntimeModel(imported, threads=1)

    samples_ms = model.time_ms(seeded_inputs(imported, 0), repeats=3)
    assert len(samples_ms) == 3
    assert all(0 < sample < 60_000 for sample in samples_ms)
    with pytest.raises(ModelError, match=r"cannot run .*x \(2, 5\)") as caught:
        model.run({"x": np.zeros((2, 5), np.float32)})
    assert_one_line(caught.value)
