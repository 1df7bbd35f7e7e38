"""From a normalised ONNX file to a fused Relay module."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import tvm
from tvm import relay
from tvm.relay.frontend import onnx as onnx_frontend

from tasks.engines.failure_text import last_line
from tasks.engines.onnx_operators import count_operators
from tasks.engines.relay.fold_constants import fold_constants
from tasks.engines.relay.layouts import BlockedLayouts, simd_lanes
from tasks.engines.relay.rewriting import post_order
from tasks.errors import ModelError

# The front end makes this table of all operators anew for every node.
onnx_frontend._get_convert_map = functools.lru_cache(maxsize=None)(onnx_frontend._get_convert_map)

#: onnx 1.14, the last that TVM 0.16 was made for, warns of every model that is newer than this.
_IR_VERSION = 8
_FUSE_LEVEL = 2
#: Stands for the blocks of layouts.py, as wide as the target's registers.
_BLOCKED = object()
#: What SimplifyExpr has rewrites for, beside constants that are folded already.
_SIMPLIFIED = frozenset(
    {"transpose", "layout_transform", "cast", "power", "sqrt", "rsqrt", "full", "full_like", "ones", "ones_like",
     "zeros", "zeros_like", "where", "nn.batch_matmul"}
)  # fmt: skip


def translate(path: str) -> tuple[Any, dict[str, int]]:
    """The ONNX file as a Relay module with its weights as constants, and how many nodes of each operator it has.

    Raises ModelError: one error lists every operator without a converter and its nodes.
    """
    model = onnx.load(path)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    counts = count_operators(model.graph, onnx_frontend._get_convert_map(opset), "relay")
    model.ir_version = min(model.ir_version, _IR_VERSION)
    try:
        mod, params = relay.frontend.from_onnx(model, freeze_params=True)
        if params:
            mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
        mod = relay.transform.DynamicToStatic()(mod)
    except Exception as error:
        reason = last_line(error, type(error).__name__)
        raise ModelError(f"Relay cannot translate the model: {reason[:300]}; try the relax engine") from error
    _refuse_dynamic(mod)
    return mod, counts


def _refuse_dynamic(mod: Any) -> None:
    """Raises ModelError where a shape is known only when the model runs."""
    for node in post_order(mod["main"]):
        type_ = node.checked_type
        if isinstance(type_, relay.TensorType) and any(not isinstance(size, tvm.tir.IntImm) for size in type_.shape):
            name = getattr(getattr(node, "op", None), "name", "a tensor")
            raise ModelError(f"the shape of {name} depends on the data: the relay engine compiles fixed shapes only")


def fuse(mod: Any, target: Any, layouts: Any = _BLOCKED) -> Any:
    """Optimise for ``target`` (a tvm Target), choose layouts, fuse: ``main`` calls primitive functions.

    ``layouts`` is the dispatch context that AlterOpLayout asks; None leaves all layouts as they are.
    """
    transform = relay.transform
    optimise = [
        relay.qnn.transform.Legalize(), relay.qnn.transform.CanonicalizeOps(),
        transform.SimplifyInference(), transform.Legalize(), transform.DynamicToStatic(), fold,
        transform.EliminateCommonSubexpr(), _simplify, transform.CombineParallelConv2D(3),
        transform.CombineParallelDense(3), transform.CombineParallelBatchMatmul(3), fold, _fold_scales,
        transform.CanonicalizeCast(), transform.CanonicalizeOps(), transform.FlattenAtrousConv(), fold,
    ]  # fmt: skip
    with target, tvm.transform.PassContext(opt_level=3):
        mod = _apply(mod, optimise)
        if layouts is not None:
            with BlockedLayouts(simd_lanes(target)) if layouts is _BLOCKED else layouts:
                mod = transform.AlterOpLayout()(mod)
        finish = [fold, transform.FoldConstant(), transform.EliminateCommonSubexpr(), transform.FuseOps(_FUSE_LEVEL)]
        return transform.InferType()(_apply(mod, finish))


def fold(mod: Any) -> Any:
    """Constant expressions that numpy evaluates; TVM's own pass compiles each."""
    return fold_constants(mod)


def _apply(mod: Any, passes: Any) -> Any:
    for one in passes:
        mod = one(mod)
    return mod


def _simplify(mod: Any) -> Any:
    """TVM's rewrites of expressions, where there is one of the operators that they rewrite: they take seconds."""
    names = {getattr(node.op, "name", "") for node in post_order(mod["main"]) if isinstance(node, relay.Call)}
    return relay.transform.SimplifyExpr()(mod) if names & _SIMPLIFIED else mod


def _fold_scales(mod: Any) -> Any:
    """Constant scales (batch normalisation) go into the weights of convolutions.

    TVM's pass folds computed scales as well, such as a squeeze-and-excitation gate's, and then a weight is
    computed and packed anew in each run: such a result is not taken.
    """
    if not any(_is_scale(node) for node in post_order(mod["main"])):
        return mod
    folded = fold_constants(relay.transform.FoldScaleAxis()(mod))
    return folded if _computed_weights(folded) <= _computed_weights(mod) else mod


def _is_scale(node: Any) -> bool:
    """Is it a multiplication by a constant for each channel?"""
    return (
        isinstance(node, relay.Call)
        and getattr(node.op, "name", "") in ("multiply", "divide")
        and any(isinstance(arg, relay.Constant) and arg.data.numpy().size > 1 for arg in node.args)
    )


def _computed_weights(mod: Any) -> int:
    return sum(
        isinstance(node, relay.Call)
        and getattr(node.op, "name", "").startswith(("nn.conv", "nn.dense"))
        and not isinstance(node.args[1], relay.Constant)
        for node in post_order(mod["main"])
    )
