"""Folds constant expressions with numpy, where TVM's FoldConstant compiles each of them.

That took 40 s for a small model, most of it for the weights of convolutions in their blocked layout. What
this pass does not know is left to TVM's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relay

from tasks.engines.relay.rewriting import rebuild

#: Larger results are left alone: a broadcast of a scalar is cheaper to compute than to store.
_LARGEST_GROWTH = 4
_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt, "negative": np.negative, "exp": np.exp, "abs": np.abs,
    "rsqrt": lambda x: (1.0 / np.sqrt(x)).astype(x.dtype),
}  # fmt: skip
_RESHAPES = ("reshape", "expand_dims", "squeeze", "nn.batch_flatten")


def fold_constants(mod: Any) -> Any:
    """``mod``, its types inferred, with the constant expressions of ``main`` folded."""
    mod = relay.transform.InferType()(mod)
    func = rebuild(mod["main"], _fold)
    folded = tvm.IRModule(dict(mod.functions_items()) if hasattr(mod, "functions_items") else dict(mod.functions))
    folded["main"] = func
    return relay.transform.InferType()(folded)


def _fold(old: Any, new: Any) -> Any:
    """The constant that ``new`` computes, or ``new``. ``old`` has the inferred type."""
    name = getattr(old.op, "name", "")
    if not new.args or not all(isinstance(arg, relay.Constant) for arg in new.args):
        return new
    type_ = old.checked_type
    if not isinstance(type_, relay.TensorType):
        return new
    values = [arg.data.numpy() for arg in new.args]
    result = _evaluate(name, old, values)
    if result is None:
        return new
    result = np.asarray(result)
    shape = tuple(int(size) for size in type_.shape)
    if result.shape != shape or result.nbytes > _LARGEST_GROWTH * max(64, sum(v.nbytes for v in values)):
        return new
    return relay.const(np.array(result, order="C"), type_.dtype)


def _evaluate(name: str, call: Any, values: Sequence[Any]) -> Any:
    with np.errstate(all="ignore"):
        if name in _BINARY:
            # Integers divide differently in numpy; such a division is left to TVM.
            return None if name == "divide" and values[0].dtype.kind != "f" else _BINARY[name](*values)
        if name in _UNARY:
            return _UNARY[name](values[0])
    if name in _RESHAPES:
        return values[0].reshape(tuple(int(size) for size in call.checked_type.shape))
    if name == "transpose":
        axes = call.attrs.axes
        return np.transpose(values[0], None if axes is None else [int(axis) for axis in axes])
    if name == "cast":
        return values[0].astype(call.attrs.dtype)
    if name == "layout_transform":
        return transform_layout(values[0], call.attrs.src_layout, call.attrs.dst_layout)
    return None


def transform_layout(array: Any, source: str, destination: str) -> Any:
    """``array`` from one of TVM's layouts to another, such as ``OIHW`` to ``OIHW8i8o``; None where sizes do not fit."""
    src, dst = _axes(source), _axes(destination)
    names = [name for name, factor in src if not factor]
    order, merged = [], []
    for name in names:
        parts = [i for i, (axis, factor) in enumerate(src) if axis.upper() == name and not factor]
        parts += [i for i, (axis, factor) in enumerate(src) if axis.upper() == name and factor]
        order += parts
        merged.append(int(np.prod([array.shape[i] for i in parts])))
    plain = array.transpose(order).reshape(merged)
    split: list[int] = []
    position: dict[int, int] = {}
    for name, size in zip(names, merged):  # noqa: B905 - Python 3.9 has no strict
        inner = [i for i, (axis, factor) in enumerate(dst) if axis.upper() == name and factor]
        outer = [i for i, (axis, factor) in enumerate(dst) if axis == name and not factor]
        block = int(np.prod([dst[i][1] for i in inner]))
        if len(outer) != 1 or size % block:
            return None
        for index, extent in ((outer[0], size // block), *((i, dst[i][1]) for i in inner)):
            position[index] = len(split)
            split.append(extent)
    if len(position) != len(dst):
        return None
    return plain.reshape(split).transpose([position[i] for i in range(len(dst))])


def _axes(layout: str) -> list[tuple[str, int]]:
    """``OIHW8i`` as (O, 0), (I, 0), (H, 0), (W, 0), (i, 8)."""
    return [(name, int(factor or 0)) for factor, name in re.findall(r"(\d*)([A-Za-z])", layout)]
