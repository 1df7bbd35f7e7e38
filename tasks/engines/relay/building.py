"""Builds the artifact: each subgraph with its own best config, and the graph that calls them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.contrib import cc

from tasks.engines.artifact_files import digest_of, manifest_of
from tasks.engines.failure_text import describe_failure
from tasks.engines.interface import BuildRequest
from tasks.engines.measuring.workshop import DEFAULT_KEY, kernel_symbol
from tasks.engines.relay import loader
from tasks.engines.relay.candidates import BUILD_CONFIG, kernel_module
from tasks.engines.relay.graph import graph_of
from tasks.engines.relay.lowering import Choice, lower
from tasks.engines.relay.subgraphs import Inventory
from tasks.errors import EngineError
from tasks.records import Artifact, FusedSubgraph, SubgraphChoice, TuningRecord


@dataclass(frozen=True)
class Kernel:
    """A subgraph as it is built: ``choice`` is None for TVM's own; the keys name its object file."""

    workload_key: str
    candidate_key: str
    func: Any
    choice: Choice | None


@dataclass(frozen=True)
class Material:
    """What is compiled: the subgraphs and their calls, the TVM target.

    ``compile_kernels`` gives the object file of each kernel; None where the target has no object files.
    ``is_built`` says of a workload's candidate that it is compiled already, and so needs no trial.
    """

    inventory: Inventory
    target: Any
    compile_kernels: Callable[[Sequence[Kernel]], Mapping[str, str]] | None
    is_built: Callable[[str, str], bool]


def build(request: BuildRequest, material: Material) -> Artifact:
    """Compile the model into ``request.out_dir``. Raises EngineError."""
    inventory = material.inventory
    kernels, choices = _choose_kernels(request, material)
    symbols = {subgraph.name: kernel_symbol(subgraph.workload_key) for subgraph in inventory.subgraphs}
    graph = graph_of(inventory.func, inventory.kernel_calls, symbols)
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _compile(material, kernels, str(out / "model.so"))
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"TVM cannot build the model: {describe_failure(error)}") from error
    (out / "graph.json").write_text(graph.text)
    (out / "params.bin").write_bytes(tvm.runtime.save_param_dict(graph.constants))
    shutil.copyfile(str(loader.__file__), out / "loader.py")
    manifest = {
        **manifest_of(request, choices),
        "tvm": str(tvm.__version__),
        "kernels": {subgraph.name: subgraph.workload_key for subgraph in inventory.subgraphs},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    return Artifact(str(out), digest_of(out), size, request.tuned, choices)


def _choose_kernels(request: BuildRequest, material: Material) -> tuple[list[Kernel], tuple[SubgraphChoice, ...]]:
    """The kernel of each subgraph, and where each came from."""
    kernels, choices = [], []
    for subgraph in material.inventory.subgraphs:
        choice, taken = _choose_one(request, material, subgraph)
        candidate = taken.candidate_key if choice is not None else DEFAULT_KEY
        if request.fused.granularity == "operator" and choice is not None:
            candidate = f"anchor-{candidate}"  # the config of another workload makes another kernel
        func = material.inventory.workloads[subgraph.workload_key]
        kernels.append(Kernel(subgraph.workload_key, candidate, func, choice))
        choices.append(taken)
    return kernels, tuple(choices)


def _choose_one(
    request: BuildRequest, material: Material, subgraph: FusedSubgraph
) -> tuple[Choice | None, SubgraphChoice]:
    """The fastest record that still fits, else the default schedule; with what became of the choice."""
    key, notes = subgraph.workload_key, []
    for record in request.best.get(request.fused.tuned_key(subgraph), ()):
        chosen = SubgraphChoice(subgraph.name, key, record.record_id, record.candidate_key, record.latency_us)
        if not record.schedule:
            return None, dataclasses.replace(chosen, note="the default schedule is the fastest measured")
        try:
            choice = _replay(record, subgraph, material)
        except Exception as error:
            notes.append(f"record {record.record_id} does not replay ({type(error).__name__})")
            continue
        return choice, dataclasses.replace(chosen, note="; ".join(notes))
    return None, SubgraphChoice(subgraph.name, key, "", "", None, "; ".join(notes))


def _replay(record: TuningRecord, subgraph: FusedSubgraph, material: Material) -> Choice:
    """The record's choice, which can be lowered for this subgraph. Raises whatever TVM raises."""
    choice = Choice.from_text(record.schedule)
    if choice.operator != subgraph.anchor_operator:
        raise ValueError(f"the record is of {choice.operator}, the subgraph's anchor is {subgraph.anchor_operator}")
    measured = record.workload_key == subgraph.workload_key
    if not (measured and material.is_built(subgraph.workload_key, record.candidate_key)):
        lower(material.inventory.workloads[subgraph.workload_key], material.target, choice)
    return choice


def _compile(material: Material, kernels: Sequence[Kernel], path: str) -> None:
    """Write the library of all kernels. On a CPU it is linked from objects: what was measured is what runs."""
    if material.compile_kernels is not None:
        objects = material.compile_kernels(kernels)
        cc.create_shared(path, sorted(objects.values()))
        return
    merged = tvm.IRModule({})
    for kernel in kernels:
        merged.update(kernel_module(kernel.func, material.target, kernel.choice, kernel_symbol(kernel.workload_key)))
    with tvm.transform.PassContext(opt_level=3, config=BUILD_CONFIG):
        tvm.build(merged, target=material.target).export_library(path)
