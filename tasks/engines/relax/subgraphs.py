"""What the fused module consists of: its subgraphs, their anchors, and the calls between them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.s_tir.meta_schedule.arg_info import ArgInfo

from tasks.engines.relax.frontend import Fused
from tasks.engines.relax.implementations import Workload, recipe_of
from tasks.records import FusedSubgraph, SubgraphCall, TensorSpec

_HASH_MASK = (1 << 64) - 1

#: One operator of a subgraph: the name and the PrimFunc it was lowered to.
Part = tuple[str, Any]


@dataclass(frozen=True)
class Inventory:
    """All subgraphs of a module, the calls in order, and by key the workloads: subgraphs, and their anchors alone."""

    subgraphs: tuple[FusedSubgraph, ...]
    calls: tuple[SubgraphCall, ...]
    workloads: dict[str, Workload]


def structural_key(mod: Any) -> str:
    """A name for ``mod`` that does not depend on names in it, the same in every process."""
    return f"{tvm_ffi.structural_hash(mod) & _HASH_MASK:016x}"


def as_workload(func: Any) -> Any:
    """``func`` (a PrimFunc) as a module of its own, whatever it was called."""
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


def prim_funcs(mod: Any) -> dict[str, Any]:
    """The kernels of ``mod`` by name."""
    return {gv.name_hint: func for gv, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)}


def arguments(mod: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a workload's parameters; the last ones are its outputs."""
    infos = ArgInfo.from_prim_func(mod["main"])
    return [(tuple(int(size) for size in info.shape), str(info.dtype)) for info in infos]


def take_inventory(fused: Fused) -> Inventory:
    """List the subgraphs of ``fused``. Functions that are structurally equal are one subgraph."""
    kernels = prim_funcs(fused.lowered)
    operators = _operators_by_kernel(fused.grouped)
    single = prim_funcs(fused.grouped)
    calls, outputs_of = _calls(fused.lowered)
    weights: dict[str, int] = {}
    for call in calls:
        weights[call.subgraph] = weights.get(call.subgraph, 0) + 1
    merged: dict[str, FusedSubgraph] = {}
    workloads: dict[str, Workload] = {}
    name_of: dict[str, str] = {}
    for name, weight in weights.items():
        parts = [(part, single[part]) for part in operators.get(name, [name])]
        workload = Workload(as_workload(kernels[name]), recipe_of(fused.grouped, name))
        found = _describe(name, workload.mod, parts, (weight, outputs_of[name]))
        found = dataclasses.replace(found, implementations=tuple(workload.plans(fused.target)))
        earlier = merged.get(found.workload_key)
        name_of[name] = earlier.name if earlier else name
        if earlier:
            found = dataclasses.replace(earlier, weight=earlier.weight + weight)
        merged[found.workload_key] = found
        workloads[found.workload_key] = workload
        workloads.setdefault(found.anchor_key, Workload(as_workload(_anchor(parts)[1])))
    renamed = tuple(SubgraphCall(name_of[call.subgraph], call.feeds_from) for call in calls)
    return Inventory(tuple(merged.values()), renamed, workloads)


def _describe(name: str, mod: Any, parts: list[Part], use: tuple[int, int]) -> FusedSubgraph:
    weight, n_outputs = use
    args = arguments(mod)
    specs = [TensorSpec(f"arg{i}", shape, dtype) for i, (shape, dtype) in enumerate(args)]
    anchor_name, anchor = _anchor(parts)
    anchor_args = arguments(as_workload(anchor))
    return FusedSubgraph(
        name=name,
        workload_key=structural_key(mod),
        anchor_key=structural_key(as_workload(anchor)),
        operators=tuple(_operator_name(part) for part, _ in parts),
        anchor_operator=_operator_name(anchor_name),
        inputs=tuple(specs[:-n_outputs]),
        outputs=tuple(specs[-n_outputs:]),
        anchor_output_dtype=anchor_args[-1][1],
        output_dtype=specs[-1].dtype,
        flops=sum(_flops(func) for _, func in parts),
        bytes_moved=sum(_size_bytes(shape, dtype) for shape, dtype in args),
        weight=weight,
    )


def _anchor(parts: list[Part]) -> Part:
    """The operator with the most arithmetic, the first where several have."""
    return max(parts, key=lambda part: _flops(part[1]))


def _flops(func: Any) -> float:
    try:
        return float(estimate_tir_flops(tvm.IRModule({"main": func})))
    except Exception:
        # TVM counts no operators inside data-dependent code; such a kernel sorts last.
        return 0.0


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    bits = tvm_ffi.dtype(dtype).itemsize * 8
    return math.prod(shape) * bits // 8


def _operator_name(name: str) -> str:
    """The operator that a function was lowered from: its name without the number that made it unique."""
    return name.rstrip("0123456789")


def _operators_by_kernel(grouped: Any) -> dict[str, list[str]]:
    """For each fused function the names of the PrimFuncs in it, in order."""
    found: dict[str, list[str]] = {}
    for gv, func in grouped.functions_items():
        if not isinstance(func, relax.Function) or not (func.attrs and "Primitive" in func.attrs):
            continue
        found[gv.name_hint] = [
            binding.value.args[0].name_hint
            for block in func.body.blocks
            for binding in block.bindings
            if _is_call_tir(binding.value)
        ]
    return found


def _is_call_tir(expr: Any) -> bool:
    return isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.call_tir"


def _calls(mod: Any) -> tuple[list[SubgraphCall], dict[str, int]]:
    """The kernel calls of ``main`` in order, and how many outputs each kernel has."""
    calls: list[SubgraphCall] = []
    outputs_of: dict[str, int] = {}
    feeders: dict[Any, tuple[int, ...]] = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            sources = _sources(binding.value, feeders)
            if _is_call_tir(binding.value):
                name = binding.value.args[0].name_hint
                type_ = binding.value.ty_args[0] if binding.value.ty_args else None
                fields = getattr(type_, "fields", None)
                outputs_of[name] = len(fields) if fields is not None else 1
                calls.append(SubgraphCall(name, sources))
                sources = (len(calls) - 1,)
            feeders[binding.var] = sources
    return calls, outputs_of


def _sources(expr: Any, feeders: dict[Any, tuple[int, ...]]) -> tuple[int, ...]:
    """The calls whose results ``expr`` reads."""
    found: set[int] = set()

    def visit(node: Any) -> None:
        if isinstance(node, relax.Var):
            found.update(feeders.get(node, ()))

    relax.analysis.post_order_visit(expr, visit)
    return tuple(sorted(found))
