"""Which operators an ONNX graph has, and an error for those that an engine's front end does not know.

Python 3.10; works on the protobuf objects of any onnx package.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator
from typing import Any

from tasks.errors import ModelError

#: Names of this many nodes are listed for each operator that cannot be translated.
_LISTED_NODES = 5


def count_operators(graph: Any, known: Container[str], engine: str) -> dict[str, int]:
    """How many nodes of each operator ``graph`` has.

    Raises ModelError where some are not ``known``: one error with all of them and their nodes.
    """
    counts: collections.Counter[str] = collections.Counter()
    unknown: dict[str, list[str]] = {}
    for node in _all_nodes(graph):
        foreign = node.domain not in ("", "ai.onnx")
        name = f"{node.domain}.{node.op_type}" if foreign else node.op_type
        counts[name] += 1
        if node.op_type not in known and node.op_type != "Constant":
            unknown.setdefault(name, []).append(node.name or (node.output[0] if node.output else "?"))
    if unknown:
        lists = []
        for name, nodes in sorted(unknown.items()):
            shown = ", ".join(nodes[:_LISTED_NODES])
            more = f" and {len(nodes) - _LISTED_NODES} more" if len(nodes) > _LISTED_NODES else ""
            lists.append(f"{name} ({shown}{more})")
        raise ModelError(
            f"the {engine} engine cannot translate {len(unknown)} operator(s): {'; '.join(lists)}; "
            "export the model without them"
        )
    return dict(counts)


def _all_nodes(graph: Any) -> Iterator[Any]:
    """Every node, those of subgraphs (If, Loop) included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)
