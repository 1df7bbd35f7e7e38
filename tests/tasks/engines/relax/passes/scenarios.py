"""Each model before and after its pass, compiled and run; in a fresh interpreter, since it imports TVM."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

#: By model the passes that it is about, in order; each model is compared with itself without them.
PASSES = {
    "clips": ["clip_bounds"],
    "arithmetic": ["plain_arithmetic"],
    "sums": ["sums"],
    "chain": ["affine_chains", "affine_chains"],
    "scale_after": ["affine_chains", "affine_after", "affine_chains"],
    "scale_after_grouped": ["affine_chains", "affine_after", "affine_chains"],
    "scale_before": ["affine_before"],
    "scale_before_grouped": ["affine_before"],
    "scale_before_padded": ["affine_before"],
    "matmul_between": ["simplify"],
    "network": ["channels_last"],
    "transposed": ["channels_last"],
    "few_rows": ["parallel_matmuls"],
    "many_rows": ["parallel_matmuls"],
    "weights_to_pack": ["channels_last", "packed_weights"],
    "groups_to_pack": ["channels_last", "packed_weights"],
    "rows_to_fill": ["channels_last", "packed_weights"],
    "exponentials": ["vector_exp"],
    "concatenated": ["concats"],
}


def run_all(folder: str) -> dict[str, Any]:
    """By model the operators of ``main`` before and after, and the largest difference of their outputs."""
    from tasks.engines.relax.bootstrap import import_tvm

    import_tvm("llvm")
    from tests.tasks.engines.relax.passes.models import MODELS

    found = {}
    for name, model in MODELS.items():
        path = Path(folder) / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        found[name] = _one(str(path), PASSES[name])
    return found


def _one(path: str, passes: list[str]) -> dict[str, Any]:
    import numpy as np
    import tvm
    from tvm import relax

    from tasks.engines.relax import frontend, targets
    from tasks.engines.relax.fold_constants import fold_constants

    target = targets.to_tvm(targets.resolve("cpu", 2))
    mod, _ = frontend.translate(path)
    first = [relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings()]
    before = fold_constants(tvm.transform.Sequential(first)(mod))
    after = before
    for name in passes:
        after = _apply(name, after)
    shape = [int(size) for size in before["main"].params[0].ty.shape]
    data = np.random.default_rng(1).uniform(-1, 1, shape).astype("float32")
    one, other = (_run(module, target, data) for module in (before, after))
    return {
        "before": _operators(before),
        "after": _operators(after),
        "difference": float(np.abs(one - other).max()),
        "magnitude": float(np.abs(one).max()),
    }


def _apply(name: str, mod: Any) -> Any:
    import importlib

    from tasks.engines.relax import passes

    if name == "simplify":
        return passes.simplify(mod)
    function = getattr(importlib.import_module(f"tasks.engines.relax.passes.{name}"), name)
    return function(mod, 8)[0] if name in ("packed_weights", "vector_exp") else function(mod)[0]


def _run(mod: Any, target: Any, data: Any) -> Any:
    import tvm
    from tvm import relax

    with tvm.transform.PassContext(opt_level=3):
        machine = relax.VirtualMachine(relax.build(mod, target=target), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()


def _operators(mod: Any) -> dict[str, int]:
    from tasks.engines.relax.passes.rewriting import operator_of

    counts: collections.Counter[str] = collections.Counter()
    for block in mod["main"].body.blocks:
        counts.update(operator_of(binding.value) for binding in block.bindings)
    counts.pop("", None)
    return dict(counts)
