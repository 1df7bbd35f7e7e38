"""Builds the artifact: each subgraph with its best schedule, the whole as one library and a manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.relax.backend.cpu_generic import pipeline as generic_pipeline
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.trace_apply import schedule_using_anchor_trace

from tasks.engines.artifact_files import digest_of, manifest_of
from tasks.engines.failure_text import describe_failure
from tasks.engines.interface import BuildRequest
from tasks.engines.measuring.workshop import DEFAULT_KEY, is_plain, kernel_symbol
from tasks.engines.relax import loader
from tasks.engines.relax.candidates import BUILD_CONFIG
from tasks.engines.relax.implementations import Workload, is_other
from tasks.engines.relax.search import default_schedule, replay_record
from tasks.engines.relax.sources import Winner, write_sources
from tasks.engines.relax.subgraphs import as_workload, prim_funcs, structural_key
from tasks.errors import EngineError
from tasks.records import NO_SCHEDULE, Artifact, FusedSubgraph, SubgraphChoice, TuningRecord

#: What TVM puts before the name of a function in a library.
_PREFIX = "__tvm_ffi_"
_NOTHING = "tunewright_nothing"


@dataclass(frozen=True)
class Kernel:
    """A scheduled subgraph: its workload and candidate keys name the object file it is compiled to.

    ``trace`` is empty for the default schedule; ``plain`` is then the subgraph without it.
    """

    workload_key: str
    candidate_key: str
    func: Any
    trace: str = ""
    plain: Any = None


@dataclass(frozen=True)
class Material:
    """What is compiled: the module after fusion, its workloads by key, the TVM target.

    ``compile_kernels`` gives the object file of each kernel, which defines ``kernel_symbol(workload_key)``;
    what was measured in this process is there already. None where the target has no object files.
    """

    lowered: Any
    workloads: Mapping[str, Workload]
    target: Any
    compile_kernels: Callable[[Sequence[Kernel]], Mapping[str, str]] | None


@dataclass(frozen=True)
class _Compiled:
    """The object files by workload key, or the library of a target that has none."""

    objects: Mapping[str, str]
    library: Any = None


def build(request: BuildRequest, material: Material) -> Artifact:
    """Compile the fused module into ``request.out_dir``. Raises EngineError."""
    kernels, choices = _choose_kernels(request, material)
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    try:
        compiled = _compile(material, kernels, str(out / "model.so"))
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"TVM cannot build the model: {describe_failure(error)}") from error
    choices = tuple(_as_built(choice, compiled.objects) for choice in choices)
    shutil.copyfile(str(loader.__file__), out / "loader.py")
    manifest = {
        **manifest_of(request, choices),
        "kernels": {name: kernel.workload_key for name, kernel in kernels.items()},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    digest = digest_of(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    if request.sources_dir:
        shutil.rmtree(request.sources_dir, ignore_errors=True)  # an earlier build's
        write_sources(_winners(request, kernels, choices, compiled.objects), material.target, compiled.library)
    return Artifact(str(out), digest, size, request.tuned, choices)


def _choose_kernels(request: BuildRequest, material: Material) -> tuple[dict[str, Kernel], tuple[SubgraphChoice, ...]]:
    """The scheduled kernel of each function that is called, by its name, and where each came from."""
    by_key = {subgraph.workload_key: subgraph for subgraph in request.fused.subgraphs}
    choices: dict[str, SubgraphChoice] = {}
    scheduled: dict[str, Kernel] = {}
    kernels: dict[str, Kernel] = {}
    for name, func in prim_funcs(material.lowered).items():
        key = structural_key(as_workload(func))
        subgraph = by_key.get(key)
        if subgraph is None:
            continue  # nothing calls it
        if key not in scheduled:
            body, trace, choices[key] = _schedule_one(request, material, subgraph)
            candidate = choices[key].candidate_key or DEFAULT_KEY
            if request.fused.granularity == "operator" and candidate != DEFAULT_KEY:
                candidate = f"anchor-{candidate}"  # the trace of another workload makes another kernel
            plain = material.workloads[key].mod["main"] if candidate == DEFAULT_KEY else None
            scheduled[key] = Kernel(key, candidate, body, trace, plain)
        kernels[name] = scheduled[key]
    return kernels, tuple(choices.values())


def _as_built(choice: SubgraphChoice, objects: Mapping[str, str]) -> SubgraphChoice:
    """The choice, and that no schedule could be built where that is so."""
    plain = is_plain(objects.get(choice.workload_key, ""))
    return dataclasses.replace(choice, note=NO_SCHEDULE) if plain else choice


def _winners(
    request: BuildRequest, kernels: Mapping[str, Kernel], choices: Sequence[SubgraphChoice], objects: Mapping[str, str]
) -> list[Winner]:
    """What was built of each subgraph, in the order of the choices; a folder each, named by what was tuned."""
    chosen = {choice.workload_key: choice for choice in choices}
    tuned = {subgraph.workload_key: request.fused.tuned_key(subgraph) for subgraph in request.fused.subgraphs}
    winners: dict[str, Winner] = {}
    used: set[str] = set()
    for function, kernel in kernels.items():
        key = kernel.workload_key
        if key in winners:
            continue
        folder = Path(request.sources_dir) / tuned[key]
        if tuned[key] in used:  # several subgraphs around one anchor
            folder /= chosen[key].name
        used.add(tuned[key])
        winners[key] = Winner(chosen[key], folder, function, kernel.func, kernel.trace, objects.get(key, ""))
    return list(winners.values())


def _schedule_one(
    request: BuildRequest, material: Material, subgraph: FusedSubgraph
) -> tuple[Any, str, SubgraphChoice]:
    """The fastest record that still replays, else the default schedule; its trace, what became of the choice."""
    key = subgraph.workload_key
    tuned_key = request.fused.tuned_key(subgraph)
    notes: list[str] = []
    default = default_schedule(material.workloads[key].mod, material.target)["main"]
    for record in request.best.get(tuned_key, ()):
        chosen = SubgraphChoice(subgraph.name, key, record.record_id, record.candidate_key, record.latency_us)
        if not record.schedule:
            note = "the default schedule is the fastest measured"
            return default, "", dataclasses.replace(chosen, note=note)
        try:
            scheduled = _replay(record, key, tuned_key, material)
        except Exception as error:
            notes.append(f"record {record.record_id} does not replay ({type(error).__name__})")
            continue
        name = record.implementation if is_other(record) else ""
        return scheduled, record.schedule, dataclasses.replace(chosen, note="; ".join(notes), implementation=name)
    return default, "", SubgraphChoice(subgraph.name, key, "", "", None, "; ".join(notes))


def _replay(record: TuningRecord, key: str, tuned_key: str, material: Material) -> Any:
    """The subgraph ``key`` scheduled as ``record`` says, which was measured on ``tuned_key``."""
    tuned = replay_record(material.workloads[tuned_key], record, material.target)
    if tuned_key == key:
        return tuned.mod["main"]
    # Tuned on the anchor operator alone: its trace is applied to the block it has in common with
    # the subgraph, the operators around it are inlined.
    schedule = Schedule(material.workloads[key].mod)
    schedule_using_anchor_trace(schedule, tuned.trace, material.target)
    return schedule.mod["main"]


def _compile(material: Material, kernels: Mapping[str, Kernel], path: str) -> _Compiled:
    """Write the library: the executable for TVM's virtual machine and all kernels."""
    target = material.target
    mod = tvm.IRModule(dict(material.lowered.functions_items()), attrs=material.lowered.attrs)
    for name, kernel in kernels.items():
        # The function keeps its own name and linkage; only its body is the scheduled one.
        mod.update_func(mod.get_global_var(name), kernel.func.with_attr("global_symbol", name))
    lower = tvm.transform.Sequential(
        [*generic_pipeline.dataflow_lower_passes(target), *generic_pipeline.finalize_passes(target)]
    )
    with tvm.transform.PassContext(opt_level=3, config=BUILD_CONFIG):
        if material.compile_kernels is None:
            with target:  # CUDA's compiler is called for the architecture of the current target
                executable = relax.build(mod, target=target, relax_pipeline=lower)
            executable.export_library(path)
            return _Compiled({}, executable.mod)
        distinct = {kernel.workload_key: kernel for kernel in kernels.values()}
        objects = material.compile_kernels(tuple(distinct.values()))
        aliases = {name: kernel_symbol(kernel.workload_key) for name, kernel in kernels.items()}
        with target:
            lowered = lower(mod)
        _link(lowered, target, aliases).export_library(
            path,
            addons=sorted(objects.values()),
            options=[f"-Wl,--defsym={_PREFIX}{name}={_PREFIX}{symbol}" for name, symbol in aliases.items()],
        )
        return _Compiled(objects)


def _link(lowered: Any, target: Any, aliases: Mapping[str, str]) -> Any:
    """An executable without the kernels that ``aliases`` names: those are linked from their objects.

    What was measured is so what runs, to the last instruction, and nothing is compiled twice.
    """
    constants = dict(lowered.attrs or {}).get("const_name_to_constant", {})
    builder = relax.ExecBuilder()
    functions = dict(vm_build._vmcodegen(builder, lowered, "bytecode").functions_items())
    rest = {var: func for var, func in functions.items() if var.name_hint not in aliases}
    if not rest:  # TVM exports a library only where there is something in it
        rest = {_NOTHING: _nothing()}
    return vm_build._vmlink(
        builder=builder, target=target, tir_mod=tvm.IRModule(rest), tir_pipeline="default",
        ext_libs=[], params=dict(constants), system_lib=None,
    )  # fmt: skip


def _nothing() -> Any:
    """A function that does nothing."""
    body = tvm.tirx.Evaluate(tvm.tirx.const(0, "int32"))
    return tvm.tirx.PrimFunc([], body).with_attr("global_symbol", _NOTHING)
