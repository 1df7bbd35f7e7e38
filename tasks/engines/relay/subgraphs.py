"""What the fused module consists of: its primitive functions, their anchors, and the calls between them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relay

from tasks.engines.relay import costs
from tasks.engines.relay.rewriting import children, post_order
from tasks.records import FusedSubgraph, SubgraphCall, TensorSpec

_HASH_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class KernelCall:
    """A node of ``main`` that runs: a kernel, or with no name a reshape that only renames memory."""

    node: Any
    subgraph: str


@dataclass
class Inventory:
    """All subgraphs of a module with their workloads (primitive functions) by key, and the calls in order."""

    func: Any
    subgraphs: tuple[FusedSubgraph, ...] = ()
    calls: tuple[SubgraphCall, ...] = ()
    workloads: dict[str, Any] = field(default_factory=dict)
    kernel_calls: tuple[KernelCall, ...] = ()


def structural_key(func: Any) -> str:
    """A name for ``func`` that does not depend on names in it, the same in every process."""
    return f"{int(tvm.ir.structural_hash(func, map_free_vars=True)) & _HASH_MASK:016x}"


def arguments(func: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a workload's arguments as its kernel has them; the last ones are its outputs."""
    types = [part for param in func.params for part in costs.tensors(param.checked_type)]
    types += costs.tensors(func.ret_type)
    return [(costs.shape_of(type_), str(type_.dtype)) for type_ in types]


def take_inventory(mod: Any) -> Inventory:
    """List the subgraphs of ``mod``. Functions that are structurally equal are one subgraph."""
    found = Inventory(mod["main"])
    merged: dict[str, FusedSubgraph] = {}
    calls: list[SubgraphCall] = []
    kernel_calls: list[KernelCall] = []
    feeders: dict[Any, tuple[int, ...]] = {}
    for node in post_order(mod["main"]):
        sources = tuple(sorted({index for child in children(node) for index in feeders.get(child, ())}))
        if isinstance(node, relay.Call):
            if _only_renames(node.op):
                kernel_calls.append(KernelCall(node, ""))
            else:
                name = _count_call(node.op, merged, found.workloads)
                kernel_calls.append(KernelCall(node, name))
                calls.append(SubgraphCall(name, sources))
                sources = (len(calls) - 1,)
        feeders[node] = sources
    found.subgraphs, found.calls, found.kernel_calls = tuple(merged.values()), tuple(calls), tuple(kernel_calls)
    return found


def _only_renames(func: Any) -> bool:
    return bool(func.attrs and "relay.reshape_only" in func.attrs.keys())  # noqa: SIM118 - no mapping


def _count_call(func: Any, merged: dict[str, FusedSubgraph], workloads: dict[str, Any]) -> str:
    """One more call of the primitive function ``func``; the name of its subgraph."""
    key = structural_key(func)
    known = merged.get(key)
    if known is not None:
        merged[key] = dataclasses.replace(known, weight=known.weight + 1)
        return known.name
    taken = {subgraph.name for subgraph in merged.values()}
    merged[key] = _describe(func, key, taken)
    workloads[key] = func
    anchor = anchor_workload(func)
    workloads.setdefault(structural_key(anchor), anchor)
    return merged[key].name


def _describe(func: Any, key: str, taken: set[str]) -> FusedSubgraph:
    operators = operators_of(func)
    anchor = anchor_of(func)
    args = arguments(func)
    n_outputs = len(costs.tensors(func.ret_type))
    specs = [TensorSpec(f"arg{i}", shape, dtype) for i, (shape, dtype) in enumerate(args)]
    stem = "fused_" + "_".join(call.op.name.split(".")[-1] for call in operators)
    stem = stem[:80]
    name = next(n for i in range(len(taken) + 1) if (n := stem if not i else f"{stem}_{i}") not in taken)
    types = [part for param in func.params for part in costs.tensors(param.checked_type)]
    return FusedSubgraph(
        name=name,
        workload_key=key,
        anchor_key=structural_key(anchor_workload(func)),
        operators=tuple(call.op.name for call in operators),
        anchor_operator=anchor.op.name,
        inputs=tuple(specs[:-n_outputs]),
        outputs=tuple(specs[-n_outputs:]),
        anchor_output_dtype=str(costs.tensors(anchor.checked_type)[-1].dtype),
        output_dtype=specs[-1].dtype,
        flops=sum(costs.flops(call) for call in operators),
        bytes_moved=sum(costs.size_bytes(type_) for type_ in [*types, *costs.tensors(func.ret_type)]),
        weight=1,
    )


def operators_of(func: Any) -> list[Any]:
    """The operator calls of a primitive function, in order."""
    return [node for node in post_order(func) if isinstance(node, relay.Call)]


def anchor_of(func: Any) -> Any:
    """The call whose implementation schedules the kernel, as TVM picks it: the last of the highest pattern."""
    return max(enumerate(operators_of(func)), key=lambda pair: (costs.pattern(pair[1]), pair[0]))[1]


def anchor_workload(func: Any) -> Any:
    """The anchor operator alone, as a primitive function."""
    anchor = anchor_of(func)
    params = []
    args = []
    for index, arg in enumerate(anchor.args):
        fields = [_parameter(f"p{index}_{i}", part) for i, part in enumerate(costs.tensors(arg.checked_type))]
        if isinstance(arg, relay.Constant):
            args.append(arg)
            continue
        params += fields
        args.append(relay.Tuple(fields) if hasattr(arg.checked_type, "fields") else fields[0])
    body = relay.Call(anchor.op, args, anchor.attrs, anchor.type_args)
    alone = relay.Function(params, body).with_attr("Primitive", tvm.tir.IntImm("int32", 1))
    return typed(alone)


def typed(func: Any) -> Any:
    """``func`` with its types inferred."""
    return relay.transform.InferType()(tvm.IRModule({"main": func}))["main"]


def _parameter(name: str, type_: Any) -> Any:
    return relay.var(name, shape=costs.shape_of(type_), dtype=type_.dtype)
