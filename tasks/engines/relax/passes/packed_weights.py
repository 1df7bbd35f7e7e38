"""Constant weights in the order in which a kernel reads them: blocks of output channels, contiguous.

Read row by row, weights whose row is a power of two long fall into a few sets of the cache. The
packing is in the model, not in a schedule: what is measured, built and compared are kernels that take
packed weights, and the packing itself is done once, here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of

#: What TVM calls an operator that elementwise ones can be fused behind.
_FUSABLE = 4
#: Columns of a matmul that does not divide into vectors are filled up where there are at least so many.
_WORTH_FILLING = 64


def packed_weights(mod: Any, lanes: int) -> tuple[Any, int]:
    """Convs in NHWC and matmuls with packed weights, for vectors of ``lanes``; and how many of these there are."""
    packer = _Packer(mod, View(mod["main"]), lanes)
    changed = packer.visit_expr(mod["main"])
    if not packer.packed:
        return mod, 0
    packer.builder_.update_func(mod.get_global_var("main"), relax.analysis.remove_all_unused(changed))
    return packer.builder_.get(), packer.packed


@mutator
class _Packer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: Any, view: View, lanes: int) -> None:
        super().__init__(mod)
        self._view, self._lanes = view, lanes
        self.packed = 0

    def visit_call_(self, call: Any) -> Any:
        name = operator_of(call)
        weights = self._view.constant(call.args[1]) if name in ("nn.conv2d", "matmul") else None
        call = self.visit_expr_post_order(call)
        if weights is None or weights.dtype != np.float32:
            return call
        block = self._block(weights.shape[-1])
        if name == "nn.conv2d":
            attrs = call.attrs
            plain = (attrs.data_layout, attrs.kernel_layout) == ("NHWC", "HWIO") and int(attrs.groups) == 1
            if not plain or weights.shape[-1] % block or weights.shape[2] == 1:
                return call
            return self._call(
                _conv, call, pack(weights, block), list(attrs.strides), list(attrs.padding), list(attrs.dilation)
            )
        if weights.ndim != 2 or (weights.shape[1] % block and weights.shape[1] < _WORTH_FILLING):
            return call
        return self._call(_matmul, call, pack(weights, block), weights.shape[1])

    def _call(self, compute: Any, call: Any, weights: Array, *rest: Any) -> Any:
        self.packed += 1
        name = operator_of(call).removeprefix("nn.")
        made = self.builder_.call_te(
            compute, call.args[0], constant_like(weights, weights), *rest, primfunc_name_hint=name
        )
        var = made.args[0]
        func = self.builder_.get()[var].with_attr("op_pattern", _FUSABLE)
        self.builder_.update_func(var, func)
        return made

    def _block(self, columns: int) -> int:
        """Columns that lie together: two vectors, or what divides."""
        choices = (2 * self._lanes, self._lanes, self._lanes // 2, 4)
        return next((n for n in choices if columns % n == 0), self._lanes)


def pack(weights: Array, block: int) -> Array:
    """``weights`` (..., columns) as (columns / block, ..., block), columns filled up with zeros."""
    missing = -weights.shape[-1] % block
    filled = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, missing)])
    blocks = filled.reshape(*weights.shape[:-1], -1, block)
    return np.ascontiguousarray(np.moveaxis(blocks, -2, 0))


def _conv(data: Any, weights: Any, strides: list[int], padding: list[int], dilation: list[int]) -> Any:
    blocks, height, width, channels, block = (int(size) for size in weights.shape)
    top, left, bottom, right = (int(size) for size in padding)
    n, rows, columns, _ = data.shape
    if any((top, left, bottom, right)):
        data = topi.nn.pad(data, [0, top, left, 0], [0, bottom, right, 0], name="pad_temp")
    sy, sx, dy, dx = (int(step) for step in (*strides, *dilation))
    high = (int(rows) + top + bottom - (height - 1) * dy - 1) // sy + 1
    wide = (int(columns) + left + right - (width - 1) * dx - 1) // sx + 1
    ry, rx = te.reduce_axis((0, height), "ry"), te.reduce_axis((0, width), "rx")
    rc = te.reduce_axis((0, channels), "rc")
    return te.compute(
        (int(n), high, wide, blocks * block),
        lambda b, y, x, f: te.sum(
            data[b, y * sy + ry * dy, x * sx + rx * dx, rc] * weights[f // block, ry, rx, rc, f % block],
            axis=[ry, rx, rc],
        ),
        name="conv2d",
    )


def _matmul(data: Any, weights: Any, columns: int) -> Any:
    blocks, depth, block = (int(size) for size in weights.shape)
    k = te.reduce_axis((0, depth), "k")
    *outer, _ = [int(size) for size in data.shape]
    product = te.compute(
        (*outer, blocks * block),
        lambda *at: te.sum(data[(*at[:-1], k)] * weights[at[-1] // block, k, at[-1] % block], axis=[k]),
        name="matmul",
    )
    if blocks * block == columns:
        return product
    return te.compute((*outer, columns), lambda *at: product[at], name="columns")
