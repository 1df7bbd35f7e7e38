"""Products and sums with constants, one after the other, as at most one product and then one sum.

So a decomposed BatchNormalization, a learned scale and shift behind a bias, or the sixth of a
HardSwish before a scale come out as ``x * scale + shift``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of, rewrite


def affine_chains(mod: Any) -> tuple[Any, int]:
    """Merge neighbouring products and sums with constants where nobody else uses what lies between."""
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    name = operator_of(call)
    if name not in ("multiply", "add"):
        return None
    outer = view.with_constant(call)
    inner_call = None if outer is None else view.sole_call(outer[0], "multiply", "add")
    inner = None if inner_call is None else view.with_constant(inner_call)
    if outer is None or inner is None or outer[1].dtype.kind != "f":
        return None
    (x, first), second = inner, outer[1]
    kind = f"{operator_of(inner_call)} {name}"
    if kind == "multiply multiply":
        return _unless_larger(first, second, lambda both: relax.op.multiply(x, both), np.multiply)
    if kind == "add add":
        return _unless_larger(first, second, lambda both: relax.op.add(x, both), np.add)
    if kind == "add multiply":
        scaled = relax.op.multiply(x, constant_like(second, second))
        return _unless_larger(first, second, lambda both: relax.op.add(scaled, both), np.multiply)
    return None


def _unless_larger(first: Array, second: Array, make: Any, combine: Any) -> Any:
    """What ``make`` gives for the two constants combined, unless that takes more memory than either."""
    combined = combine(first.astype(np.float64), second.astype(np.float64))
    if combined.size > max(first.size, second.size):
        return None
    return make(constant_like(combined, first))
