"""Matmuls of a few rows over one input are one, with the columns of all of them side by side.

Each takes so little time that a kernel less is felt: queries, keys and values of one token in three quarters to nine
tenths of the time. With more rows the slices cost what the kernel saves, and convs lose what was fused behind them:
docs/latency.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of, rewrite

#: Rows of the products that gained.
_MOST_ROWS = 8


def parallel_matmuls(mod: Any) -> tuple[Any, int]:
    """``x @ a`` and ``x @ b`` as slices of ``x @ [a b]``, and how many were combined."""
    slices: dict[Any, Any] = {}
    for group in _groups(mod["main"]):
        if len(group) > 1:
            slices.update(_slices(group))
    mod, combined = rewrite(mod, lambda call, _: slices.pop(call, None))
    # Each slice brought its own call of what they have in common.
    return (relax.transform.EliminateCommonSubexpr()(mod) if combined else mod), combined


def _groups(main: Any) -> list[list[tuple[Any, Array]]]:
    """Calls over the same input with their constant weights, which are all that they differ in."""
    view = View(main)
    groups: dict[tuple[Any, ...], list[tuple[Any, Array]]] = {}
    for binding in (binding for block in main.body.blocks for binding in block.bindings):
        call = binding.value
        weights = view.constant(call.args[1]) if operator_of(call) == "matmul" else None
        if weights is None or weights.ndim != 2:
            continue
        if math.prod(list(map(int, call.ty.shape))[:-1]) <= _MOST_ROWS:
            key = view.value(call.args[0]), str(weights.dtype), str(call.attrs)
            groups.setdefault(key, []).append((call, weights))
    return list(groups.values())


def _slices(group: Sequence[tuple[Any, Array]]) -> dict[Any, Any]:
    """By call what takes its place."""
    first = group[0][0]
    whole = np.concatenate([weights for _, weights in group], axis=1)
    together = relax.Call(first.op, [first.args[0], constant_like(whole, whole)], first.attrs, first.ty_args)
    last, begin, slices = len(first.ty.shape) - 1, 0, {}
    for call, weights in group:
        end = begin + weights.shape[1]
        slices[call] = relax.op.strided_slice(together, axes=[last], begin=[begin], end=[end])
        begin = end
    return slices
