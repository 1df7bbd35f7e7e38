"""Lowers one primitive function under one choice: an implementation of its anchor operator and its config.

TVM asks the dispatch context by the anchor's workload alone. Here the function is lowered by itself, so that
the config in force is this subgraph's, from the anchor's compute (whose packing follows it) to the schedule
of the whole function.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import autotvm, relay
from tvm.autotvm.task.dispatcher import DispatchContext
from tvm.autotvm.task.space import ConfigEntity, FallbackConfigEntity
from tvm.relay.backend import te_compiler

from tasks.errors import EngineError


@dataclass(frozen=True)
class Choice:
    """An implementation by its name in the operator's strategy, and its config, None where it has no template.

    ``workload`` is what AutoTVM calls the anchor in its logs: the template's name and its arguments.
    """

    operator: str
    implementation: str
    config: Any = None
    workload: Any = None

    def to_text(self) -> str:
        """As a record's ``schedule``."""
        config = None if self.config is None else self.config.to_json_dict()
        plain = {
            "operator": self.operator, "implementation": self.implementation,
            "workload": self.workload, "config": config,
        }  # fmt: skip
        return json.dumps(plain, separators=(",", ":"), default=int)

    @staticmethod
    def from_text(text: str) -> Choice:
        """Raises ValueError or KeyError where ``text`` is none."""
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError("the schedule is no AutoTVM choice")
        config = None if plain["config"] is None else ConfigEntity.from_json_dict(plain["config"])
        return Choice(plain["operator"], plain["implementation"], config, plain.get("workload"))


class _Chosen(threading.local):
    choice: Choice | None = None


_chosen = _Chosen()


class _Configs(DispatchContext):  # type: ignore[misc]
    """Gives the choice's config while the chosen implementation is lowered, fallbacks otherwise."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.active = False
        self.workload: Any = None
        self._fallbacks: dict[Any, Any] = {}

    def _query_inside(self, target: Any, workload: Any) -> Any:
        if self.active and self.config is not None:
            self.workload = workload
            return self.config
        # One object a workload: TVM fills it in compute and reads it in schedule.
        key = (str(target), str(workload))
        if key not in self._fallbacks:
            self._fallbacks[key] = FallbackConfigEntity()
        return self._fallbacks[key]

    def update(self, target: Any, workload: Any, cfg: Any) -> None:
        """Nothing is kept beyond this function."""


def install() -> None:
    """Have TVM ask us which implementation an operator gets."""
    original = te_compiler.lower_call

    def lower_call(call: Any, inputs: Any, target: Any, *rest: Any) -> Any:
        choice = _chosen.choice
        if choice is None or call.op.name != choice.operator:
            return original(call, inputs, target, *rest)
        found = implementations(call, inputs, target, *rest)
        implementation = found.get(choice.implementation)
        if implementation is None:
            names = ", ".join(sorted(found))
            raise EngineError(f"{call.op.name} has no implementation {choice.implementation} here, only {names}")
        context = DispatchContext.current
        if isinstance(context, _Configs):
            context.active = True
        outputs = implementation.compute(call.attrs, inputs, _result_type(call, *rest))
        return te_compiler.LoweredOutput(outputs, implementation)

    tvm._ffi.register_func("relay.backend.lower_call", lower_call, override=True)


def implementations(call: Any, inputs: Any, target: Any, *rest: Any) -> dict[str, Any]:
    """Every implementation that the operator's strategy offers for ``call``, by name."""
    found = te_compiler.get_valid_implementations(call.op, call.attrs, inputs, _result_type(call, *rest), target)
    return {str(implementation.name): implementation for implementation in found}


def _result_type(call: Any, otype: Any = None) -> Any:
    if otype is not None:
        return otype
    type_ = call.checked_type
    if isinstance(type_, relay.TensorType):
        return relay.TensorType(te_compiler.get_shape(type_.shape), type_.dtype)
    return type_


@contextmanager
def _in_force(choice: Choice | None, target: Any) -> Iterator[_Configs]:
    before = _chosen.choice
    _chosen.choice = choice
    silent, autotvm.GLOBAL_SCOPE.silent = autotvm.GLOBAL_SCOPE.silent, True
    context = _Configs(choice.config if choice else None)
    try:
        with target, context:
            yield context
    finally:
        _chosen.choice = before
        autotvm.GLOBAL_SCOPE.silent = silent


def lower(func: Any, target: Any, choice: Choice | None) -> Any:
    """``func`` (a primitive function) as an IRModule with one PrimFunc; TVM's own choice for None.

    Raises whatever TVM raises where the config does not fit.
    """
    return _lower(func, target, choice)[0]


def config_space(func: Any, target: Any, choice: Choice) -> tuple[Any, Any]:
    """The search space that ``choice``'s implementation defines while the whole function is scheduled.

    Its AutoTVM workload too; both None where it has no template.
    """
    space = autotvm.ConfigSpace()
    _, context = _lower(func, target, Choice(choice.operator, choice.implementation, space))
    if context.workload is None or not space.space_map:
        return None, context.workload
    return space, context.workload


def _lower(func: Any, target: Any, choice: Choice | None) -> tuple[Any, _Configs]:
    compiler = te_compiler.get()
    compiler.clear()
    with _in_force(choice, target) as context, tvm.transform.PassContext(opt_level=3):
        cached = compiler.lower(func, target, "k")
    if choice is not None and choice.config is not None and choice.config.errors:
        raise EngineError(f"the config does not fit: {choice.config.errors[0]}")
    return cached.funcs, context
