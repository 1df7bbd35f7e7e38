"""Quantised models in integers: convs and matmuls of int16 with int32 sums, one product behind each.

A quantised tensor is kept as its distance from the zero point, which fits 16 bits whatever the zero
point is: padding is zero then, and no correction for zero points is left. What a conv adds up is
exact, so that the result is that of any other exact int8 runtime up to the rounding of the product
behind it. The arithmetic between a dequantize and the next quantize stays in float32, within one kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.quantisation import Integers, Scaled, distance, integers, scaled
from tasks.engines.relax.passes.rewriting import View, operator_of, rewrite

#: Terms of a sum that cannot leave 32 bits: each is at most 255 * 255.
_MOST_TERMS = (2**31 - 1) // 255**2
#: A bias is quantised with the product of the scales of data and weights; float32 rounds that.
_SAME_SCALE = 1e-5
_WEIGHTED = ("nn.conv2d", "matmul")
#: What leaves each number as it is.
_KEEPING = ("nn.max_pool2d", "reshape", "permute_dims")


def integer_kernels(mod: Any) -> tuple[Any, int]:
    """Dequantised convs and matmuls with constant weights as integer ones; how many calls were rewritten."""
    changes = 0
    for rule in (_kernel, _mean, _tensor, _cancel):
        mod, changed = rewrite(mod, rule)
        changes += changed
    return mod, changes


def _kernel(call: Any, view: View) -> Any:
    """A conv or matmul of dequantised operands, with its bias where that is quantised alike."""
    if operator_of(call) in _WEIGHTED:
        found = _operands(call, view)
        return None if found is None else _product(call, *found, bias=None)
    if operator_of(call) != "add":
        return None
    for inner, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
        weighted, bias = view.sole_call(inner, *_WEIGHTED), integers(other, view)
        found = None if weighted is None or bias is None else _operands(weighted, view)
        if found is not None and bias is not None and _is_alike(bias, *found, rank=len(call.ty.shape)):
            return _product(weighted, *found, bias=bias)
    return None


def _operands(call: Any, view: View) -> tuple[Scaled, Integers] | None:
    """Data and weights of a call that can be done in integers."""
    data = scaled(view.call(call.args[0], "dequantize"), view)
    weights = integers(call.args[1], view)
    if data is None or weights is None or np.abs(weights.values).max(initial=0) > 255:
        return None
    conv = operator_of(call) == "nn.conv2d"
    if conv and (call.attrs.data_layout, call.attrs.kernel_layout) != ("NCHW", "OIHW"):
        return None
    if not conv and weights.values.ndim != 2:
        return None
    if math.prod(weights.values.shape[1:] if conv else weights.values.shape[:1]) > _MOST_TERMS:
        return None
    return (data, weights) if _channel_scales(weights, conv) is not None else None


def _channel_scales(weights: Integers, conv: bool) -> Any:
    """The scale of each output channel (or one for all), or None where it varies within a channel."""
    if weights.scale.size == 1:
        return weights.scale.reshape(1)
    whole = np.broadcast_to(weights.scale, weights.values.shape)
    rows = whole.reshape(whole.shape[0], -1) if conv else whole.T
    return rows[:, 0] if (rows == rows[:, :1]).all() else None


def _steps(call_rank: int, conv: bool, vector: Any) -> Any:
    """``vector`` over output channels, shaped for a result of ``call_rank`` dimensions."""
    return vector.reshape((1, -1) + (1,) * (call_rank - 2) if conv else (1,) * (call_rank - 1) + (-1,))


def _is_alike(bias: Integers, data: Scaled, weights: Integers, rank: int) -> bool:
    """Is a bias, which must be one number a channel, quantised with the product of the two scales?"""
    conv = weights.values.ndim == 4
    product = float(data.scale) * _channel_scales(weights, conv).astype(np.float64)
    values = bias.values.reshape(-1)
    if bias.values.ndim > rank or values.size not in (1, weights.values.shape[0 if conv else 1]):
        return False
    if values.size > 1 and bias.values.shape != _steps(rank, conv, values).shape[rank - bias.values.ndim :]:
        return False
    scales = np.broadcast_to(bias.scale, bias.values.shape).reshape(-1)
    return bool(np.allclose(scales, product, rtol=_SAME_SCALE, atol=0) and np.abs(values).max(initial=0) < 2**30)


def _product(call: Any, data: Scaled, weights: Integers, *, bias: Integers | None) -> Any:
    """The integer kernel, its bias, and the product that makes float32 of it."""
    conv, attrs = operator_of(call) == "nn.conv2d", call.attrs
    constant = relax.const(weights.values.astype(np.int16), "int16")
    if conv:
        made = relax.op.nn.conv2d(
            distance(data), constant, strides=attrs.strides, padding=attrs.padding, dilation=attrs.dilation,
            groups=int(attrs.groups), data_layout="NCHW", kernel_layout="OIHW", out_dtype="int32",
        )  # fmt: skip
    else:
        made = relax.op.matmul(distance(data), constant, out_dtype="int32")
    rank = len(call.ty.shape)
    if bias is not None:
        made = relax.op.add(made, relax.const(bias.values.astype(np.int32), "int32"))
    scales = data.scale.astype(np.float32) * _channel_scales(weights, conv).astype(np.float32)
    factors = scales.reshape(()) if scales.size == 1 else _steps(rank, conv, scales)
    return relax.op.multiply(relax.op.astype(made, "float32"), relax.const(np.array(factors), "float32"))


def _mean(call: Any, view: View) -> Any:
    """A mean of integers, scaled afterwards: float32 adds these exactly, in whatever order a schedule does."""
    data = scaled(view.call(call.args[0], "dequantize"), view) if operator_of(call) == "mean" else None
    if data is None:
        return None
    mean = relax.Call(call.op, [relax.op.astype(distance(data), "float32")], call.attrs, call.ty_args)
    return relax.op.multiply(mean, relax.const(data.scale, "float32"))


def _tensor(call: Any, view: View) -> Any:
    """quantize and dequantize by way of the distance from the zero point."""
    name = operator_of(call)
    this = scaled(call, view) if name in ("quantize", "dequantize") else None
    if this is None or str(call.ty.dtype) not in ("float32", this.dtype):
        return None
    if name == "dequantize":
        return relax.op.multiply(relax.op.astype(distance(this), "float32"), relax.const(this.scale, "float32"))
    kept = _kept(this, view)
    if kept is not None:
        return this.quantised(kept)
    limits = np.iinfo(this.dtype)
    rounded = relax.op.round(relax.op.divide(this.tensor, relax.const(this.scale, "float32")))
    clipped = relax.op.clip(rounded, float(limits.min - this.zero), float(limits.max - this.zero))
    return this.quantised(relax.op.astype(clipped, "int16"))


def _kept(this: Scaled, view: View) -> Any:
    """Numbers that were quantised alike before they were moved, or the largest chosen, need no float for it."""
    moved = view.sole_call(this.tensor, *_KEEPING)
    source = None if moved is None else scaled(view.call(moved.args[0], "dequantize"), view)
    if moved is None or source is None or not source.same(this):
        return None
    return relax.Call(moved.op, [distance(source), *moved.args[1:]], moved.attrs, moved.ty_args)


def _cancel(call: Any, view: View) -> Any:
    """The distance of what was made from a distance."""
    outer = view.call(call, "subtract")
    inner = None if outer is None else view.call(outer.args[0], "astype")
    made = None if inner is None else view.call(inner.args[0], "astype")
    added = None if made is None else view.call(made.args[0], "add")
    if outer is None or added is None or str(added.ty.dtype) != "int16":
        return None
    zeros = view.constant(outer.args[1]), view.constant(added.args[1])
    if zeros[0] is None or zeros[1] is None or not np.array_equal(zeros[0], zeros[1]):
        return None
    return added.args[0]
