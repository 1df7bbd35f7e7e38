"""The part of relay_layouts.py that runs in the relay engine's interpreter. Python 3.10."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tasks.engines.relay.bootstrap import import_tvm

tvm = import_tvm()

import numpy as np  # noqa: E402 - TVM is imported in a way of its own
from tvm.contrib import cc, graph_executor  # noqa: E402

from tasks.engines.measuring.workshop import kernel_symbol  # noqa: E402
from tasks.engines.relay import candidates, frontend, graph, layouts, subgraphs, targets  # noqa: E402

RULES = ("TVM's own", "none", "4", "8", "16", "32")


def main() -> None:
    """Build by every rule, then race."""
    request = json.loads(sys.argv[1])
    target = targets.to_tvm(targets.resolve("cpu", int(request["threads"])))
    built: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for rule in RULES:
        inventory = subgraphs.take_inventory(_fused(request["path"], target, rule))
        rows[rule] = {"transforms": _transforms(inventory), "samples_ms": []}
        built[rule] = _load(inventory, target)
    for index in range(int(request["rounds"])):
        order = [*RULES[index % len(RULES) :], *RULES[: index % len(RULES)]]
        for rule in order:
            rows[rule]["samples_ms"].append(_time_ms(built[rule]))
    print(json.dumps(rows))


def _fused(path: str, target: Any, rule: str) -> Any:
    mod, _ = frontend.translate(path)
    if rule == "none":
        return frontend.fuse(mod, target, None)
    if rule == "TVM's own":
        return frontend.fuse(mod, target, tvm.autotvm.task.FallbackContext())
    return frontend.fuse(mod, target, layouts.BlockedLayouts(int(rule)))


def _transforms(inventory: Any) -> int:
    return sum(s.weight for s in inventory.subgraphs if "layout_transform" in s.operators)


def _load(inventory: Any, target: Any) -> Any:
    """The model by TVM's graph executor."""
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for subgraph in inventory.subgraphs:
            func = inventory.workloads[subgraph.workload_key]
            library = candidates.compile_kernel(func, target, None, kernel_symbol(subgraph.workload_key))
            objects.append(str(Path(folder) / f"{subgraph.workload_key}.o"))
            library.save(objects[-1])
        path = str(Path(folder) / "model.so")
        cc.create_shared(path, objects)
        symbols = {subgraph.name: kernel_symbol(subgraph.workload_key) for subgraph in inventory.subgraphs}
        made = graph.graph_of(inventory.func, inventory.kernel_calls, symbols)
        module = graph_executor.create(made.text, tvm.runtime.load_module(path), tvm.cpu(0))
    module.load_params(tvm.runtime.save_param_dict(made.constants))
    generator = np.random.default_rng(0)
    for param in inventory.func.params:
        shape = [int(size) for size in param.checked_type.shape]
        module.set_input(param.name_hint, generator.standard_normal(shape).astype(param.checked_type.dtype))
    return module


def _time_ms(module: Any) -> float:
    module.run()
    start = time.perf_counter()
    for _ in range(5):
        module.run()
    return (time.perf_counter() - start) * 200


if __name__ == "__main__":
    main()
