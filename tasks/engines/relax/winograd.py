"""Winograd's algorithm for 3x3 convs: another implementation of the same kernel, for the search to measure.

Tiles of 4 x 4 outputs, F(4x4, 3x3): 36 multiplications where the direct conv has 144 (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2015). The kernel has the arguments of the direct one, so that
either may be measured and built in the other's place. Weights are transformed at each call, a small part of the
work where the picture is large, into the cache that they are read from.

A *plan* is the shape of the computation: how many rows of tiles are transformed, multiplied and transformed back
together, so that what lies between stays in the cache, and how wide the blocks of columns are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx, topi
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.target import Target

from tasks.engines.relax import spaces

#: On a conv's PrimFunc: Winograd may compute it. Its padding (top, left, bottom, right), and columns of the output.
_MARK = "tunewright.winograd"
#: Outputs of a tile along an axis, and inputs.
_OUT, _IN = 4, 6
_OF_INPUT = ((4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
             (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1))  # fmt: skip
_OF_WEIGHTS = ((1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
               (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1))  # fmt: skip
_OF_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
#: A picture with shorter sides has more work in its weights than in itself.
_LEAST_SIDE = 10
#: With fewer channels or columns the transforms are most of the work.
_LEAST_CHANNELS = 16
#: Tiles that meet a block of weights at a time, at least: with fewer, weights are read too often.
_TILES_TOGETHER = 24
#: Cores share the columns where all tiles of a picture may meet a block of weights: up to so many.
_MOST_TILES = 64
#: Vectors of a block, rows of a tile of accumulators beside them, steps of the reduction that are unrolled.
_VECTORS = (2, 3)
_TALL = 4
_STEPS = 4


@dataclass(frozen=True)
class Plan:
    """So many ``rows`` of tiles together, in blocks of so many ``vectors``; ``shared`` says what cores share."""

    rows: int
    vectors: int
    shared: str

    @property
    def name(self) -> str:
        """The implementation, as records have it."""
        return f"winograd-{self.shared}-{self.rows}x{self.vectors}"


@dataclass(frozen=True)
class _Conv:
    """The sizes of a marked conv. ``block``: columns of a block of its packed weights."""

    batch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    channels: int
    columns: int
    block: int
    padding: tuple[int, ...]

    @classmethod
    def of(cls, func: Any) -> _Conv:
        """Read off the PrimFunc's arguments: NHWC, (blocks, 3, 3, channels, block), NHWC."""
        data, weights, out = (tuple(map(int, info.shape)) for info in ArgInfo.from_prim_func(func))
        *padding, columns = map(int, func.attrs[_MARK])
        return cls(data[0], data[1:3], out[1:3], data[3], columns, weights[4], tuple(padding))

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles from top to bottom, and from left to right."""
        return -(-self.outputs[0] // _OUT), -(-self.outputs[1] // _OUT)


def mark(func: Any, padding: Sequence[int], columns: int) -> Any:
    """``func``, a dense 3x3 conv over packed weights with steps of one, with the note that Winograd may compute it."""
    return func.with_attr(_MARK, [*map(int, padding), columns])


def is_marked(func: Any) -> bool:
    """May Winograd compute this PrimFunc?"""
    return bool(func.attrs) and _MARK in func.attrs


def plans(func: Any, lanes: int) -> list[Plan]:
    """The plans for a marked conv and vectors of ``lanes``; none where it is too small to gain."""
    conv = _Conv.of(func)
    if min(conv.outputs) < _LEAST_SIDE or min(conv.channels, conv.columns) < _LEAST_CHANNELS or conv.channels % lanes:
        return []
    down, across = conv.tiles
    vectors = [v for v in _VECTORS if spaces.fills_cheaply(conv.columns, v * lanes)]
    rows = -(-_TILES_TOGETHER // across)
    found = [Plan(rows, v, "rows") for v in vectors if rows < down]
    if down * across <= _MOST_TILES:
        found += [Plan(down, v, "columns") for v in vectors]
    return found


def implementation(func: Any, plan: Plan, lanes: int) -> Any:
    """The marked conv ``func`` as ``plan`` computes it, with the same arguments."""
    data, weights, _ = (tuple(map(int, info.shape)) for info in ArgInfo.from_prim_func(func))
    inputs = te.placeholder(data, "float32", "data"), te.placeholder(weights, "float32", "packed")
    made = te.create_prim_func([*inputs, _computed(*inputs, _Conv.of(func), plan, lanes)], "int64")
    return made.with_attr("op_pattern", func.attrs["op_pattern"])


def _computed(data: Any, weights: Any, conv: _Conv, plan: Plan, lanes: int) -> Any:
    """The conv: padded, its input, weights, products and outputs transformed, and cut to its size."""
    (down, across), rows, block = conv.tiles, plan.rows, plan.vectors * lanes
    groups, blocks = -(-down // rows), -(-conv.columns // block)
    tiles = -(-rows * across // _TALL) * _TALL
    top, left, *_ = conv.padding
    bottom = groups * rows * _OUT + _IN - _OUT - top - conv.inputs[0]
    right = across * _OUT + _IN - _OUT - left - conv.inputs[1]
    padded = topi.nn.pad(data, [0, top, left, 0], [0, bottom, right, 0], name="winograd_pad")

    def tile_at(t: Any) -> tuple[Any, Any]:
        """Row within the group, and column, of a tile; those that fill the group up are one of the last row."""
        return (t // across if tiles == rows * across else te.min(t // across, rows - 1)), t % across

    def weight(f: Any, ky: Any, kx: Any, c: Any, v: Any) -> Any:
        column = f * block + v
        column = column if blocks * block == conv.columns else te.min(column, conv.columns - 1)
        return weights[column // conv.block, ky, kx, c, column % conv.block]

    input_rows = te.compute(
        (conv.batch, groups, tiles, _IN, _IN, conv.channels),
        lambda b, g, t, i, x, c: _transformed(
            _OF_INPUT, i,
            lambda k: padded[b, (g * rows + tile_at(t)[0]) * _OUT + k, tile_at(t)[1] * _OUT + x, c],
        ), name="winograd_input_rows",
    )  # fmt: skip
    inputs = te.compute(
        (conv.batch, groups, _IN, _IN, tiles, conv.channels),
        lambda b, g, i, j, t, c: _transformed(_OF_INPUT, j, lambda k: input_rows[b, g, t, i, k, c]),
        name="winograd_input",
    )
    weight_rows = te.compute(
        (blocks, _IN, 3, conv.channels, block),
        lambda f, i, x, c, v: _transformed(_OF_WEIGHTS, i, lambda k: weight(f, k, x, c, v)),
        name="winograd_weight_rows",
    )
    transformed = te.compute(
        (blocks, _IN, _IN, conv.channels, block),
        lambda f, i, j, c, v: _transformed(_OF_WEIGHTS, j, lambda k: weight_rows[f, i, k, c, v]),
        name="winograd_weights",
    )
    rc = te.reduce_axis((0, conv.channels), "rc")
    products = te.compute(
        (conv.batch, groups, blocks, _IN, _IN, tiles, block),
        lambda b, g, f, i, j, t, v: te.sum(inputs[b, g, i, j, t, rc] * transformed[f, i, j, rc, v], axis=[rc]),
        name="winograd_product",
    )
    output_rows = te.compute(
        (conv.batch, groups * rows, across, _OUT, _IN, blocks * block),
        lambda b, y, x, i, j, f: _transformed(
            _OF_OUTPUT, i,
            lambda k: products[b, y // rows, f // block, k, j, y % rows * across + x, f % block],
        ), name="winograd_output_rows",
    )  # fmt: skip
    outputs = te.compute(
        (conv.batch, groups * rows, across, _OUT, _OUT, blocks * block),
        lambda b, y, x, i, j, f: _transformed(_OF_OUTPUT, j, lambda k: output_rows[b, y, x, i, k, f]),
        name="winograd_output",
    )
    return te.compute(
        (conv.batch, *conv.outputs, conv.columns),
        lambda b, y, x, f: outputs[b, y // _OUT, x // _OUT, y % _OUT, x % _OUT, f],
        name="conv2d",
    )


def _transformed(matrix: Sequence[Sequence[float]], row: Any, value: Callable[[int], Any]) -> Any:
    """The product of ``matrix``'s ``row`` (a loop that is unrolled later) with the values."""
    sums = [_sum(factors, value) for factors in matrix]
    chosen = sums[-1]
    for place in reversed(range(len(sums) - 1)):
        chosen = tirx.Select(row == place, sums[place], chosen)
    return chosen


def _sum(factors: Sequence[float], value: Callable[[int], Any]) -> Any:
    total: Any = None
    for place, factor in enumerate(factors):
        if factor == 0:
            continue
        size = value(place) if abs(factor) == 1 else value(place) * tirx.const(abs(factor), "float32")
        if total is None:
            total = size if factor > 0 else tirx.const(0, "float32") - size
        else:
            total = total + size if factor > 0 else total - size
    return total


def sketch(mod: Any, plan: Plan, target: Target) -> Schedule:
    """The schedule of a subgraph whose conv is computed by ``plan``.

    Raises whatever TVM raises where what is behind the conv has another form.
    """
    schedule = Schedule(mod, debug_mask="none")
    found = schedule.get_child_blocks(schedule.get_sblock("root"))
    names = [schedule.get(block).name_hint for block in found]
    behind = found[names.index("winograd_output") + 1 :]
    for block in behind[:-1]:
        schedule.compute_inline(block)
    _Stages(schedule, dict(zip(names, found, strict=True)), spaces.lanes_of(target)).arrange(behind[-1], plan)
    return schedule


@dataclass(frozen=True)
class _Stages:
    """The blocks of a kernel by name, and how each is scheduled."""

    schedule: Schedule
    blocks: dict[str, Any]
    lanes: int

    def arrange(self, last: Any, plan: Plan) -> None:
        """Everything inside the loops of the last block, tile by tile; what is shared by all, before it."""
        schedule = self.schedule
        batch, y, x, column = schedule.get_loops(last)
        block, column = schedule.split(column, [None, plan.vectors * self.lanes])
        vector, lane = schedule.split(column, [None, self.lanes])
        tile_y, y = schedule.split(y, [None, _OUT])
        group, tile_y = schedule.split(tile_y, [None, plan.rows])
        tile_x, x = schedule.split(x, [None, _OUT])
        outer = [batch, block, group] if plan.shared == "columns" else [batch, group, block]
        schedule.reorder(*outer, tile_y, tile_x, vector, y, x, lane)
        shared = schedule.fuse(*outer[:2])
        schedule.parallel(shared)
        schedule.vectorize(lane)
        schedule.unroll(y)
        schedule.unroll(x)
        for name in ("winograd_output", "winograd_output_rows"):
            schedule.compute_at(self.blocks[name], vector, preserve_unit_loops=True)
            self._straight(name, 5)
        self._multiply(outer[2], plan)
        # Whatever the cores share, the other side is transformed once, before all.
        inside, before = ("weights", "input") if plan.shared == "columns" else ("input", "weights")
        schedule.compute_at(self.blocks[f"winograd_{inside}"], shared, preserve_unit_loops=True)
        for side in (inside, before):
            self._transform(side, alone=side == before)
        spaces.spread(schedule, self.blocks["winograd_pad"], self.lanes)

    def _multiply(self, at: Any, plan: Plan) -> None:
        """36 products of matrices, in tiles of accumulators that stay in registers."""
        schedule, product = self.schedule, self.blocks["winograd_product"]
        schedule.compute_at(product, at, preserve_unit_loops=True)
        *_, tile, column, channel = schedule.get_loops(product)
        tile, row = schedule.split(tile, [None, _TALL])
        vector, lane = schedule.split(column, [plan.vectors, self.lanes])
        unrolled = spaces.divisor(spaces.extent(schedule, channel), _STEPS)
        channel, step = schedule.split(channel, [None, unrolled])
        schedule.reorder(tile, channel, step, row, vector, lane)
        for loop in (step, row, vector):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        schedule.decompose_reduction(product, channel)

    def _transform(self, side: str, alone: bool) -> None:
        """A vector of tiles at a time: first along the columns of each, then along its rows."""
        schedule, block = self.schedule, self.blocks[f"winograd_{side}"]
        axes = len(schedule.get(block).iter_vars)
        *outer, i, j, each, last = schedule.get_loops(block)[-axes:]
        outer.append(each)
        vector, lane = schedule.split(last, [None, self.lanes])
        schedule.reorder(*outer, vector, i, j, lane)
        if alone:
            schedule.parallel(schedule.fuse(*outer))
        schedule.vectorize(lane)
        schedule.unroll(i)
        schedule.unroll(j)
        rows = "winograd_input_rows" if side == "input" else "winograd_weight_rows"
        schedule.compute_at(self.blocks[rows], vector, preserve_unit_loops=True)
        self._straight(rows, 4)

    def _straight(self, name: str, inner: int) -> None:
        """No loops but vectors in the ``inner`` last loops of a block."""
        schedule = self.schedule
        *loops, last = schedule.get_loops(self.blocks[name])[-inner:]
        vector, lane = schedule.split(last, [None, self.lanes])
        schedule.vectorize(lane)
        for loop in (*loops, vector):
            schedule.unroll(loop)
