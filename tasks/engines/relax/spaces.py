"""Schedules of our own for CPUs: sketches to search in, and the default schedule of every kernel.

MetaSchedule's generic space tiles every axis freely and accumulates in memory; most of it is slow, and a
few trials find little. The sketches here are the kernel that a person would write: a tile of accumulators
that fits the vector registers, vectors along the contiguous axis, the tile unrolled, and what follows the
anchor computed on the tile while it is there. A sketch comes with decisions that are good already: as it
stands it is the default schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.target import Target, codegen

from tasks.engines.relax import int16_dots

#: Rows and vectors of a tile of accumulators: with more, they leave the registers.
_MOST_ROWS = 14
_MOST_VECTORS = 4
#: A picture with rows shorter than this has the tile's rows from the axis before.
_FEW_ROWS = 4
#: Vector registers: a tile has its accumulators there, one vector of each column and one broadcast number.
_REGISTERS, _MORE_REGISTERS = 16, 32
#: Cycles from one multiplication to the next into the same accumulator.
_LATENCY = 4
#: Loads a cycle, measured where data come from L2: kernels of 5 x 2, 4 x 2, 7 x 1 and 13 x 1 run as this predicts.
_LOADS = 1
#: Rows of a picture that are computed in vain at most.
_MOST_VAIN_ROWS = 3
#: Rows and columns are filled up where that makes a conv faster by this factor at least.
_WORTH_FILLING = 1.05
#: Columns are filled up to whole blocks where that adds at most this share.
_WORTH_WASTING = 0.15
#: Of a picture: batch, rows, columns, channels.
_PICTURE_AXES = 4
#: Steps of the reduction's last axis that are unrolled at most, and of the others (a conv's window).
_MOST_STEPS = 8
_MOST_WINDOW = 5
#: Shares of the work that there are at least, so that no core waits long for another.
_SHARES = 16
#: Vectors behind the anchor that are written without a loop; a tile in registers never has as many.
_MOST_UNROLLED = 64
#: Below so many elementary steps a kernel is done before a second core has heard of it.
WORTH_SHARING = 32768
#: From so many on, cores may be told twice: to pad, then to compute.
_WORTH_TELLING_TWICE = 1 << 21


@dataclass(frozen=True)
class Anchor:
    """The reduction that a kernel is about: its block, its loops by kind, the blocks before it and the last one."""

    block: Any
    spatial: tuple[Any, ...]
    reduction: tuple[Any, ...]
    before: tuple[Any, ...]
    last: Any


@dataclass(frozen=True)
class Variant:
    """Is the padding computed within each share of the work? Is the other operand than the larger one read once?"""

    padding_inside: bool
    turned: bool


_VARIANTS = tuple(Variant(inside, turned) for inside in (False, True) for turned in (True, False))


def lanes_of(target: Target) -> int:
    """float32 numbers in a vector register of ``target``."""
    for name, lanes in (("avx512f", 16), ("avx2", 8), ("avx", 8)):
        if codegen.llvm_cpu_has_features(name, target):
            return lanes
    return 4


def register_tiles(mod: Any, target: Target) -> list[Schedule]:
    """Sketches for ``mod``, the best guess last.

    None where it is not one reduction with a vector's width of outputs side by side.
    """
    sketches = [sketch for variant in _VARIANTS for sketch in _sketch(mod, lanes_of(target), variant)]
    return [schedule for _, schedule in sorted(sketches, key=lambda sketch: sketch[0])]


def best_guess(mod: Any, target: Target) -> Schedule | None:
    """The last one of ``register_tiles``, without making all of them."""
    last = None
    for variant in _VARIANTS:
        for good, schedule in _sketch(mod, lanes_of(target), variant):
            if good:
                return schedule
            last = schedule
    return last


def _sketch(mod: Any, lanes: int, variant: Variant) -> list[tuple[bool, Schedule]]:
    """The sketch, and whether it is a good guess; an empty list where it does not apply."""
    schedule = Schedule(mod, debug_mask="none")
    try:
        anchor = _prepare(schedule)
        if anchor is None or (variant.padding_inside and not anchor.before):
            return []
        good = not variant.turned and variant.padding_inside == _pads_inside(schedule, anchor)
        return [(good, schedule)] if _tile(schedule, anchor, lanes, variant) else []
    except Exception:
        # TVM raises what it likes where a kernel has another form; then there is no sketch.
        return []


def _prepare(schedule: Schedule) -> Anchor | None:
    """Inline what is elementwise; None where what is left is not one reduction between others."""
    blocks = list(schedule.get_child_blocks(schedule.get_sblock("root")))
    places = [i for i, block in enumerate(blocks) if is_reduction(schedule, block)]
    if len(places) != 1:
        return None
    block, behind = blocks[places[0]], blocks[places[0] + 1 :]
    before = [other for other in blocks[: places[0]] if not _is_inlined(schedule, other)]
    for other in behind[:-1]:
        schedule.compute_inline(other)
    last = behind[-1] if behind else schedule.cache_write(block, 0, "global")
    spatial, reduction = loops_by_kind(schedule, block)
    if len(schedule.get_loops(last)) == len(spatial) + 1 == _PICTURE_AXES:
        _flatten(schedule, last)  # the anchor has a picture's pixels in one row
    if len(before) > 1 or len(spatial) < 2 or len(spatial) + len(reduction) != len(schedule.get_loops(block)):
        return None
    return Anchor(block, spatial, reduction, tuple(before), last)


def _flatten(schedule: Schedule, block: Any) -> None:
    """Let a block over pictures in NHWC go over each picture's pixels in one row."""
    wide = extent(schedule, schedule.get_loops(block)[2])
    schedule.transform_block_layout(block, lambda b, y, x, f: (b, y * wide + x, f))


def is_reduction(schedule: Schedule, block: Any) -> bool:
    """Has ``block`` an axis that is reduced?"""
    return any(int(axis.iter_type) != 0 for axis in schedule.get(block).iter_vars)


def loops_by_kind(schedule: Schedule, block: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The loops of a block that nothing was done to yet: spatial ones, those of reductions."""
    kinds = [int(axis.iter_type) for axis in schedule.get(block).iter_vars]
    loops = list(zip(schedule.get_loops(block), kinds))  # noqa: B905 - the caller compares the lengths
    return tuple(loop for loop, kind in loops if kind == 0), tuple(loop for loop, kind in loops if kind != 0)


def _is_inlined(schedule: Schedule, block: Any) -> bool:
    """Inline ``block`` into its consumers unless it decides something: a conv's padding stays a block."""
    value = getattr(schedule.get(block).body, "value", None)
    if value is None or "if_then_else" in str(getattr(value, "op", "")):
        return False
    schedule.compute_inline(block)
    return True


def _pads_inside(schedule: Schedule, anchor: Anchor) -> bool:
    """Should each share of the work compute its own padding?

    Of a depthwise conv it needs its own channels only. Of another one each share would pad all of them, which
    takes longer than telling the cores a second time, but for small pictures.
    """
    if not anchor.before:
        return False
    steps = math.prod(extent(schedule, loop) for loop in (*anchor.spatial, *anchor.reduction))
    return extent(schedule, anchor.reduction[-1]) == 1 or steps < _WORTH_TELLING_TWICE


def _has_more_weights(spatial: Sequence[int], reduction: Sequence[int]) -> bool:
    """Are there more weights than data? Then it is the weights that should be read once."""
    return spatial[-1] * math.prod(reduction[:-1]) > math.prod(spatial[:-1])


def _tile(schedule: Schedule, anchor: Anchor, lanes: int, variant: Variant) -> bool:
    """Apply the sketch; False where the contiguous axis does not divide into vectors, or the output is larger."""
    *outer, column = anchor.spatial
    spatial = [extent(schedule, loop) for loop in anchor.spatial]
    paired = int16_dots.is_paired(schedule, anchor.block)
    terms = anchor.reduction[:-1] if paired else anchor.reduction
    reduction = [extent(schedule, loop) for loop in terms]
    lanes = int16_dots.LANES if paired else lanes
    whole = math.gcd(spatial[-1], *_divisors_of_column(schedule, anchor.block))
    lanes = next((n for n in (lanes, lanes // 2, 4) if whole % n == 0), 0)
    if not lanes or not all(spatial) or not all(reduction):
        return False
    if math.prod(extent(schedule, loop) for loop in schedule.get_loops(anchor.last)) > math.prod(spatial):
        return False  # what is behind spreads the anchor's outputs: a tile of them would be the whole picture
    vectors, lane = schedule.split(column, [None, lanes])
    # Each share of a depthwise conv computes its own padding: with all rows in a share, once.
    tall_shares = variant.padding_inside and reduction[-1] == 1
    window = reduction[-2] if reduction[-1] == 1 and len(reduction) > 1 else 0
    tiles = _spatial_tiles(schedule, [*outer, vectors], _Registers(lanes, window), tall_shares)
    steps = _reduction_steps(schedule, terms)
    first, second, inner = ([tile[place] for tile in tiles] for place in range(3))
    if _has_more_weights(spatial, reduction) != variant.turned:
        # All rows meet some of the columns before the next ones are read.
        first = [first[-1], *first[:-1]]
    pair = anchor.reduction[len(terms) :]
    schedule.reorder(*first, *second, *[step[0] for step in steps], *[step[1] for step in steps], *inner, lane, *pair)
    shared = schedule.fuse(*first)
    if math.prod(spatial) * math.prod(reduction) >= WORTH_SHARING:
        schedule.parallel(shared)
    schedule.reverse_compute_at(anchor.last, second[-1], preserve_unit_loops=True)
    _vectorise_below(schedule, anchor.last, len(second) + 1, lanes)
    for loop in (*[step[1] for step in steps], *inner):
        schedule.unroll(loop)
    if not paired:
        schedule.vectorize(lane)
    for block in anchor.before:
        if variant.padding_inside:
            schedule.compute_at(block, shared, preserve_unit_loops=True)
            _vectorise_below(schedule, block, 1, lanes, unroll=False)
        else:
            spread(schedule, block, lanes)
    zeros = schedule.decompose_reduction(anchor.block, steps[0][0])
    if paired:
        schedule.vectorize(schedule.get_loops(zeros)[-1])
        int16_dots.tensorise(schedule, lane)
    return True


def _divisors_of_column(schedule: Schedule, block: Any) -> list[int]:
    """By what ``block`` divides its column: a vector that crosses such a border is gathered number by number."""
    read = schedule.get(block)
    column = [axis.var for axis in read.iter_vars if int(axis.iter_type) == 0][-1]
    left = [bounds.min for region in read.reads for bounds in region.region]
    found: list[int] = []
    while left:
        node = left.pop()
        if isinstance(node, tvm.tirx.FloorDiv) and node.a.same_as(column) and isinstance(node.b, tvm.tirx.IntImm):
            found.append(int(node.b))
        left += [getattr(node, side) for side in ("a", "b") if hasattr(node, side)]
    return found


@dataclass(frozen=True)
class _Registers:
    """What tiles are made for: vectors of ``lanes``, and the width of a depthwise conv's window, 0 for others."""

    lanes: int
    window: int

    def best_tile(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and vectors of the tile that computes most a cycle, and of these the one that reads least."""
        registers = _MORE_REGISTERS if self.lanes >= 16 else _REGISTERS

        def worth(tile: tuple[int, int]) -> tuple[float, float]:
            tall, vectors = tile
            return self.speed(tile), tall * vectors / (tall + vectors)

        tiles = itertools.product(range(1, _MOST_ROWS + 1), range(1, _MOST_VECTORS + 1))
        fitting = [(r, v) for r, v in tiles if rows % r == 0 and columns % v == 0 and self._fit(r, v, registers)]
        return max(fitting, key=worth)

    def speed(self, tile: tuple[int, int]) -> float:
        """Multiplications of vectors a cycle, of two at most."""
        tall, vectors = tile
        return tall * vectors / max(tall * vectors / 2, self._loads(tall, vectors) / _LOADS, _LATENCY)

    def _loads(self, tall: int, vectors: int) -> float:
        """Loads for each multiplication of all accumulators."""
        if not self.window:
            return tall + vectors
        # Neighbours in a row read the same numbers; each channel has weights of its own.
        return vectors * (tall + 2 * self.window - 1) / self.window

    def _fit(self, tall: int, vectors: int, registers: int) -> bool:
        """A depthwise conv has its data in vectors too, where others have one number for all lanes."""
        return tall * vectors <= registers // 2 if self.window else tall * vectors + vectors < registers


def rows_to_compute(rows: int, columns: int, lanes: int) -> int:
    """How many rows a conv should compute to have ``rows``: a few in vain where that gives better tiles."""
    if rows < _FEW_ROWS or columns % lanes:
        return rows
    speeds = {padded: _speed(padded, columns, lanes) / padded for padded in range(rows, rows + _MOST_VAIN_ROWS + 1)}
    best = max(speeds, key=lambda padded: speeds[padded])
    return best if speeds[best] >= _WORTH_FILLING * speeds[rows] else rows


def is_flat_better(high: int, wide: int, columns: int, lanes: int) -> bool:
    """Should a 1x1 conv take a picture's pixels as one row? Rows that make no good tile are short more often."""
    if columns % lanes:
        return False
    return _useful_speed(high * wide, columns, lanes) >= _WORTH_FILLING * _useful_speed(wide, columns, lanes)


def best_block(rows: int, columns: int, lanes: int) -> int:
    """Columns of a conv's block of weights: two vectors or three, the last block filled up where that is faster."""
    speeds = {}
    for vectors in (2, 3):
        padded = -(-columns // (vectors * lanes)) * vectors * lanes
        speeds[vectors] = _useful_speed(rows, padded, lanes) * columns / padded
    return (3 if speeds[3] >= _WORTH_FILLING * speeds[2] else 2) * lanes


def fills_cheaply(columns: int, block: int) -> bool:
    """Do whole blocks of so many columns add few enough?"""
    return -columns % block <= columns * _WORTH_WASTING


def _useful_speed(rows: int, columns: int, lanes: int) -> float:
    """``_speed`` without the rows that are computed in vain."""
    computed = rows_to_compute(rows, columns, lanes)
    return _speed(computed, columns, lanes) * rows / computed


def _speed(rows: int, columns: int, lanes: int) -> float:
    registers = _Registers(lanes, 0)
    return registers.speed(registers.best_tile(rows, columns // lanes))


def _spatial_tiles(
    schedule: Schedule, loops: Sequence[Any], registers: _Registers, tall_shares: bool
) -> list[list[Any]]:
    """Each loop in three: shared between cores, walked, in registers. The last one is that of vectors.

    ``tall_shares``: cores share the columns alone, where there are enough.
    """
    sizes = [extent(schedule, loop) for loop in loops]
    rows = max((i for i in range(len(loops) - 1) if sizes[i] >= _FEW_ROWS), default=len(loops) - 2)
    tall, vectors = registers.best_tile(sizes[rows], sizes[-1])
    shares = math.prod(sizes) // (sizes[rows] * vectors)
    walked = sizes[rows] // tall
    while shares < _SHARES and walked > 1:
        smaller = divisor(walked, walked // 2)
        shares, walked = shares * walked // smaller, smaller
    whole = tall_shares and sizes[-1] // vectors >= _SHARES // 2
    if whole:
        walked = sizes[rows] // tall
    tiles = []
    for place, (loop, size) in enumerate(zip(loops, sizes, strict=True)):
        most, decision = 1, [1, size, 1] if whole else [size, 1, 1]
        if place == rows:
            most, decision = _MOST_ROWS, [size // tall // walked, walked, tall]
        elif place == len(loops) - 1:
            most, decision = _MOST_VECTORS, [size // vectors, 1, vectors]
        factors = schedule.sample_perfect_tile(loop, 3, most, decision)
        tiles.append(list(schedule.split(loop, factors)))
    return tiles


def _reduction_steps(schedule: Schedule, loops: Sequence[Any]) -> list[list[Any]]:
    """Each loop in two, the inner one unrolled: a depthwise window's last axis, else some of the channels."""
    steps = []
    deep = extent(schedule, loops[-1]) > 1
    for place, loop in enumerate(loops):
        size, most, unrolled = extent(schedule, loop), _MOST_WINDOW, 1
        if place == len(loops) - 1:
            most, unrolled = _MOST_STEPS, divisor(size, _MOST_STEPS // 2)
        elif place == len(loops) - 2 and not deep:
            unrolled = divisor(size, _MOST_WINDOW)
        factors = schedule.sample_perfect_tile(loop, 2, most, [size // unrolled, unrolled])
        steps.append(list(schedule.split(loop, factors)))
    return steps


def divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is not above ``most``."""
    return next(n for n in range(max(1, most), 0, -1) if number % n == 0)


def extent(schedule: Schedule, loop: Any) -> int:
    """The extent of a loop, 0 where it is no number."""
    size = schedule.get(loop).extent
    return int(size) if isinstance(size, tvm.tirx.IntImm) else 0


def _vectorise_below(schedule: Schedule, block: Any, depth: int, lanes: int, unroll: bool = True) -> None:
    """Vectors along the last of the loops below ``depth``, the others unrolled where they are few."""
    loops = schedule.get_loops(block)[depth:]
    outer, lane = schedule.split(loops[-1], [None, lanes])
    schedule.vectorize(lane)
    above = [*loops[:-1], outer]
    if unroll and math.prod(extent(schedule, loop) for loop in above) <= _MOST_UNROLLED:
        for loop in above:
            schedule.unroll(loop)


def spread(schedule: Schedule, block: Any, lanes: int) -> None:
    """A loop nest of its own, on all cores and in vectors."""
    *outer, last = schedule.get_loops(block)
    if outer:
        schedule.parallel(schedule.fuse(*outer))
    if extent(schedule, last) % lanes == 0:
        _, lane = schedule.split(last, [None, lanes])
        schedule.vectorize(lane)
