"""What the passes before fusion have in common: one rule, applied to every call of ``main``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

Array = NDArray[Any]


class View:
    """The function ``main`` as a rule sees it: what variables are bound to, and how often they are used."""

    def __init__(self, func: Any) -> None:
        self._bound: dict[Any, Any] = {}
        self._uses: dict[Any, int] = {}
        for block in func.body.blocks:
            for binding in block.bindings:
                self._bound[binding.var] = binding.value
                self._count(binding.value)
        self._count(func.body.body)

    def _count(self, expr: Any) -> None:
        def visit(node: Any) -> None:
            if isinstance(node, relax.Var):
                self._uses[node] = self._uses.get(node, 0) + 1

        relax.analysis.post_order_visit(expr, visit)

    def value(self, expr: Any) -> Any:
        """What ``expr`` is bound to, however many names lie between."""
        while isinstance(expr, relax.Var) and expr in self._bound:
            expr = self._bound[expr]
        return expr

    def constant(self, expr: Any) -> Array | None:
        """The array that ``expr`` is known to be."""
        expr = self.value(expr)
        if isinstance(expr, tvm.ir.GenericConst) and hasattr(expr.value, "numpy"):
            return np.asarray(expr.value.numpy())
        return None

    def call(self, expr: Any, *names: str) -> Any | None:
        """The call of one of the operators ``names`` that ``expr`` is."""
        expr = self.value(expr)
        return expr if operator_of(expr) in names else None

    def sole_call(self, expr: Any, *names: str) -> Any | None:
        """The same where nobody else uses the result, so that it is gone once the rule has replaced it."""
        while isinstance(expr, relax.Var) and expr in self._bound:
            if self._uses.get(expr, 0) != 1:
                return None
            expr = self._bound[expr]
        return expr if operator_of(expr) in names else None

    def with_constant(self, call: Any) -> tuple[Any, Array] | None:
        """The other argument of a call of two arguments, and the one that is constant."""
        for expr, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
            constant = self.constant(other)
            if constant is not None and self.constant(expr) is None:
                return expr, constant
        return None


#: From a call to what takes its place; None where the rule has nothing to say.
Rule = Callable[[Any, View], Any]


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, rule: Rule, view: View) -> None:
        super().__init__(mod)
        self._rule, self._view = rule, view
        self.changes = 0

    def visit_call_(self, call: Any) -> Any:
        replaced = self._rule(call, self._view)
        if replaced is None:
            return self.visit_expr_post_order(call)
        self.changes += 1
        return self.visit_expr(replaced)


def rewrite(mod: Any, rule: Rule) -> tuple[Any, int]:
    """``mod`` with ``rule`` applied to each call of ``main``, and how often it had something to say."""
    main = mod["main"]
    rewriter = _Rewriter(mod, rule, View(main))
    changed = rewriter.visit_expr(main)
    if not rewriter.changes:
        return mod, 0
    rewriter.builder_.update_func(mod.get_global_var("main"), relax.analysis.remove_all_unused(changed))
    return rewriter.builder_.get(), rewriter.changes


def operator_of(expr: Any) -> str:
    """The operator that ``expr`` calls without ``relax.`` before it, or an empty text."""
    return str(getattr(getattr(expr, "op", None), "name", "")).removeprefix("relax.")


def constant_like(value: Array, like: Array) -> Any:
    """``value`` as a constant of the dtype of ``like``."""
    return relax.const(np.ascontiguousarray(value, dtype=like.dtype), str(like.dtype))


def along(constant: Array, axis: int, rank: int) -> Array | None:
    """``constant``, which is broadcast to ``rank`` dimensions, as a vector along ``axis`` (or of length 1).

    None where it varies along another axis as well.
    """
    if constant.ndim > rank:
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    axis %= rank
    if any(size != 1 for i, size in enumerate(shape) if i != axis):
        return None
    return constant.reshape(-1)
