"""Clip's bounds: the ONNX front end makes a kernel of each, with the bound as a tensor argument."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tasks.engines.relax.passes.rewriting import View, operator_of, rewrite


def clip_bounds(mod: Any) -> tuple[Any, int]:
    """``min(max(x, 0), 6)`` with constant numbers as one ``clip(x, 0, 6)``."""
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    upper = _bound(call, view, "minimum")
    lower = None if upper is None else _bound(view.value(upper[0]), view, "maximum")
    if upper is None or lower is None or lower[1] > upper[1]:
        return None
    return relax.op.clip(lower[0], lower[1], upper[1])


def _bound(call: Any, view: View, name: str) -> tuple[Any, float] | None:
    """The tensor and the number where ``call`` is a maximum or minimum of these."""
    if operator_of(call) == "call_tir":
        # Kernels of these names are the front end's own: nobody else has made any yet.
        found, arguments = str(call.args[0].name_hint).rstrip("0123456789"), call.args[1].fields
    else:
        found, arguments = operator_of(call), getattr(call, "args", ())
    if found != name:
        return None
    number = view.constant(arguments[1])
    if number is None or number.size != 1 or number.ndim > len(arguments[0].ty.shape):
        return None
    return arguments[0], float(number.reshape(()))
