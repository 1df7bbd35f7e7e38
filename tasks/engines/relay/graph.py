"""The model as TVM's graph executor reads it: nodes, the kernels they call, and a plan of the memory.

``relay.build`` would lower every subgraph anew, and ask for its config by the anchor's workload alone. Here
each call names a kernel that was compiled on its own, so that each subgraph has its own config.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tvm import relay

from tasks.engines.relay import costs
from tasks.engines.relay.rewriting import post_order
from tasks.engines.relay.subgraphs import KernelCall
from tasks.errors import EngineError

#: One tensor of a node: the node's number and which of its outputs.
Entry = tuple[int, int]
#: What the graph executor calls a node that only renames memory.
_NOP = "__nop"


@dataclass
class _Node:
    name: str
    types: list[Any]
    inputs: list[Entry] = field(default_factory=list)
    symbol: str = ""


@dataclass
class _Storage:
    size_bytes: int
    shared: bool


@dataclass
class Graph:
    """The graph's JSON and its constants by name."""

    text: str
    constants: dict[str, Any]


def graph_of(func: Any, calls: tuple[KernelCall, ...], symbols: dict[str, str]) -> Graph:
    """``func`` (``main`` after fusion) as a graph; ``symbols`` names the kernel of each subgraph."""
    maker = _Maker({call.node: call for call in calls}, symbols)
    for param in func.params:
        maker.add(param)
    for node in post_order(func):
        maker.add(node)
    heads = maker.entries[func.body]
    return Graph(json.dumps(_plain_graph(maker.nodes, heads)), maker.constants)


class _Maker:
    """Turns Relay nodes into the executor's."""

    def __init__(self, calls: dict[Any, KernelCall], symbols: dict[str, str]) -> None:
        self.nodes: list[_Node] = []
        self.entries: dict[Any, list[Entry]] = {}
        self.constants: dict[str, Any] = {}
        self._calls = calls
        self._symbols = symbols

    def add(self, node: Any) -> None:
        """Make what stands for ``node``, once."""
        if node in self.entries:
            return
        if isinstance(node, relay.Var):
            self.entries[node] = self._append(_Node(node.name_hint, costs.tensors(node.checked_type)))
        elif isinstance(node, relay.Constant):
            name = f"p{len(self.constants)}"
            self.constants[name] = node.data
            self.entries[node] = self._append(_Node(name, costs.tensors(node.checked_type)))
        elif isinstance(node, relay.Tuple):
            self.entries[node] = [entry for part in node.fields for entry in self.entries[part]]
        elif isinstance(node, relay.TupleGetItem):
            self.entries[node] = [self.entries[node.tuple_value][node.index]]
        elif isinstance(node, relay.Call):
            self._add_call(node)
        else:
            raise EngineError(f"the fused model holds a {type(node).__name__}, which the graph executor cannot run")

    def _add_call(self, node: Any) -> None:
        name = self._calls[node].subgraph
        inputs = [entry for arg in node.args for entry in self.entries[arg]]
        symbol = self._symbols[name] if name else _NOP
        number = sum(made.symbol == symbol for made in self.nodes)
        made = _Node(f"{name or 'reshape'}_{number}", costs.tensors(node.checked_type), inputs, symbol)
        self.entries[node] = self._append(made)

    def _append(self, node: _Node) -> list[Entry]:
        self.nodes.append(node)
        return [(len(self.nodes) - 1, output) for output in range(len(node.types))]


def _plain_graph(nodes: list[_Node], heads: list[Entry]) -> dict[str, Any]:
    rows = [0]
    for node in nodes:
        rows.append(rows[-1] + len(node.types))
    types = [type_ for node in nodes for type_ in node.types]
    storage = _plan_storage(nodes, heads)
    return {
        "nodes": [_plain_node(node) for node in nodes],
        "arg_nodes": [index for index, node in enumerate(nodes) if not node.symbol],
        "heads": [[node, output, 0] for node, output in heads],
        "attrs": {
            "dltype": ["list_str", [str(type_.dtype) for type_ in types]],
            "device_index": ["list_int", [1] * len(types)],
            "storage_id": ["list_int", storage],
            "shape": ["list_shape", [list(costs.shape_of(type_)) for type_ in types]],
        },
        "node_row_ptr": rows,
    }


def _plain_node(node: _Node) -> dict[str, Any]:
    if not node.symbol:
        return {"op": "null", "name": node.name, "inputs": []}
    attrs = {
        "num_outputs": str(len(node.types)), "num_inputs": str(len(node.inputs)),
        "flatten_data": "0", "func_name": node.symbol,
    }  # fmt: skip
    inputs = [[index, output, 0] for index, output in node.inputs]
    return {"op": "tvm_op", "name": node.name, "attrs": attrs, "inputs": inputs}


def _plan_storage(nodes: list[_Node], heads: list[Entry]) -> list[int]:
    """The storage of every entry: reused once its last reader has run; inputs, constants and results keep theirs."""
    last_read: dict[Entry, int] = {entry: len(nodes) for entry in heads}
    for index, node in enumerate(nodes):
        for entry in node.inputs:
            last_read[entry] = max(last_read.get(entry, 0), index)
    pool: list[_Storage] = []
    place: dict[Entry, int] = {}
    readers_end: dict[int, int] = {}
    free: list[int] = []
    for index, node in enumerate(nodes):
        for output, type_ in enumerate(node.types):
            entry = (index, output)
            if node.symbol == _NOP:
                place[entry] = place[node.inputs[0]]
            else:
                place[entry] = _take(pool, free, costs.size_bytes(type_), keep=not node.symbol)
            # Storage that a reshape shares is free when the last reader of either name has run.
            end = last_read.get(entry, index)
            readers_end[place[entry]] = max(readers_end.get(place[entry], 0), end)
        for storage in {place[entry] for entry in node.inputs} | {place[index, o] for o in range(len(node.types))}:
            if readers_end[storage] <= index and not pool[storage].shared and storage not in free:
                free.append(storage)
    return [place[index, output] for index, node in enumerate(nodes) for output in range(len(node.types))]


def _take(pool: list[_Storage], free: list[int], size_bytes: int, keep: bool) -> int:
    """A storage for that many bytes: the smallest free one that holds them, else the largest one, enlarged."""
    if keep or not free:
        pool.append(_Storage(size_bytes, keep))
        return len(pool) - 1
    fitting = [storage for storage in free if pool[storage].size_bytes >= size_bytes]
    chosen = (
        min(fitting, key=lambda storage: pool[storage].size_bytes)
        if fitting
        else max(free, key=lambda storage: pool[storage].size_bytes)
    )
    free.remove(chosen)
    pool[chosen].size_bytes = max(pool[chosen].size_bytes, size_bytes)
    return chosen
