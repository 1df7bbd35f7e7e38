"""What may be tuned of a subgraph: the implementations of its anchor operator, and the configs of each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tvm

from tasks.engines.relay import costs
from tasks.engines.relay.lowering import Choice, config_space, implementations
from tasks.engines.relay.subgraphs import anchor_of
from tasks.records import short_hash

_BLOCKED_CONVS = ("nn.contrib_conv2d_NCHWc", "nn.contrib_depthwise_conv2d_NCHWc")


@dataclass(frozen=True)
class Space:
    """One implementation. ``configs`` is AutoTVM's space, None where the implementation has no template."""

    operator: str
    implementation: str
    priority: int
    configs: Any
    workload: Any

    def choice(self, index: int | None) -> Choice:
        """The config of that index; None for an implementation without a template."""
        config = None if index is None else self.configs.get(index)
        return Choice(self.operator, self.implementation, config, self.workload)

    def index_of(self, config: Any) -> int | None:
        """Where ``config``, of this or another workload, is in this space; None where it does not fit."""
        knobs = []
        for name, options in self.configs.space_map.items():
            entity = config._entity_map.get(name)
            place = None if entity is None else _place(entity, options.entities)
            if place is None:
                return None
            knobs.append(place)
        index = int(self.configs.knob2point(knobs))
        return index if not hasattr(self.configs, "is_index_valid") or self.configs.is_index_valid(index) else None

    def nearest(self, config: Any) -> int | None:
        """The index of the config here that tiles as ``config`` does, tile sizes as near as this space has them."""
        knobs = []
        for name, options in self.configs.space_map.items():
            entity = config._entity_map.get(name)
            knobs.append(0 if entity is None else _nearest(entity, options.entities))
        index = int(self.configs.knob2point(knobs))
        return index if not hasattr(self.configs, "is_index_valid") or self.configs.is_index_valid(index) else None


def candidate_key(choice: Choice) -> str:
    """Names a candidate within its workload: the same implementation and knobs give the same kernel."""
    entity = None if choice.config is None else choice.config.to_json_dict()["entity"]
    return short_hash(choice.implementation, json.dumps(entity, default=int))


def spaces_of(func: Any, target: Any) -> list[Space]:
    """Every implementation that the anchor's strategy offers for ``target``, the preferred one first.

    One whose space cannot be defined here is left out.
    """
    anchor = anchor_of(func)
    inputs = [_placeholders(arg.checked_type) for arg in anchor.args]
    inputs = [tensor for group in inputs for tensor in group]
    with target:
        offered = implementations(anchor, inputs, target)
    found = []
    for name, implementation in offered.items():
        choice = Choice(anchor.op.name, name)
        try:
            configs, workload = config_space(func, target, choice)
        except Exception:  # noqa: S112 - TVM raises anything; what cannot be lowered is no candidate
            continue
        if configs is not None:
            _keep_layout(configs, anchor)
        found.append(Space(anchor.op.name, name, int(implementation.plevel), configs, workload))
    return sorted(found, key=lambda space: -space.priority)


def _placeholders(type_: Any) -> list[Any]:
    return [tvm.te.placeholder(costs.shape_of(part), dtype=part.dtype) for part in costs.tensors(type_)]


def _keep_layout(configs: Any, anchor: Any) -> None:
    """Take out configs that differ in what the graph's layout has decided: they would all be one kernel."""
    if anchor.op.name not in _BLOCKED_CONVS:
        return
    blocks = {"tile_ic": anchor.attrs.data_layout, "tile_oc": anchor.attrs.out_layout}
    for name, layout in blocks.items():
        number = re.search(r"(\d+)c", str(layout))
        options = configs.space_map.get(name)
        if number is None or options is None:
            continue
        kept = [entity for entity in options.entities if entity.size[-1] == int(number[1])]
        if kept:
            options.entities[:] = kept
    configs._dims = configs._length = configs._range_length = None


def _values(entity: Any) -> list[Any]:
    """An entity's decision as plain values."""
    for name in ("size", "perm", "anns", "val"):
        if hasattr(entity, name):
            value = getattr(entity, name)
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return [repr(entity)]


def _place(entity: Any, options: Any) -> int | None:
    wanted = repr(entity)
    return next((index for index, option in enumerate(options) if repr(option) == wanted), None)


def _nearest(entity: Any, options: Any) -> int:
    """The option whose values differ least, inner tile sizes counting most."""
    wanted = _values(entity)

    def distance(option: Any) -> float:
        total = 0.0
        for depth, (a, b) in enumerate(zip(reversed(wanted), reversed(_values(option)))):  # noqa: B905
            if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > 0 and b > 0:
                total += abs(a - b) / max(a, b) / (1 + depth)
            elif a != b:
                total += 1.0 / (1 + depth)
        return total

    return min(range(len(options)), key=lambda index: distance(options[index]))
