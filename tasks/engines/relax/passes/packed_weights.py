"""Constant weights in the order in which a kernel reads them: blocks of output channels, contiguous.

Read row by row, weights whose row is a power of two long fall into a few sets of the cache. The
packing is in the model, not in a schedule: what is measured, built and compared are kernels that take
packed weights, and the packing itself is done once, here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from tasks.engines.relax import winograd
from tasks.engines.relax.int16_dots import LANES, PAIR, PAIRED
from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of
from tasks.engines.relax.spaces import best_block, fills_cheaply, is_flat_better, rows_to_compute

#: What TVM calls an operator that elementwise ones can be fused behind.
_FUSABLE = 4
#: The shortest vectors that are worth it.
_LEAST_BLOCK = 4
#: With more groups, computing with the zeros between them takes longer than computing without vectors.
_MOST_FILLED_GROUPS = 8
#: Columns of a matmul that does not divide into vectors are filled up where there are at least so many.
_WORTH_FILLING = 64


@dataclass(frozen=True)
class Window:
    """How a conv's window moves; padding as (top, left, bottom, right). ``groups`` of channels, each of its own."""

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def outputs(self, padded: Any, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the result, for data that is padded already and a window of this size."""
        (sy, sx), (dy, dx) = self.strides, self.dilation
        _, rows, columns, _ = (int(size) for size in padded.shape)
        return (rows - (height - 1) * dy - 1) // sy + 1, (columns - (width - 1) * dx - 1) // sx + 1


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
        if weights is None or weights.dtype not in (np.float32, np.int16):
            return call
        paired = weights.dtype == np.int16
        if name == "nn.conv2d":
            return self._packed_conv(call, weights, paired)
        if weights.ndim != 2:
            return call
        rows = int(call.args[0].ty.shape[-2]) if len(call.args[0].ty.shape) > 1 else 1
        block = self._filled(rows, weights.shape[1]) or self._block(weights.shape[1])
        if paired and block % LANES:
            return call
        if weights.shape[1] % block and weights.shape[1] < _WORTH_FILLING:
            return call
        if paired:
            return self._call(_paired_matmul, call, pack_pairs(weights, block), weights.shape[1])
        return self._call(_matmul, call, pack(weights, block), weights.shape[1])

    def _packed_conv(self, call: Any, weights: Array, paired: bool) -> Any:
        attrs = call.attrs
        weights, groups = _grouped(weights, int(attrs.groups))
        # A block lies within one group, so that all of it is multiplied by the same number.
        block = self._block(weights.shape[-1] // groups)
        plain = (attrs.data_layout, attrs.kernel_layout) == ("NHWC", "HWIO")
        columns = weights.shape[-1]
        if not plain or weights.shape[2] == 1:
            return call
        strides, padding, dilation = (tuple(map(int, at)) for at in (attrs.strides, attrs.padding, attrs.dilation))
        window = Window(strides, padding, dilation, groups)
        _, high, wide, _ = map(int, call.ty.shape)
        flat = not paired and _is_pointwise(weights, window) and self._is_flat(high, wide, columns)
        filled = self._filled(high * wide if flat else wide, columns) if groups == 1 else 0
        if not filled and columns // groups % block:
            return call
        block = filled or block
        if flat:
            return self._call(_pixels, call, pack(weights, block)[:, 0, 0], columns, self._lanes)
        if not paired:
            return self._call(_conv, call, pack(weights, block), window, columns, self._lanes)
        if block % LANES or groups > 1:
            return call
        return self._call(_paired_conv, call, pack_pairs(weights, block), window, columns)

    def _call(self, compute: Any, call: Any, weights: Array, *rest: Any) -> Any:
        self.packed += 1
        name = operator_of(call).removeprefix("nn.")
        made = self.builder_.call_te(
            lambda data, packed: compute(data, packed, *rest),
            call.args[0], constant_like(weights, weights), primfunc_name_hint=name,
        )  # fmt: skip
        var = made.args[0]
        func = self.builder_.get()[var].with_attr("op_pattern", _FUSABLE)
        if compute is _conv and _is_plain_3x3(weights, rest[0]):
            func = winograd.mark(func, rest[0].padding, rest[1])
        self.builder_.update_func(var, func)
        return made

    def _is_flat(self, high: int, wide: int, columns: int) -> bool:
        """Should the picture's pixels be one row?"""
        block = self._filled(high * wide, columns)
        return block > 0 and is_flat_better(high, wide, -(-columns // block) * block, self._lanes)

    def _filled(self, rows: int, columns: int) -> int:
        """Columns of a block whose last one is filled up; 0 where that would be too much."""
        block = best_block(rows, columns, self._lanes)
        return block if fills_cheaply(columns, block) else 0

    def _block(self, columns: int) -> int:
        """Columns that lie together: two vectors, or what divides."""
        choices = (2 * self._lanes, self._lanes, self._lanes // 2, _LEAST_BLOCK)
        return next((n for n in choices if columns % n == 0), self._lanes)


def _is_pointwise(weights: Array, window: Window) -> bool:
    """A dense 1x1 conv that leaves no pixel out and adds none."""
    plain = (*window.strides, *window.padding, window.groups) == (1, 1, 0, 0, 0, 0, 1)
    return weights.shape[:2] == (1, 1) and plain


def _is_plain_3x3(packed: Array, window: Window) -> bool:
    """A dense conv with a window of 3 x 3 that moves by one."""
    return packed.shape[1:3] == (3, 3) and (*window.strides, *window.dilation, window.groups) == (1, 1, 1, 1, 1)


def _grouped(weights: Array, groups: int) -> tuple[Array, int]:
    """Few groups whose columns do not divide into vectors become one, zeros between them: more work, in vectors."""
    *window, channels, columns = weights.shape
    if groups == 1 or channels == 1 or columns // groups % _LEAST_BLOCK == 0 or groups > _MOST_FILLED_GROUPS:
        return weights, groups
    whole = np.zeros((*window, groups, channels, groups, columns // groups), weights.dtype)
    for group, part in enumerate(np.split(weights, groups, axis=-1)):
        whole[..., group, :, group, :] = part
    return whole.reshape(*window, groups * channels, columns), 1


def pack(weights: Array, block: int) -> Array:
    """``weights`` (..., columns) as (columns / block, ..., block), columns filled up with zeros."""
    missing = -weights.shape[-1] % block
    filled = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, missing)])
    blocks = filled.reshape(*weights.shape[:-1], -1, block)
    return np.ascontiguousarray(np.moveaxis(blocks, -2, 0))


def pack_pairs(weights: Array, block: int) -> Array:
    """``weights`` (..., inputs, columns) as (columns / block, ..., inputs / 2, block, 2), inputs filled up."""
    missing = -weights.shape[-2] % PAIR
    even = np.pad(weights, [(0, 0)] * (weights.ndim - 2) + [(0, missing), (0, 0)])
    packed = pack(even, block)
    pairs = packed.reshape(*packed.shape[:-2], -1, PAIR, block)
    return np.ascontiguousarray(np.swapaxes(pairs, -1, -2))


def _conv(data: Any, weights: Any, window: Window, columns: int, lanes: int) -> Any:
    blocks, height, width, channels, block = (int(size) for size in weights.shape)
    data = _padded(data, window, channels * window.groups)
    high, wide = window.outputs(data, height, width)
    (sy, sx), (dy, dx) = window.strides, window.dilation
    ry, rx = te.reduce_axis((0, height), "ry"), te.reduce_axis((0, width), "rx")
    rc = te.reduce_axis((0, channels), "rc")
    columns_of_group = blocks * block // window.groups
    wider = rows_to_compute(wide, blocks * block, lanes)
    conv = te.compute(
        (int(data.shape[0]), high, wider, blocks * block),
        lambda b, y, x, f: te.sum(
            data[b, y * sy + ry * dy, _within(x, wide, wider) * sx + rx * dx, f // columns_of_group * channels + rc]
            * weights[f // block, ry, rx, rc, f % block],
            axis=[ry, rx, rc],
        ),
        name="conv2d",
    )
    return _part(conv, (wide, columns))


def _pixels(data: Any, weights: Any, columns: int, lanes: int) -> Any:
    """A 1x1 conv over each picture's pixels in one row."""
    blocks, channels, block = (int(size) for size in weights.shape)
    batch, high, wide, _ = (int(size) for size in data.shape)
    pixels = high * wide
    longer = rows_to_compute(pixels, blocks * block, lanes)
    rc = te.reduce_axis((0, channels), "rc")

    def value(b: Any, p: Any, f: Any) -> Any:
        at = _within(p, pixels, longer)
        return te.sum(data[b, at // wide, at % wide, rc] * weights[f // block, rc, f % block], axis=[rc])

    conv = te.compute((batch, longer, blocks * block), value, name="conv2d")
    return te.compute((batch, high, wide, columns), lambda b, y, x, f: conv[b, y * wide + x, f], name="part")


def _paired_conv(data: Any, weights: Any, window: Window, columns: int) -> Any:
    blocks, height, width, pairs, block, _ = (int(size) for size in weights.shape)
    data = _padded(data, window, pairs * PAIR)
    high, wide = window.outputs(data, height, width)
    (sy, sx), (dy, dx) = window.strides, window.dilation
    ry, rx = te.reduce_axis((0, height), "ry"), te.reduce_axis((0, width), "rx")
    rc, rp = te.reduce_axis((0, pairs), "rc"), te.reduce_axis((0, PAIR), "rp")
    conv = te.compute(
        (int(data.shape[0]), high, wide, blocks * block),
        lambda b, y, x, f: te.sum(
            data[b, y * sy + ry * dy, x * sx + rx * dx, rc * PAIR + rp].astype("int32")
            * weights[f // block, ry, rx, rc, f % block, rp].astype("int32"),
            axis=[ry, rx, rc, rp],
        ),
        name="conv2d",
        attrs={PAIRED: True},
    )
    return _part(conv, (wide, columns))


def _padded(data: Any, window: Window, channels: int) -> Any:
    """``data`` with its padding, and with so many channels."""
    top, left, bottom, right = window.padding
    missing = channels - int(data.shape[3])
    if not any((top, left, bottom, right, missing)):
        return data
    return topi.nn.pad(data, [0, top, left, 0], [0, bottom, right, missing], name="pad_temp")


def _matmul(data: Any, weights: Any, columns: int) -> Any:
    blocks, depth, block = (int(size) for size in weights.shape)
    k = te.reduce_axis((0, depth), "k")
    *outer, _ = [int(size) for size in data.shape]
    product = te.compute(
        (*outer, blocks * block),
        lambda *at: te.sum(data[(*at[:-1], k)] * weights[at[-1] // block, k, at[-1] % block], axis=[k]),
        name="matmul",
    )
    return _part(product, (columns,))


def _paired_matmul(data: Any, weights: Any, columns: int) -> Any:
    blocks, pairs, block, _ = (int(size) for size in weights.shape)
    *outer, depth = [int(size) for size in data.shape]
    if depth % PAIR:
        data = topi.nn.pad(data, [0] * (len(outer) + 1), [0] * len(outer) + [1], name="pad_temp")
    k, p = te.reduce_axis((0, pairs), "k"), te.reduce_axis((0, PAIR), "p")
    product = te.compute(
        (*outer, blocks * block),
        lambda *at: te.sum(
            data[(*at[:-1], k * PAIR + p)].astype("int32")
            * weights[at[-1] // block, k, at[-1] % block, p].astype("int32"),
            axis=[k, p],
        ),
        name="matmul",
        attrs={PAIRED: True},
    )
    return _part(product, (columns,))


def _within(place: Any, size: int, larger: int) -> Any:
    """``place`` in an axis of ``size``: what is beyond is computed of the last one, and thrown away."""
    return place if size == larger else te.min(place, size - 1)


def _part(product: Any, last: tuple[int, ...]) -> Any:
    """``product`` without what its last axes, now of the sizes ``last``, were filled up with."""
    shape = [int(size) for size in product.shape]
    wanted = (*shape[: len(shape) - len(last)], *last)
    return product if list(wanted) == shape else te.compute(wanted, lambda *at: product[at], name="part")
