"""Arithmetic and bytes of Relay operators, from their types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relay

_ELEMENTWISE = 2  # TVM's operator patterns: up to injective an operator computes each output once
_OUT_FUSABLE = 4


def pattern(call: Any) -> int:
    """TVM's operator pattern: 0 elementwise, 1 broadcast, 2 injective, 3 reduction, 4 conv and dense, 8 opaque."""
    value = call.op.get_attr("TOpPattern")
    return 8 if value is None else int(value)


def flops(call: Any) -> float:
    """Operations of one call of an operator."""
    out = call.checked_type
    size = sum(elements(part) for part in tensors(out))
    name = call.op.name
    if "conv" in name and isinstance(out, relay.TensorType) and len(call.args) > 1:
        return 2.0 * size * _reduced(call)
    if "dense" in name or "matmul" in name:
        return 2.0 * size * _inner(call)
    if pattern(call) >= 3:
        return float(max(size, sum(elements(part) for arg in call.args for part in tensors(arg.checked_type))))
    return float(size)


def tensors(type_: Any) -> list[Any]:
    """The tensor types in ``type_``, which may be a tuple."""
    return [part for field in type_.fields for part in tensors(field)] if hasattr(type_, "fields") else [type_]


def shape_of(type_: Any) -> tuple[int, ...]:
    """The sizes of a tensor type."""
    return tuple(int(size) for size in type_.shape)


def elements(type_: Any) -> int:
    """How many elements a tensor has."""
    return math.prod(shape_of(type_))


def size_bytes(type_: Any) -> int:
    """How many bytes a tensor has."""
    return elements(type_) * (1 if type_.dtype == "bool" else np.dtype(type_.dtype).itemsize)


def _reduced(call: Any) -> float:
    """Multiplications for each output of a convolution: the weight's elements over its output channels."""
    channels = call.attrs.channels if "channels" in call.attrs.keys() else None  # noqa: SIM118 - no mapping
    weight = elements(call.args[1].checked_type)
    if channels is None:
        layout = str(getattr(call.attrs, "kernel_layout", "OIHW"))
        channels = shape_of(call.args[1].checked_type)[max(layout.find("O"), 0)]
    return weight / max(1, int(channels))


def _inner(call: Any) -> float:
    """The length of a product's sum."""
    a, b = (elements(arg.checked_type) for arg in call.args[:2])
    out = elements(call.checked_type)
    batch = shape_of(call.checked_type)[0] if "batch" in call.op.name else 1
    # (m k)(k n) / (m n) is k squared; with a batch each of the three has it once.
    return math.sqrt(max(1.0, a * b / max(1, out) / max(1, batch)))
