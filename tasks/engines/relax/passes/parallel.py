"""Convs or matmuls over one input are one, with the columns of all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of, rewrite

#: Is it worth computing these together? Asked with the calls and their weights.
Pays = Callable[[Sequence[Any], Sequence[Array]], bool]


def parallel(mod: Any, pays: Pays) -> tuple[Any, int]:
    """``conv(x, a)`` and ``conv(x, b)`` as slices of ``conv(x, [a b])``, matmuls alike; how many were combined."""
    view = View(mod["main"])
    slices: dict[Any, Any] = {}
    for calls in _groups(mod["main"], view):
        weights = [view.constant(call.args[1]) for call in calls]
        kept = [w for w in weights if w is not None]
        if len(calls) > 1 and pays(calls, kept):
            slices.update(zip(calls, _slices(calls, kept), strict=True))
    if not slices:
        return mod, 0
    mod, combined = rewrite(mod, lambda call, _: slices.pop(call, None))
    # Each slice brought its own call of what they have in common.
    return relax.transform.EliminateCommonSubexpr()(mod), combined


def _groups(main: Any, view: View) -> list[list[Any]]:
    """Calls over the same input with constant weights that differ in these only."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            name = operator_of(call)
            if name not in ("nn.conv2d", "matmul"):
                continue
            weights = view.constant(call.args[1])
            if weights is None or (name == "matmul" and weights.ndim != 2):
                continue
            if name == "nn.conv2d" and (int(call.attrs.groups) != 1 or call.attrs.data_layout != "NCHW"):
                continue
            shape = weights.shape[1:] if name == "nn.conv2d" else weights.shape[:1]
            attrs = tvm.ir.structural_hash(call.attrs)
            groups.setdefault((view.value(call.args[0]), name, shape, str(weights.dtype), attrs), []).append(call)
    return list(groups.values())


def _slices(calls: Sequence[Any], weights: Sequence[Array]) -> list[Any]:
    conv = operator_of(calls[0]) == "nn.conv2d"
    whole = np.concatenate(weights, axis=0 if conv else 1)
    together = relax.Call(
        calls[0].op, [calls[0].args[0], constant_like(whole, whole)], calls[0].attrs, calls[0].ty_args
    )
    axis = 1 if conv else len(calls[0].ty.shape) - 1
    ends = np.cumsum([w.shape[0 if conv else 1] for w in weights])
    begins = [0, *ends[:-1]]
    return [
        relax.op.strided_slice(together, axes=[axis], begin=[int(begin)], end=[int(end)])
        for begin, end in zip(begins, ends, strict=True)
    ]
