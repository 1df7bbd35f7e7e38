"""From a normalised ONNX file to a fused TVM module."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from tasks.engines.relax.fold_constants import fold_constants
from tasks.errors import ModelError

#: Names of this many nodes are listed for each operator that cannot be translated.
_LISTED_NODES = 5


@dataclass(frozen=True)
class Fused:
    """The module after FuseOps (``grouped``: what is fused) and after FuseTIR (``lowered``: kernels)."""

    grouped: Any
    lowered: Any


def translate(path: str) -> tuple[Any, dict[str, int]]:
    """The ONNX file as a Relax module, and how many nodes of each operator it has.

    Raises ModelError: one error lists every operator without a converter and its nodes.
    """
    model = onnx.load(path)
    counts = _refuse_unknown(model)
    try:
        mod = from_onnx(model, sanitize_input_names=True)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ModelError(f"TVM cannot translate the model: {reason[:300]}; report it with the model") from error
    return mod, counts


def fuse(mod: Any, target: Any) -> Fused:
    """Optimise, lower to TIR and fuse for ``target`` (a tvm Target)."""
    transform = relax.transform
    before = [transform.DecomposeOpsForInference(), transform.CanonicalizeBindings()]
    mod = fold_constants(tvm.transform.Sequential(before)(mod))
    lower = [
        transform.CanonicalizeBindings(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
    ]
    with target, tvm.transform.PassContext(opt_level=3):
        grouped = tvm.transform.Sequential(lower)(mod)
        # A reshape that only renames memory is no kernel; taken out here, it is never tuned.
        kernels = [transform.FuseTIR(), transform.RewriteDataflowReshape(), transform.DeadCodeElimination()]
        lowered = tvm.transform.Sequential(kernels)(grouped)
    return Fused(grouped, lowered)


def _refuse_unknown(model: Any) -> dict[str, int]:
    """Count the operators. Raises ModelError where some have no converter."""
    known = onnx_frontend._get_convert_map()  # the front end offers no public list
    counts: collections.Counter[str] = collections.Counter()
    unknown: dict[str, list[str]] = {}
    for node in _all_nodes(model.graph):
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
            f"the relax engine cannot translate {len(unknown)} operator(s): {'; '.join(lists)}; "
            "export the model without them"
        )
    return dict(counts)


def _all_nodes(graph: Any) -> Any:
    """Every node, those of subgraphs (If, Loop) included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g)
