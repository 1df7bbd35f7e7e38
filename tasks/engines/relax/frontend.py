"""From a normalised ONNX file to a fused TVM module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from tasks.engines.failure_text import last_line
from tasks.engines.onnx_operators import count_operators
from tasks.engines.relax.fold_constants import fold_constants
from tasks.engines.relax.int16_dots import has_int16_dots
from tasks.engines.relax.passes import simplify
from tasks.engines.relax.passes.channels_last import channels_last
from tasks.engines.relax.passes.integer_kernels import integer_kernels
from tasks.engines.relax.passes.packed_weights import packed_weights
from tasks.engines.relax.passes.parallel_matmuls import parallel_matmuls
from tasks.engines.relax.passes.vector_exp import vector_exp
from tasks.engines.relax.spaces import lanes_of
from tasks.errors import ModelError

#: Layouts of activations: NHWC for convs and what lies between them, or whatever the model's author chose.
CHANNELS_LAST = "channels-last"
AS_IMPORTED = "as-imported"


@dataclass(frozen=True)
class Fused:
    """The module after FuseOps (``grouped``: what is fused) and after FuseTIR (``lowered``: kernels) for ``target``."""

    grouped: Any
    lowered: Any
    target: Any


def translate(path: str) -> tuple[Any, dict[str, int]]:
    """The ONNX file as a Relax module, and how many nodes of each operator it has.

    Raises ModelError: one error lists every operator without a converter and its nodes.
    """
    model = onnx.load(path)
    # The front end offers no public list.
    counts = count_operators(model.graph, onnx_frontend._get_convert_map(), "relax")
    try:
        mod = from_onnx(model, sanitize_input_names=True)
    except Exception as error:
        reason = last_line(error, type(error).__name__)
        raise ModelError(f"TVM cannot translate the model: {reason[:300]}; report it with the model") from error
    return mod, counts


def layouts_for(kind: str) -> tuple[str, ...]:
    """The layouts that ``fuse`` knows, the preferred one for a target of this kind first."""
    return (CHANNELS_LAST, AS_IMPORTED) if kind == "llvm" else (AS_IMPORTED, CHANNELS_LAST)


def fuse(mod: Any, target: Any, layout: str = "") -> Fused:
    """Optimise, lower to TIR and fuse for ``target`` (a tvm Target), with activations in ``layout``."""
    kind = str(target.kind.name)
    transform = relax.transform
    before = [transform.DecomposeOpsForInference(), transform.CanonicalizeBindings()]
    mod = tvm.transform.Sequential(before)(mod)
    if has_int16_dots(target):
        mod, _ = integer_kernels(mod)
    mod = simplify(fold_constants(mod))
    if (layout or layouts_for(kind)[0]) == CHANNELS_LAST:
        mod, _ = channels_last(mod)
    if kind == "llvm":
        mod, _ = parallel_matmuls(mod)
        mod, _ = packed_weights(mod, lanes_of(target))
        mod, _ = vector_exp(mod, lanes_of(target))
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
    return Fused(grouped, lowered, target)
