"""Arithmetic with constants in its plainest form, which later passes look for."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import View, constant_like, operator_of, rewrite


def plain_arithmetic(mod: Any) -> tuple[Any, int]:
    """Division by a constant as a product, subtraction of one as a sum, a square as a product."""
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    name = operator_of(call)
    if name not in ("divide", "subtract", "power"):
        return None
    x, constant = call.args[0], view.constant(call.args[1])
    if constant is None or constant.dtype.kind != "f":
        return None
    if name == "subtract":
        return relax.op.add(x, constant_like(-constant, constant))
    if name == "divide":
        with np.errstate(all="ignore"):
            reciprocal = 1.0 / constant.astype(np.float64)
        # A denormal divisor has no reciprocal; neither has zero.
        if not np.isfinite(reciprocal.astype(constant.dtype)).all():
            return None
        return relax.op.multiply(x, constant_like(reciprocal, constant))
    if constant.size == 1 and constant.ndim <= len(call.ty.shape) and float(constant.reshape(())) == 2.0:
        return relax.op.multiply(x, x)
    return None
