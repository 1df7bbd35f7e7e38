"""Exponentials that run in vectors: LLVM calls the C library once for each number of an ``exp``."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tasks.engines.relax.passes.rewriting import operator_of


def vector_exp(mod: Any) -> tuple[Any, int]:
    """float32 ``exp``, ``sigmoid`` and ``softmax`` by a polynomial, exact to some units in the last place."""
    approximator = _Approximator(mod)
    changed = approximator.visit_expr(mod["main"])
    if not approximator.changes:
        return mod, 0
    approximator.builder_.update_func(mod.get_global_var("main"), relax.analysis.remove_all_unused(changed))
    return approximator.builder_.get(), approximator.changes


@mutator
class _Approximator(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any) -> None:
        super().__init__(mod)
        self.changes = 0

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
        axis = int(call.attrs.axis)
        return self.builder_.call_te(topi.nn.fast_softmax, call.args[0], axis, primfunc_name_hint="softmax")


def _sigmoid(x: Any) -> Any:
    powers = topi.fast_exp(topi.negative(x))
    return te.compute(x.shape, lambda *at: 1.0 / (1.0 + powers[at]), name="sigmoid", tag="elemwise")
