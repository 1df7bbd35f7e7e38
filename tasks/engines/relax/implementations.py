"""Other implementations of a subgraph than the operators' own: kernels with the same arguments, raced by the search.

A *recipe* is what they are made of: the subgraph before its operators became one kernel. It travels with the
workload's IR, so that an agent can make them too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.s_tir import Schedule
from tvm.target import Target

from tasks.engines.relax import spaces, winograd
from tasks.records import TuningRecord

_RECIPE = "tunewright.recipe"
_WINOGRAD = "winograd-"


@dataclass(frozen=True)
class Workload:
    """A subgraph's IR, ``mod`` with the one function ``main``, and the recipe of others where there are any."""

    mod: Any
    recipe: Any = None

    def to_text(self) -> str:
        """As ``from_text`` reads it. To anybody else it is ``mod``."""
        return str(tvm.ir.save_json(self.mod if self.recipe is None else self.mod.with_attr(_RECIPE, self.recipe)))

    @classmethod
    def from_text(cls, text: str) -> Workload:
        """Raises what TVM raises where it is no IR."""
        mod = tvm.ir.load_json(text)
        recipe = mod.attrs[_RECIPE] if mod.attrs and _RECIPE in mod.attrs else None
        return cls(tvm.IRModule({"main": mod["main"]}), recipe)

    def plans(self, target: Target) -> dict[str, winograd.Plan]:
        """The other implementations by name."""
        if self.recipe is None or target.kind.name != "llvm":
            return {}
        return {plan.name: plan for plan in winograd.plans(_marked(self.recipe)[1], spaces.lanes_of(target))}

    def implemented(self, name: str, target: Target) -> Any:
        """The subgraph as the implementation ``name`` computes it, unscheduled; ``mod`` where it names none.

        Raises KeyError where this version has no such implementation.
        """
        if not name.startswith(_WINOGRAD):
            return self.mod
        var, conv = _marked(self.recipe)
        other = winograd.implementation(conv, self.plans(target)[name], spaces.lanes_of(target))
        replaced = tvm.IRModule({v: other if v.same_as(var) else func for v, func in self.recipe.functions_items()})
        kernels = relax.transform.FuseTIR()(replaced)
        fused = [v.name_hint for v, func in replaced.functions_items() if func.attrs and "Primitive" in func.attrs]
        kernel = kernels[fused[0] if fused else var.name_hint]
        return tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})

    def sketches(self, target: Target) -> dict[str, Schedule]:
        """Every other implementation that TVM can schedule, by name."""
        found = {}
        for name, plan in self.plans(target).items():
            # What is behind the conv may have a form that the schedule was not made for; TVM raises what it likes.
            with contextlib.suppress(Exception):
                found[name] = winograd.sketch(self.implemented(name, target), plan, target)
        return found


def is_other(record: TuningRecord) -> bool:
    """Is this a schedule of another implementation than the operators' own?"""
    return bool(record.schedule) and record.implementation.startswith(_WINOGRAD)


def recipe_of(grouped: Any, name: str) -> Any | None:
    """The recipe of the kernel ``name`` of a module after FuseOps; None where it has no conv that may be another."""
    var = grouped.get_global_var(name)
    func, parts = grouped[var], [var]
    if isinstance(func, relax.Function):
        relax.analysis.post_order_visit(func, lambda node: parts.append(node) if _is_function(node) else None)
    recipe = {part: grouped[part] for part in parts}
    if not any(isinstance(part, tvm.tirx.PrimFunc) and winograd.is_marked(part) for part in recipe.values()):
        return None
    if isinstance(func, relax.Function):
        recipe[tvm.ir.GlobalVar("main")] = _caller(var, func)
    return tvm.IRModule(recipe)


def _is_function(node: Any) -> bool:
    return isinstance(node, tvm.ir.GlobalVar)


def _caller(var: Any, func: Any) -> Any:
    """A function that calls ``func``: what nobody calls, TVM leaves out."""
    params = [relax.Var(param.name, param.ty) for param in func.params]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.Call(var, params)))
        builder.emit_func_output(out)
    return builder.get()["main"]


def _marked(recipe: Any) -> tuple[Any, Any]:
    """The conv that may be computed otherwise, and its variable."""
    return next(
        (var, func)
        for var, func in recipe.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc) and winograd.is_marked(func)
    )
