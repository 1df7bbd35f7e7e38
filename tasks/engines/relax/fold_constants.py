"""Folds constant expressions with numpy, where TVM's FoldConstant compiles each of them.

The ONNX front end leaves a reshape of every bias and an ``isnan`` of every clip limit. Compiling
these one by one took 8 s for a small model; evaluating them takes milliseconds. What this pass does
not know is left to TVM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

#: Larger results are left alone: a broadcast of a scalar is cheaper to compute than to store.
_LARGEST_GROWTH = 4


def _shape(expr: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in expr.ty.shape)


def _evaluators() -> dict[str, Callable[..., Any]]:
    """By operator: from the call and its constant arguments to the value."""
    binary = {
        "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
        "maximum": np.maximum, "minimum": np.minimum, "power": np.power,
    }  # fmt: skip
    unary = {"sqrt": np.sqrt, "negative": np.negative, "exp": np.exp, "abs": np.abs, "isnan": np.isnan}
    table: dict[str, Callable[..., Any]] = {}
    for name, function in (*binary.items(), *unary.items()):
        table[f"relax.{name}"] = lambda _, *args, f=function: f(*args)
    for name in ("reshape", "expand_dims", "squeeze"):
        table[f"relax.{name}"] = lambda call, x: x.reshape(_shape(call))
    table["relax.permute_dims"] = lambda call, x: np.transpose(
        x, None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    )
    table["relax.where"] = lambda _, condition, x, y: np.where(condition, x, y)
    table["relax.astype"] = lambda call, x: x.astype(str(call.ty.dtype))
    table["relax.dequantize"] = _dequantise
    return table


def _dequantise(call: Any, x: Any, scale: Any, zero: Any) -> Any:
    shape = [1] * x.ndim
    if scale.size > 1:
        shape[int(call.attrs.axis)] = -1
    else:
        shape = []
    zero = zero.reshape(shape if zero.size > 1 else [])
    return (x.astype(np.int64) - zero.astype(np.int64)).astype(np.float32) * scale.reshape(shape).astype(np.float32)


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc]
    """Replaces calls whose arguments are all constant, and ``where`` with a constant condition."""

    def __init__(self, mod: Any) -> None:
        super().__init__(mod)
        self._table = _evaluators()

    def visit_call_(self, call: Any) -> Any:
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name == "relax.where":
            taken = self._taken_branch(call)
            if taken is not None:
                return taken
        evaluate = self._table.get(name)
        if evaluate is None:
            return call
        values = [self._value(arg) for arg in call.args if not isinstance(arg, relax.ShapeExpr)]
        if any(value is None for value in values):
            return call
        with np.errstate(all="ignore"):
            result = np.asarray(evaluate(call, *values))
        if result.shape != _shape(call) or result.nbytes > _LARGEST_GROWTH * sum(v.nbytes for v in values):
            return call
        return relax.const(np.array(result, order="C"), str(call.ty.dtype))

    def _value(self, expr: Any) -> Any:
        """The array that ``expr`` is known to be, or None."""
        if isinstance(expr, relax.Var):
            bound = self.lookup_binding(expr)
            expr = bound if bound is not None else expr
        if isinstance(expr, tvm.ir.GenericConst) and hasattr(expr.value, "numpy"):
            return expr.value.numpy()
        return None

    def _taken_branch(self, call: Any) -> Any:
        condition = self._value(call.args[0])
        if condition is None or not (condition.all() or not condition.any()):
            return None
        taken = call.args[1] if condition.all() else call.args[2]
        return taken if _shape(taken) == _shape(call) else None


def fold_constants(mod: Any) -> Any:
    """``mod`` with the constant expressions of its function ``main`` folded."""
    folder = _Folder(mod)
    folder.builder_.update_func(
        mod.get_global_var("main"), relax.analysis.remove_all_unused(folder.visit_expr(mod["main"]))
    )
    return folder.builder_.get()
