"""A product or sum before a conv or matmul goes into its weights and what is added behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import View, along, constant_like, rewrite
from tasks.engines.relax.passes.weights import Weighted, weighted


def affine_before(mod: Any) -> tuple[Any, int]:
    """``conv(x * scale + shift, w)`` as ``conv(x, w * scale) + sum(w * shift)``.

    The shift only where the conv has no padding: padded zeros are not shifted. Only where nobody else
    uses the scaled tensor, which has to be computed otherwise.
    """
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    outer = weighted(call, view)
    if outer is None:
        return None
    scaled = view.sole_call(call.args[0], "multiply")
    if scaled is not None:
        return _with_scale(outer, view.with_constant(scaled))
    shifted = view.sole_call(call.args[0], "add")
    if shifted is not None and not outer.is_padded:
        return _with_shift(outer, view.with_constant(shifted))
    return None


def _with_scale(outer: Weighted, found: Any) -> Any:
    vector = _per_channel(outer, found)
    if vector is None:
        return None
    return outer.with_weights(outer.weights.astype(np.float64) * outer.per_input(vector), found[0])


def _with_shift(outer: Weighted, found: Any) -> Any:
    vector = _per_channel(outer, found)
    if vector is None:
        return None
    shift = outer.summed(outer.weights.astype(np.float64) * outer.per_input(vector))
    if outer.is_conv:
        shift = shift.reshape((1, -1) + (1,) * (outer.weights.ndim - 2))
    plain = outer.with_weights(outer.weights, found[0])
    return relax.op.add(plain, constant_like(shift, outer.weights))


def _per_channel(outer: Weighted, found: Any) -> Any:
    """The constant as one number or one an input channel; None where it is more than that, or broadcasts the data."""
    if found is None:
        return None
    data, constant = found
    if getattr(data, "ty", None) is None or list(data.ty.shape) != list(outer.call.args[0].ty.shape):
        return None
    return along(constant.astype(np.float64), outer.channel_axis, outer.rank)
