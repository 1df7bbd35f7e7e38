"""Quantised convs and matmuls become integer kernels: what is left, that it is exact, how it is scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.fresh import in_fresh
from tests.tasks.engines.relax.passes.quantised import exact

#: dtype and zero point of the activations.
MODELS = {"uint8": 119, "int8": -7}


def run_all(folder: str) -> dict[str, Any]:
    """By dtype: operators before and after, outputs before, after, with tiles, and without integer instructions."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tvm import relax

    from tasks.engines.relax import frontend, targets
    from tasks.engines.relax.passes.integer_kernels import integer_kernels
    from tests.tasks.engines.relax.passes.scenarios import _operators, _run

    target = targets.to_tvm(targets.resolve("cpu", 1))
    old = targets.to_tvm(targets.resolve('{"kind": "llvm", "mcpu": "x86-64"}', 1))
    found = {}
    for name in MODELS:
        path = Path(folder) / f"{name}.onnx"
        data = np.load(Path(folder) / "x.npy")
        before = relax.transform.CanonicalizeBindings()(frontend.translate(str(path))[0])
        after, changes = integer_kernels(before)
        found[name] = {
            "changes": changes,
            "before": _operators(before),
            "after": _operators(after),
            "again": integer_kernels(after)[1],
            "dtypes": _dtypes(after),
            "outputs": {
                "before": _run(before, target, data).tolist(),
                "after": _run(after, target, data).tolist(),
                "fused": _run(frontend.fuse(before, target).lowered, target, data).tolist(),
                "old": _run(frontend.fuse(before, old).lowered, old, data).tolist(),
            },
            "kernels": _kernels(frontend.fuse(before, target), target) if name == "uint8" else [],
        }
    return found


def _dtypes(mod: Any) -> list[list[str]]:
    """Of each conv and matmul the dtypes of operands and result."""
    from tasks.engines.relax.passes.rewriting import operator_of

    calls = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    heavy = [call for call in calls if operator_of(call) in ("nn.conv2d", "matmul")]
    return [[*(str(argument.ty.dtype) for argument in call.args), str(call.ty.dtype)] for call in heavy]


def _kernels(fused: Any, target: Any) -> list[dict[str, Any]]:
    """Of each kernel with pairs: its operators, and whether each sketch has the instruction and is exact."""
    from tasks.engines.relax import int16_dots, search, spaces, subgraphs

    found, random = [], np.random.default_rng(0)
    inventory = subgraphs.take_inventory(fused)
    for subgraph in inventory.subgraphs:
        workload = inventory.workloads[subgraph.workload_key].mod
        if int16_dots.PAIRED not in workload.script():
            continue
        arrays = [
            np.full(shape, 2.0**-10, dtype) if dtype == "float32" else random.integers(-99, 99, shape).astype(dtype)
            for shape, dtype in subgraphs.arguments(workload)
        ]
        sketches = spaces.register_tiles(workload, target)
        replayed = [search.replay(workload, search.trace_text(sketch.trace)).mod for sketch in sketches]
        want, _ = _built(workload, target, arrays)
        got = [_built(mod, target, arrays) for mod in replayed]
        found.append(
            {
                "operators": list(subgraph.operators),
                "output": subgraph.output_dtype,
                "instruction": ["pmadd.wd" in source for _, source in got],
                "exact": [bool(np.array_equal(want, one)) and len(np.unique(want)) > 9 for one, _ in got],
            }
        )
    return found


def _built(mod: Any, target: Any, arrays: list[Any]) -> tuple[Any, str]:
    """What a kernel computes, and its LLVM code."""
    import tvm

    tensors = [tvm.runtime.tensor(array) for array in arrays]
    library = tvm.tirx.build(mod, target=target)
    library["main"](*tensors)
    return tensors[-1].numpy(), str(library.inspect_source("ll"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and x.npy to run them on."""
    path = tmp_path_factory.mktemp("quantised")
    for dtype, zero in MODELS.items():
        (path / f"{dtype}.onnx").write_bytes(exact(dtype, zero).SerializeToString())
    np.save(path / "x.npy", np.random.default_rng(1).uniform(-2, 2, (1, 3, 16, 16)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = in_fresh(run_all, str(folder), timeout_s=600)
    return found


@pytest.mark.parametrize("dtype", MODELS)
def test_convs_and_matmuls_are_integer_kernels(outcomes: dict[str, Any], dtype: str) -> None:
    found = outcomes[dtype]

    assert found["before"]["quantize"] == 10
    assert found["before"]["dequantize"] == 10 + 9
    assert not {"quantize", "dequantize"} & set(found["after"])
    assert found["dtypes"] == [["int16", "int16", "int32"]] * 5
    assert found["again"] == 0


@pytest.mark.parametrize("dtype", MODELS)
@pytest.mark.parametrize("build", ["after", "fused", "old"])
def test_integers_are_exact(outcomes: dict[str, Any], dtype: str, build: str) -> None:
    outputs = {name: np.array(values) for name, values in outcomes[dtype]["outputs"].items()}

    # Most of the 256 steps of the output are seen, so that a wrong zero point or padding cannot hide.
    assert len(np.unique(outputs["before"])) > 40
    assert np.array_equal(outputs[build], outputs["before"])


@pytest.mark.parametrize("dtype", MODELS)
def test_onnxruntime_computes_the_same(outcomes: dict[str, Any], folder: Path, dtype: str) -> None:
    options = onnxruntime.SessionOptions()
    # Without this, sums of two products saturate at 16 bits where a CPU has AVX2 but no VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(folder / f"{dtype}.onnx", options, providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": np.load(folder / "x.npy")})

    # Scales are powers of two: nothing is rounded but what is quantised.
    assert np.array_equal(np.array(outcomes[dtype]["outputs"]["fused"]), want)


def test_kernels_have_tiles_and_the_instruction(outcomes: dict[str, Any]) -> None:
    kernels = outcomes["uint8"]["kernels"]

    # The padded and the 1x1 conv, and the matmul; the grouped ones have no pairs side by side.
    assert sorted(kernel["operators"][0] for kernel in kernels) == ["conv2d", "conv2d", "matmul"]
    assert all(kernel["instruction"] and all(kernel["instruction"]) for kernel in kernels)
    assert all(all(kernel["exact"]) for kernel in kernels)
    # The requantisation is in the same kernel: what leaves it is not the sum.
    assert {kernel["output"] for kernel in kernels} <= {"int16", "float32"}
