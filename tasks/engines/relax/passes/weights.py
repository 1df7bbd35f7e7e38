"""Convs and matmuls with constant weights, as the folding passes see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from tasks.engines.relax.passes.rewriting import Array, View, constant_like, operator_of

CONVS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
WEIGHTED = (*CONVS, "matmul")


@dataclass(frozen=True)
class Weighted:
    """A call of a conv or matmul whose weights are constant, and the axis of its channels."""

    call: Any
    weights: Array

    @property
    def is_conv(self) -> bool:
        return operator_of(self.call) in CONVS

    @property
    def rank(self) -> int:
        """Dimensions of input and output."""
        return self.weights.ndim if self.is_conv else len(self.call.args[0].ty.shape)

    @property
    def channel_axis(self) -> int:
        return 1 if self.is_conv else -1

    @property
    def is_padded(self) -> bool:
        return self.is_conv and any(int(size) for size in self.call.attrs.padding)

    def with_weights(self, weights: Array, data: Any = None) -> Any:
        """The same call with other weights, and other data where given."""
        arguments = [self.call.args[0] if data is None else data, constant_like(weights, self.weights)]
        return relax.Call(self.call.op, arguments, self.call.attrs, self.call.ty_args)

    def per_output(self, scale: Array) -> Array:
        """``scale``, a vector over output channels or a single number, shaped to multiply the weights."""
        return scale.reshape((-1,) + (1,) * (self.weights.ndim - 1)) if self.is_conv else scale

    def per_input(self, scale: Array) -> Array:
        """``scale``, a vector over input channels or a single number, shaped to multiply the weights."""
        if not self.is_conv:
            return scale.reshape(-1, 1)
        ones = (1,) * (self.weights.ndim - 2)
        if scale.size == 1:
            return scale.reshape((1, 1, *ones))
        # Output channel o of a grouped conv reads the inputs of its group alone.
        groups, outputs = int(self.call.attrs.groups), self.weights.shape[0]
        by_group = scale.reshape(groups, -1)
        return np.repeat(by_group, outputs // groups, axis=0).reshape(outputs, -1, *ones)

    def summed(self, weights: Array) -> Array:
        """``weights`` summed over what one output reads: a vector over output channels."""
        axes = tuple(range(1, weights.ndim)) if self.is_conv else (0,)
        return np.asarray(np.sum(weights, axis=axes, dtype=np.float64))


def weighted(call: Any, view: View) -> Weighted | None:
    """``call`` where it is a conv in NC* or a matmul with constant floating-point weights."""
    name = operator_of(call)
    if name not in WEIGHTED:
        return None
    weights = view.constant(call.args[1])
    if weights is None or weights.dtype.kind != "f":
        return None
    if name == "matmul":
        return Weighted(call, weights) if weights.ndim == 2 and len(call.args[0].ty.shape) >= 2 else None
    plain = str(call.attrs.data_layout).startswith("NC") and str(call.attrs.kernel_layout).startswith("OI")
    return Weighted(call, weights) if plain and call.attrs.data_layout == call.attrs.out_layout else None
