"""The relax engine's side of granularity.py: Relax subgraphs, MetaSchedule traces."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.trace_apply import schedule_using_anchor_trace

from benchmarks.granularity_child import Case, Driver, Form, named_shapes
from tasks.engines.relax import frontend, targets
from tasks.engines.relax.cost_model import Samples, XgbCostModel
from tasks.engines.relax.search import TaskSearch, replay
from tasks.engines.relax.subgraphs import arguments, take_inventory
from tasks.records import FusedSubgraph, TuningTask

#: Rounds of sampling that may bring fewer candidates than asked for.
_PATIENCE = 4


class RelaxDriver(Driver):
    """A candidate is a trace of the operator alone; TVM applies it to the operator's block in the subgraph."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._spec = targets.resolve("cpu", int(options["threads"]))
        self._target = targets.to_tvm(self._spec)
        self._workloads: dict[str, Any] = {}
        self._subgraphs: dict[str, FusedSubgraph] = {}

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
        alone, fused = self._workloads[case.anchor], self._workloads[case.subgraph]
        pairs: list[tuple[Form, Form]] = []
        with tempfile.TemporaryDirectory() as folder:
            search = TaskSearch(self._task(case, Path(folder)), self._target, XgbCostModel(Samples(), 1, seed))
            for attempt in range(_PATIENCE + count // 8):
                for candidate in search.propose(min(16, count), seed + attempt):
                    pair = self._pair(case, (alone, fused), candidate.trace)
                    if pair is not None and len(pairs) < count:
                        pairs.append(pair)
                if len(pairs) >= count or search.exhausted:
                    break
        return pairs

    def _pair(self, case: Case, mods: tuple[Any, Any], trace: str) -> tuple[Form, Form] | None:
        """Both forms of a candidate; None where TVM cannot apply the trace to the subgraph."""
        alone, fused = mods
        try:
            tuned = replay(alone, trace)
            schedule = Schedule(fused)
            schedule_using_anchor_trace(schedule, tuned.trace, self._target)
        except Exception:
            return None
        return (
            Form(case.anchor, self._part(tuned.mod), arguments(alone)),
            Form(case.subgraph, self._part(schedule.mod), arguments(fused)),
        )

    def _part(self, mod: Any) -> dict[str, Any]:
        return {"mod": tvm.ir.save_json(tvm.IRModule({"main": mod["main"]})), "target": self._spec.spec}

    def _task(self, case: Case, folder: Path) -> TuningTask:
        """The anchor operator as a tuning task."""
        path = folder / f"{case.anchor}.json"
        path.write_text(tvm.ir.save_json(self._workloads[case.anchor]))
        subgraph = self._subgraphs[case.subgraph]
        return TuningTask(
            workload_key=case.anchor, name=case.name, target_key=self._spec.key, weight=1, flops=subgraph.flops,
            bytes_moved=subgraph.bytes_moved, expected_share=1.0, workload_path=str(path), subgraph=subgraph,
        )  # fmt: skip

    def _of_module(self, name: str, mod: Any) -> list[Case]:
        """The subgraphs of ``mod`` that are a convolution or a product with something fused to it."""
        inventory = take_inventory(frontend.fuse(mod, self._target))
        self._workloads |= {key: workload.mod for key, workload in inventory.workloads.items()}
        cases = []
        for subgraph in inventory.subgraphs:
            if len(subgraph.operators) < 2 or not subgraph.anchor_operator.startswith(("conv", "matmul", "depthwise")):
                continue
            self._subgraphs[subgraph.workload_key] = subgraph
            single = name.startswith(("int8", "float32"))
            label = name if single else f"{name}/{subgraph.name}"
            cases.append(Case(label, subgraph.workload_key, subgraph.anchor_key))
        return cases


def int8_subgraph(cin: int, cout: int, size: int, kernel: int) -> Any:
    """conv (int8 to int32), bias, requantise by a scale and rounding, clip, cast to int8; channels last."""
    generator = np.random.default_rng(0)
    weight = relax.const(generator.integers(-128, 128, (kernel, kernel, cin, cout)).astype("int8"), "int8")
    bias = relax.const(generator.integers(-1000, 1000, (cout,)).astype("int32"), "int32")
    data = relax.Var("data", relax.TensorType((1, size, size, cin), "int8"))

    def body(builder: Any) -> Any:
        conv = builder.emit(_conv(data, weight, kernel, "int32"))
        total = builder.emit(relax.op.astype(builder.emit(relax.op.add(conv, bias)), "float32"))
        scaled = builder.emit(relax.op.round(builder.emit(relax.op.multiply(total, relax.const(1.3e-3, "float32")))))
        clipped = builder.emit(relax.op.clip(scaled, -128.0, 127.0))
        return builder.emit_output(relax.op.astype(clipped, "int8"))

    return _module([data], body)


def float_subgraph(cin: int, cout: int, size: int, kernel: int) -> Any:
    """conv, bias, sum with another tensor, relu; channels last."""
    generator = np.random.default_rng(0)
    weight = relax.const(generator.standard_normal((kernel, kernel, cin, cout)).astype("float32"), "float32")
    bias = relax.const(generator.standard_normal((cout,)).astype("float32"), "float32")
    data = relax.Var("data", relax.TensorType((1, size, size, cin), "float32"))
    other = relax.Var("other", relax.TensorType((1, size, size, cout), "float32"))

    def body(builder: Any) -> Any:
        conv = builder.emit(_conv(data, weight, kernel, "float32"))
        total = builder.emit(relax.op.add(builder.emit(relax.op.add(conv, bias)), other))
        return builder.emit_output(relax.op.nn.relu(total))

    return _module([data, other], body)


def _conv(data: Any, weight: Any, kernel: int, out_dtype: str) -> Any:
    return relax.op.nn.conv2d(
        data, weight, padding=kernel // 2, data_layout="NHWC", kernel_layout="HWIO", out_dtype=out_dtype
    )


def _module(params: list[Any], body: Any) -> Any:
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = body(builder)
        builder.emit_func_output(output)
    return builder.get()
