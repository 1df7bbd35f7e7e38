"""Real models that onnxruntime's tool has quantised: integer kernels throughout, and the outputs of onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from tasks.import_model import import_model_file
from tasks.model_source import fetch
from tests.fresh import in_fresh
from tests.tasks.engines.relax.quantised_models import quantised_model, sample

#: By model the operator before which it ends, which of these, and the dtype of activations. The classifier's
#: other two thirds are like the first.
MODELS = {"classifier": ("Conv", 18, "int8"), "squeezenet": ("Softmax", 1, "uint8")}
#: Steps of the output's scale. Sums are exact on both sides. A difference begins where a product of a sum and
#: float32 scales lies next to a half and is rounded the other way: one step. Through later layers such
#: steps come to about another one: onnxruntime with and without its optimisations differs by one as well,
#: and the float model, which lacks the roundings in between, by more than ten.
STEPS = 2


def run_default(path: str, data_path: str) -> dict[str, Any]:
    """In a fresh interpreter: the model with default schedules, its output and the dtypes of its convs."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tasks.engines.relax import defaults, frontend, subgraphs, targets
    from tests.tasks.engines.relax.passes.scenarios import _run

    target = targets.to_tvm(targets.resolve("cpu", 1))
    fused = frontend.fuse(frontend.translate(path)[0], target)
    convs = [
        [subgraph.anchor_output_dtype, subgraph.output_dtype]
        for subgraph in subgraphs.take_inventory(fused).subgraphs
        if subgraph.anchor_operator in ("conv2d", "depthwise_conv2d")
    ]
    mod = fused.lowered
    for name, func in subgraphs.prim_funcs(mod).items():
        scheduled = defaults.cpu_default(subgraphs.as_workload(func), target)["main"]
        mod.update_func(mod.get_global_var(name), scheduled.with_attr("global_symbol", name))
    return {"output": _run(mod, target, np.load(data_path)).tolist(), "convs": convs}


@pytest.fixture(scope="module", params=MODELS)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What we and onnxruntime make of one input, and onnxruntime of the float model; in steps of the output."""
    folder = tmp_path_factory.mktemp(request.param)
    operator, number, activations = MODELS[request.param]
    plain, quantised = quantised_model(request.param, (operator, number), activations, folder)
    model = import_model_file(fetch(str(quantised), folder), {}, folder)
    data = sample(model.inputs[0].shape, 9)
    np.save(folder / "x.npy", data)
    found = in_fresh(run_default, model.path, str(folder / "x.npy"), timeout_s=600)
    step = _output_scale(quantised)
    return {
        "ours": np.array(found["output"]) / step,
        "onnxruntime": _run_onnxruntime(quantised, data) / step,
        "float": _run_onnxruntime(plain, data) / step,
        "convs": found["convs"],
    }


def _output_scale(path: Path) -> float:
    """The scale of the dequantize that makes the output."""
    graph = onnx.load(path).graph
    last = next(node for node in graph.node if graph.output[0].name in node.output)
    assert last.op_type == "DequantizeLinear"
    scale = next(tensor for tensor in graph.initializer if tensor.name == last.input[1])
    return float(numpy_helper.to_array(scale))


def _run_onnxruntime(path: Path, data: Any) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: data})[0]


def test_outputs_are_onnxruntimes(outcome: dict[str, Any]) -> None:
    difference = np.abs(outcome["ours"] - outcome["onnxruntime"])

    assert len(np.unique(outcome["onnxruntime"])) > 100  # the output uses its steps
    assert difference.max() <= STEPS + 1e-3
    # Next to a half is rare: most outputs are the same.
    assert np.mean(difference > 0.5) < 0.25


def test_a_float_model_would_be_found(outcome: dict[str, Any]) -> None:
    assert np.abs(outcome["float"] - outcome["onnxruntime"]).max() > 4 * STEPS


def test_every_conv_is_an_integer_kernel_with_its_requantisation(outcome: dict[str, Any]) -> None:
    assert len(outcome["convs"]) > 9
    for anchor, output in outcome["convs"]:
        assert anchor == "int32"
        # int16 where another integer kernel reads it, float32 where float arithmetic does; never the sums.
        assert output in ("int16", "float32")
