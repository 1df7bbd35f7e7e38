"""What QuantizeLinear and DequantizeLinear mean, as the integer passes see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View

#: dtypes whose distance from any zero point fits 16 bits.
_BYTES = ("int8", "uint8")


@dataclass(frozen=True)
class Scaled:
    """A call of quantize or dequantize with one scale and one zero point for the whole tensor."""

    tensor: Any
    scale: Array
    zero: int
    #: The dtype of the quantised side.
    dtype: str

    def same(self, other: Scaled) -> bool:
        """Does the same integer mean the same number?"""
        return (float(self.scale), self.zero, self.dtype) == (float(other.scale), other.zero, other.dtype)

    def quantised(self, distance: Any) -> Any:
        """What has this distance from the zero point (int16), as the model has it."""
        return relax.op.astype(relax.op.add(distance, relax.const(self.zero, "int16")), self.dtype)


@dataclass(frozen=True)
class Integers:
    """A dequantised constant: ``values * scale``, where ``scale`` is a number or broadcast along one axis."""

    values: Array
    scale: Array

    @property
    def real(self) -> Array:
        """The numbers that are meant, float64."""
        return np.asarray(self.values * self.scale.astype(np.float64))


def scaled(call: Any, view: View) -> Scaled | None:
    """``call``, a quantize or dequantize, where it has one scale and is about bytes; None for constants."""
    if call is None or view.constant(call.args[0]) is not None:
        return None
    scale, zero = view.constant(call.args[1]), view.constant(call.args[2])
    tensor = call.args[0]
    dtype = str((call if "int" in str(call.ty.dtype) else tensor).ty.dtype)
    if scale is None or zero is None or scale.size != 1 or zero.size != 1 or dtype not in _BYTES:
        return None
    return Scaled(tensor, scale.reshape(()), int(zero.reshape(())), dtype)


def distance(of: Scaled) -> Any:
    """How far the quantised tensor of a dequantize is from its zero point, int16: exact."""
    return relax.op.subtract(relax.op.astype(of.tensor, "int16"), relax.const(of.zero, "int16"))


def integers(expr: Any, view: View) -> Integers | None:
    """The constant that ``expr`` dequantises, or reshapes or transposes after that."""
    call = view.call(expr, "dequantize", "reshape", "permute_dims")
    if call is None:
        return None
    if view.call(expr, "dequantize") is None:
        inner = integers(call.args[0], view)
        return None if inner is None else _moved(call, inner)
    values, scale, zero = (view.constant(argument) for argument in call.args)
    if values is None or scale is None or zero is None or values.dtype.kind not in "iu":
        return None
    if scale.size > 1:
        shape = [1] * values.ndim
        shape[int(call.attrs.axis)] = -1
        scale, zero = scale.reshape(shape), zero.reshape(shape) if zero.size > 1 else zero.reshape(())
    else:
        scale, zero = scale.reshape(()), zero.reshape(())
    return Integers(values.astype(np.int64) - zero.astype(np.int64), scale)


def _moved(call: Any, inner: Integers) -> Integers:
    scale = np.broadcast_to(inner.scale, inner.values.shape)
    if call.op.name == "relax.permute_dims":
        axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
        return Integers(inner.values.transpose(axes), scale.transpose(axes))
    shape = [int(size) for size in call.ty.shape]
    return Integers(inner.values.reshape(shape), scale.reshape(shape))
