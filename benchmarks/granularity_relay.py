"""The relay engine's side of granularity.py: Relay subgraphs, AutoTVM configs. Python 3.10."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relay

from benchmarks.granularity_child import Case, Driver, Form, named_shapes
from tasks.engines.relay import frontend, targets
from tasks.engines.relay.spaces import Space, spaces_of
from tasks.engines.relay.subgraphs import arguments, take_inventory


class RelayDriver(Driver):
    """A candidate is an implementation and a config: the same for the operator alone and in its subgraph."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._spec = targets.resolve("cpu", int(options["threads"]))
        self._target = targets.to_tvm(self._spec)
        self._workloads: dict[str, Any] = {}

    def cases(self) -> list[Case]:
        found: list[Case] = []
        most = int(self._options["shapes"])
        for kind, build in (("int8", int8_subgraph), ("float32", float_subgraph)):
            for name, shape in list(named_shapes(kind))[: most or None]:
                found += self._of_module(name, build(*shape))
        for name, path in self._options["models"].items():
            found += self._of_module(name, frontend.translate(path)[0])
        return found

    def candidates(self, case: Case, count: int, seed: int) -> list[tuple[Form, Form]]:
        fused, alone = self._workloads[case.subgraph], self._workloads[case.anchor]
        choices = [choice for space in spaces_of(fused, self._target) for choice in _sample(space, count, seed)]
        random.Random(seed).shuffle(choices)
        return [
            (self._form(case.anchor, alone, choice), self._form(case.subgraph, fused, choice))
            for choice in choices[:count]
        ]

    def _form(self, key: str, func: Any, choice: Any) -> Form:
        text = str(tvm.ir.save_json(tvm.IRModule({"main": func})))
        return Form(key, {"func": text, "choice": choice.to_text(), "target": self._spec.spec}, arguments(func))

    def _of_module(self, name: str, mod: Any) -> list[Case]:
        """The subgraphs of ``mod`` that have a template and more than one operator."""
        inventory = take_inventory(frontend.fuse(mod, self._target))
        cases = []
        for subgraph in inventory.subgraphs:
            heavy = any(name in subgraph.anchor_operator for name in ("conv", "dense", "matmul"))
            if len(subgraph.operators) < 2 or not heavy:
                continue
            self._workloads[subgraph.workload_key] = inventory.workloads[subgraph.workload_key]
            self._workloads[subgraph.anchor_key] = inventory.workloads[subgraph.anchor_key]
            single = name.startswith(("int8", "float32"))
            label = name if single else f"{name}/{subgraph.name}"
            cases.append(Case(label, subgraph.workload_key, subgraph.anchor_key))
        return cases


def _sample(space: Space, count: int, seed: int) -> list[Any]:
    if space.configs is None:
        return [space.choice(None)]
    length = int(getattr(space.configs, "range_length", len(space.configs)))
    valid = [i for i in range(length) if space.configs.is_index_valid(i)] if length <= 4096 else list(range(length))
    return [space.choice(i) for i in random.Random(seed).sample(valid, min(count, len(valid)))]


def int8_subgraph(cin: int, cout: int, size: int, kernel: int) -> Any:
    """conv (int8 to int32), bias, requantise by a multiplication and a shift, clip, cast to int8."""
    generator = np.random.default_rng(0)
    data = relay.var("data", shape=(1, cin, size, size), dtype="int8")
    weight = relay.const(generator.integers(-128, 128, (cout, cin, kernel, kernel)).astype("int8"))
    bias = relay.const(generator.integers(-1000, 1000, (cout, 1, 1)).astype("int32"))
    conv = relay.nn.conv2d(
        data, weight, channels=cout, kernel_size=(kernel, kernel), padding=(kernel // 2,) * 2, out_dtype="int32"
    )
    scaled = relay.fixed_point_multiply(relay.add(conv, bias), 1395864371, -9)
    clipped = relay.cast(relay.clip(scaled, -128, 127), "int8")
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([data], clipped)))


def float_subgraph(cin: int, cout: int, size: int, kernel: int) -> Any:
    """conv, bias, sum with another tensor, relu."""
    generator = np.random.default_rng(0)
    data = relay.var("data", shape=(1, cin, size, size), dtype="float32")
    other = relay.var("other", shape=(1, cout, size, size), dtype="float32")
    weight = relay.const(generator.standard_normal((cout, cin, kernel, kernel)).astype("float32"))
    bias = relay.const(generator.standard_normal((cout, 1, 1)).astype("float32"))
    conv = relay.nn.conv2d(data, weight, channels=cout, kernel_size=(kernel, kernel), padding=(kernel // 2,) * 2)
    total = relay.nn.relu(relay.add(relay.add(conv, bias), other))
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([data, other], total)))
