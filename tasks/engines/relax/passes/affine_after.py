"""A product behind a conv or matmul is a product of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tasks.engines.relax.passes.rewriting import View, along, operator_of, rewrite
from tasks.engines.relax.passes.weights import WEIGHTED, weighted


def affine_after(mod: Any) -> tuple[Any, int]:
    """``conv(x, w) * scale`` as ``conv(x, w * scale)`` for a number or one scale an output channel.

    What is added behind it is its bias already.
    """
    return rewrite(mod, _rule)


def _rule(call: Any, view: View) -> Any:
    if operator_of(call) != "multiply":
        return None
    found = view.with_constant(call)
    if found is None:
        return None
    inner = weighted(view.sole_call(found[0], *WEIGHTED), view)
    scale = None if inner is None else along(found[1], inner.channel_axis, inner.rank)
    if inner is None or scale is None or scale.size not in (1, _outputs(inner)):
        return None
    return inner.with_weights(inner.weights.astype(np.float64) * inner.per_output(scale.astype(np.float64)))


def _outputs(inner: Any) -> int:
    return int(inner.weights.shape[0 if inner.is_conv else 1])
