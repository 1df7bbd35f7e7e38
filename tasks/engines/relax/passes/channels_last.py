"""Channels last: convs and what lies between them, so that vectors run along the channels.

Each tensor is kept as the model has it or with its channels moved last, whichever was asked for; the other
is made from it when somebody needs it. Along a chain of convs, elementwise operators, pooling and
concatenation nobody does, so that transposes are left where a chain begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of
from tasks.engines.relax.passes.transposed_convs import as_conv

_UNARY = (
    "nn.relu",
    "clip",
    "sigmoid",
    "tanh",
    "exp",
    "sqrt",
    "negative",
    "abs",
    "nn.gelu",
    "nn.silu",
    "nn.leakyrelu",
    "erf",
    "astype",
    "round",
)
_BINARY = ("add", "multiply", "subtract", "divide", "maximum", "minimum", "power")
_POOLS = ("nn.max_pool2d", "nn.avg_pool2d", "nn.adaptive_avg_pool2d")
_REDUCTIONS = ("mean", "sum", "max", "min")


def channels_last(mod: Any) -> tuple[Any, int]:
    """``mod`` with its 2-D convs in NHWC, and how many of these it has. Weights must be constant."""
    main = mod["main"]
    blocks = main.body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock) or not isinstance(main.body.body, relax.Var):
        return mod, 0
    mover = _Mover(main)
    moved = mover.function()
    if not mover.convs:
        return mod, 0
    functions = {var: moved if var.name_hint == "main" else func for var, func in mod.functions_items()}
    return tvm.IRModule(functions, attrs=mod.attrs), mover.convs


def to_last(rank: int) -> list[int]:
    """The axes that bring the two dimensions of the picture before the channels; there may be several of these."""
    return [0, rank - 2, rank - 1, *range(1, rank - 2)]


def to_first(rank: int) -> list[int]:
    """The axes that undo ``to_last``."""
    return [to_last(rank).index(axis) for axis in range(rank)]


class _Mover:
    """Writes ``main`` anew, binding by binding."""

    def __init__(self, main: Any) -> None:
        self.builder = relax.BlockBuilder()
        self.convs = 0
        self._main, self._view = main, View(main)
        #: New expressions by variable: as the model has it, and with its channels last; one of them at least.
        self._first: dict[Any, Any] = {param: param for param in main.params}
        self._last: dict[Any, Any] = {}

    def function(self) -> Any:
        """The new ``main``."""
        with self.builder.function("main", list(self._main.params), attrs=dict(self._main.attrs or {})):
            with self.builder.dataflow():
                for binding in self._main.body.blocks[0].bindings:
                    self._bind(binding)
                out = self.builder.emit_output(self.first(self._main.body.body))
            self.builder.emit_func_output(out)
        return relax.analysis.remove_all_unused(self.builder.get()["main"])

    def _bind(self, binding: Any) -> None:
        value = binding.value
        rule = _RULES.get(operator_of(value))
        moved = None if rule is None else rule(self, value)
        if moved is not None:
            self._last[binding.var] = self.builder.emit(moved)
        elif isinstance(value, relax.Var) and value in self._last:
            self._last[binding.var] = self._last[value]
        else:
            self._first[binding.var] = self.builder.emit(self._kept(value))

    def _kept(self, value: Any) -> Any:
        """``value`` on tensors as the model has them."""
        if isinstance(value, relax.Call):
            arguments = [self.first(argument) for argument in value.args]
            return relax.Call(value.op, arguments, value.attrs, value.ty_args)
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self.first(value.tuple_value), value.index)
        return self.first(value)

    def first(self, expr: Any) -> Any:
        """``expr`` as the model has it."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.first(field) for field in expr.fields])
        if not isinstance(expr, relax.Var):
            return expr
        if expr not in self._first:
            last = self._last[expr]
            self._first[expr] = self.builder.emit(relax.op.permute_dims(last, to_first(len(last.ty.shape))))
        return self._first[expr]

    def last(self, expr: Any) -> Any:
        """``expr`` with its channels last."""
        if expr not in self._last:
            rank = len(expr.ty.shape)
            self._last[expr] = self.builder.emit(relax.op.permute_dims(self.first(expr), to_last(rank)))
        return self._last[expr]

    def conv(self, call: Any) -> Any:
        weights, attrs = self._view.constant(call.args[1]), call.attrs
        plain = (attrs.data_layout, attrs.out_layout, attrs.kernel_layout) == ("NCHW", "NCHW", "OIHW")
        if weights is None or not plain:
            return None
        self.convs += 1
        return relax.op.nn.conv2d(
            self.last(call.args[0]), constant_like(weights.transpose(2, 3, 1, 0), weights),
            strides=attrs.strides, padding=attrs.padding, dilation=attrs.dilation, groups=int(attrs.groups),
            data_layout="NHWC", kernel_layout="HWIO", out_dtype=attrs.out_dtype,
        )  # fmt: skip

    def transposed_conv(self, call: Any) -> Any:
        weights = self._view.constant(call.args[1])
        conv = None if weights is None else as_conv(call, self.last(call.args[0]), weights)
        self.convs += conv is not None
        return conv

    def unary(self, call: Any) -> Any:
        if call.args[0] not in self._last:
            return None
        return relax.Call(call.op, [self._last[call.args[0]], *call.args[1:]], call.attrs, call.ty_args)

    def binary(self, call: Any) -> Any:
        rank = len(call.ty.shape)
        if not any(argument in self._last for argument in call.args if isinstance(argument, relax.Var)):
            return None
        arguments = []
        for argument in call.args:
            constant = self._view.constant(argument)
            if constant is not None:
                arguments.append(_constant_last(constant, rank))
            elif len(argument.ty.shape) == rank:
                arguments.append(self.last(argument))
            else:
                return None
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def pool(self, call: Any) -> Any:
        if call.args[0] not in self._last or call.attrs.layout != "NCHW":
            return None
        attrs, data = call.attrs, self._last[call.args[0]]
        if operator_of(call) == "nn.adaptive_avg_pool2d":
            return relax.op.nn.adaptive_avg_pool2d(data, attrs.output_size, layout="NHWC")
        make = relax.op.nn.max_pool2d if operator_of(call) == "nn.max_pool2d" else relax.op.nn.avg_pool2d
        return make(
            data, attrs.pool_size, strides=attrs.strides, padding=attrs.padding, dilation=attrs.dilation,
            ceil_mode=bool(attrs.ceil_mode), count_include_pad=bool(attrs.count_include_pad), layout="NHWC",
        )  # fmt: skip

    def reduction(self, call: Any) -> Any:
        if call.args[0] not in self._last or not call.attrs.keepdims or call.attrs.axis is None:
            return None
        rank = len(call.ty.shape)
        axes = [to_last(rank).index(int(axis) % rank) for axis in call.attrs.axis]
        make = getattr(relax.op, operator_of(call))
        return make(self._last[call.args[0]], axis=axes, keepdims=True)

    def concat(self, call: Any) -> Any:
        parts = self._view.value(call.args[0])
        if not isinstance(parts, relax.Tuple) or not any(part in self._last for part in parts.fields):
            return None
        rank = len(call.ty.shape)
        axis = to_last(rank).index(int(getattr(call.attrs.axis, "value", call.attrs.axis)) % rank)
        return relax.op.concat([self.last(part) for part in parts.fields], axis=axis)

    def reshape(self, call: Any) -> Any:
        """Channels split or merged, as in a channel shuffle."""
        before, after = _shape(call.args[0]), _shape(call)
        if call.args[0] not in self._last or before is None or after is None or len(after) < 4:
            return None
        if before[0] != after[0] or before[-2:] != after[-2:]:
            return None
        return relax.op.reshape(self._last[call.args[0]], [after[axis] for axis in to_last(len(after))])

    def permute(self, call: Any) -> Any:
        """Groups of channels swapped, as in a channel shuffle."""
        rank = len(call.ty.shape)
        if call.args[0] not in self._last or call.attrs.axes is None:
            return None
        axes = [int(axis) for axis in call.attrs.axes]
        if axes[0] != 0 or axes[-2:] != [rank - 2, rank - 1]:
            return None
        moved = [to_last(rank).index(axes[axis]) for axis in to_last(rank)]
        return relax.op.permute_dims(self._last[call.args[0]], moved)


def _constant_last(constant: Array, rank: int) -> Any:
    if constant.size == 1:
        return (
            constant_like(constant.reshape(()), constant) if constant.ndim <= 1 else constant_like(constant, constant)
        )
    whole = constant.reshape((1,) * (rank - constant.ndim) + constant.shape)
    return constant_like(np.transpose(whole, to_last(rank)), constant)


def _shape(expr: Any) -> tuple[int, ...] | None:
    sizes = getattr(getattr(expr, "ty", None), "shape", None)
    return None if sizes is None else tuple(int(size) for size in sizes)


_RULES: dict[str, Callable[[_Mover, Any], Any]] = {
    "nn.conv2d": _Mover.conv, "nn.conv2d_transpose": _Mover.transposed_conv, "concat": _Mover.concat,
    "reshape": _Mover.reshape, "permute_dims": _Mover.permute,
    **dict.fromkeys(_UNARY, _Mover.unary), **dict.fromkeys(_BINARY, _Mover.binary),
    **dict.fromkeys(_POOLS, _Mover.pool), **dict.fromkeys(_REDUCTIONS, _Mover.reduction),
}  # fmt: skip
