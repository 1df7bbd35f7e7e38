"""Exponentials that run in vectors: LLVM calls the C library once for each number of an ``exp``."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tasks.engines.relax.passes.rewriting import operator_of


def vector_exp(mod: Any, lanes: int) -> tuple[Any, int]:
    """float32 ``exp``, ``sigmoid`` and ``softmax`` by a polynomial, exact to some units in the last place.

    A softmax over the last axis keeps ``lanes`` partial maxima and sums a row, so that it runs in vectors as well.
    """
    approximator = _Approximator(mod, lanes)
    changed = approximator.visit_expr(mod["main"])
    if not approximator.changes:
        return mod, 0
    approximator.builder_.update_func(mod.get_global_var("main"), relax.analysis.remove_all_unused(changed))
    return approximator.builder_.get(), approximator.changes


@mutator
class _Approximator(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, lanes: int) -> None:
        super().__init__(mod)
        self.changes = 0
        self._lanes = lanes

    def visit_call_(self, call: Any) -> Any:
        name = operator_of(call)
        call = self.visit_expr_post_order(call)
        if name not in ("exp", "sigmoid", "nn.softmax") or str(call.args[0].ty.dtype) != "float32":
            return call
        self.changes += 1
        if name == "exp":
            return self.builder_.call_te(topi.fast_exp, call.args[0], primfunc_name_hint="exp")
        if name == "sigmoid":
            return self.builder_.call_te(_sigmoid, call.args[0], primfunc_name_hint="sigmoid")
        shape = [int(extent) for extent in call.args[0].ty.shape]
        axis = int(call.attrs.axis) % len(shape)
        if axis == len(shape) - 1 and shape[-1] >= 2 * self._lanes:
            return self.builder_.call_te(_row_softmax, call.args[0], self._lanes, primfunc_name_hint="softmax")
        return self.builder_.call_te(topi.nn.fast_softmax, call.args[0], axis, primfunc_name_hint="softmax")


def _sigmoid(x: Any) -> Any:
    powers = topi.fast_exp(topi.negative(x))
    return te.compute(x.shape, lambda *at: 1.0 / (1.0 + powers[at]), name="sigmoid", tag="elemwise")


def _row_softmax(x: Any, lanes: int) -> Any:
    """Softmax over the last axis, of at least ``lanes`` numbers."""
    largest = _over_rows(x, lanes, te.max, "max")
    powers = topi.fast_exp(te.compute(x.shape, lambda *at: x[at] - largest[at[:-1]], name="less_max"))
    total = _over_rows(powers, lanes, te.sum, "sum")
    return te.compute(x.shape, lambda *at: powers[at] / total[at[:-1]], name="softmax")


def _over_rows(x: Any, lanes: int, reduce: Any, name: str) -> Any:
    """``reduce`` over the last axis: every ``lanes``-th number together, then those, and what no vector held."""
    *rows, length = map(int, x.shape)
    step = te.reduce_axis((0, length // lanes), name="step")
    parts = te.compute(
        (*rows, lanes), lambda *at: reduce(x[(*at[:-1], step * lanes + at[-1])], axis=step), name=f"{name}_by_lane"
    )
    part = te.reduce_axis((0, lanes + length % lanes), name="part")

    def last(*row: Any) -> Any:
        rest = x[(*row, te.min(length // lanes * lanes - lanes + part, length - 1))]
        return reduce(te.if_then_else(part < lanes, parts[(*row, te.min(part, lanes - 1))], rest), axis=part)

    return te.compute(rows, last, name=name)
