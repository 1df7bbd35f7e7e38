"""A conv over a concatenation is the sum of convs over its parts: nothing is copied to lie side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import View, constant_like, operator_of, rewrite

#: With more parts, or parts of fewer channels, the convs are too small to be fast.
_MOST_PARTS = 4
_LEAST_CHANNELS = 16
#: The sums pass through memory, once a part; they must have this many times fewer channels than what was copied.
_WORTH_SUMMING = 2


def concats(mod: Any) -> tuple[Any, int]:
    """``conv(concat(a, b), w)`` as ``conv(a, w_a) + conv(b, w_b)``, also where a maximum is pooled in between."""
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    if operator_of(call) != "nn.conv2d" or int(call.attrs.groups) != 1 or call.attrs.data_layout != "NCHW":
        return None
    weights = view.constant(call.args[1])
    pool = view.sole_call(call.args[0], "nn.max_pool2d")
    parts = _parts(call.args[0] if pool is None else pool.args[0], view)
    if weights is None or weights.dtype != np.float32 or not parts:
        return None
    sizes = [int(part.ty.shape[1]) for part in parts]
    if len(parts) > _MOST_PARTS or min(sizes) < _LEAST_CHANNELS or weights.shape[0] * _WORTH_SUMMING > sum(sizes):
        return None
    total = None
    for part, kernel in zip(parts, np.split(weights, np.cumsum(sizes)[:-1], axis=1), strict=True):
        data = part if pool is None else relax.Call(pool.op, [part], pool.attrs, pool.ty_args)
        conv = relax.Call(call.op, [data, constant_like(kernel, weights)], call.attrs, call.ty_args)
        total = conv if total is None else relax.op.add(total, conv)
    return total


def _parts(expr: Any, view: View) -> list[Any]:
    """What is concatenated along the channels for this one reader."""
    concat = view.sole_call(expr, "concat")
    if concat is None or int(getattr(concat.attrs.axis, "value", concat.attrs.axis)) != 1:
        return []
    fields = view.value(concat.args[0])
    return list(fields.fields) if isinstance(fields, relax.Tuple) else []
