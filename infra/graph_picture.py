"""The fused graph as a picture, laid out without graphviz, which is not on every machine.

A network is long and thin: its calls are placed in layers by their longest way from an input, and the
layers fold into columns that read top to bottom, then left to right, so that 150 calls stay legible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.records import FusedModule, FusedSubgraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
#: A box and the room around it, in inches.
BOX_WIDTH, BOX_HEIGHT = 1.95, 0.44
STEP_X, STEP_Y = 2.1, 0.62
COLUMN_GAP = 0.55
MARGIN_TOP, MARGIN = 0.9, 0.3
#: Width over height that the picture aims at: a screen's.
ASPECT = 1.7
LINE, LINE_AROUND = "#6b7785", "#8a96a3"


@dataclass(frozen=True)
class Placed:
    """Where every call's box has its centre, in inches from the upper left, and the picture's size.

    ``gutters`` is the middle of the empty stripe on the left of each call's column.
    """

    centres: tuple[tuple[float, float], ...]
    gutters: tuple[float, ...]
    layer: tuple[int, ...]
    width: float
    height: float


def fused_graph(path: Path, fused: FusedModule, share: Mapping[str, float]) -> None:
    """Draw every kernel call: anchor operator and output shape, coloured by its share of the run time.

    ``share`` is a subgraph's part of the run time, all its calls together, by name. A picture of
    about 150 calls takes two seconds. Raises OSError where ``path`` cannot be written.
    """
    from matplotlib.figure import Figure

    placed = place(fused)
    figure = Figure(figsize=(placed.width, placed.height), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, placed.width)
    axes.set_ylim(placed.height, 0)
    axes.set_axis_off()
    _draw_edges(axes, fused, placed)
    _draw_boxes(axes, fused, placed, share)
    _draw_title(axes, figure, fused, share)
    figure.savefig(path, format="png")


def place(fused: FusedModule) -> Placed:
    """Lay the calls out: layers by the longest way from an input, folded into columns."""
    layer = _layers(fused)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for call, at in enumerate(layer):
        members[at].append(call)
    depth = len(members)
    columns = _columns(members, depth)
    rows = math.ceil(depth / columns) if depth else 1
    centres = [(0.0, 0.0)] * len(layer)
    gutters = [0.0] * len(layer)
    left = MARGIN
    for first in range(0, depth, rows):
        block = [members[at] for at in range(first, min(first + rows, depth))]
        wide = max(map(len, block)) * STEP_X
        for row, calls in enumerate(block):
            start = left + (wide - len(calls) * STEP_X) / 2 + STEP_X / 2
            for position, call in enumerate(_by_feeds(fused, calls, centres)):
                centres[call] = (start + position * STEP_X, MARGIN_TOP + (row + 0.5) * STEP_Y)
                gutters[call] = left - COLUMN_GAP / 2
        left += wide + COLUMN_GAP
    # The gap after the last column is for the lines that pass a box on its right.
    width = max(left + MARGIN, 7.0)
    return Placed(tuple(centres), tuple(gutters), layer, width, MARGIN_TOP + rows * STEP_Y + MARGIN)


def _layers(fused: FusedModule) -> tuple[int, ...]:
    layer: list[int] = []
    for at, call in enumerate(fused.calls):
        layer.append(1 + max((layer[feed] for feed in call.feeds_from if feed < at), default=-1))
    return tuple(layer)


def _columns(members: Mapping[int, list[int]], depth: int) -> int:
    """How many columns bring the picture nearest to ``ASPECT``."""

    def distance(columns: int) -> float:
        rows = math.ceil(depth / columns)
        blocks = [range(first, min(first + rows, depth)) for first in range(0, depth, rows)]
        wide = sum(max(len(members[at]) for at in block) * STEP_X + COLUMN_GAP for block in blocks)
        return abs(math.log(wide / (rows * STEP_Y + MARGIN_TOP) / ASPECT))

    return min(range(1, max(2, depth // 3 + 1)), key=distance) if depth else 1


def _by_feeds(fused: FusedModule, calls: list[int], centres: list[tuple[float, float]]) -> list[int]:
    """Neighbours of a layer in the order of what feeds them: fewer lines cross."""

    def mean_x(call: int) -> float:
        feeds = fused.calls[call].feeds_from
        return sum(centres[feed][0] for feed in feeds) / len(feeds) if feeds else 0.0

    return sorted(calls, key=lambda call: (mean_x(call), call))


def _draw_edges(axes: Axes, fused: FusedModule, placed: Placed) -> None:
    for at, call in enumerate(fused.calls):
        for feed in call.feeds_from:
            (x0, _), (x1, _) = placed.centres[feed], placed.centres[at]
            skips = placed.layer[at] - placed.layer[feed] > 1
            if placed.gutters[feed] != placed.gutters[at]:
                _draw_around(axes, placed, feed, at)
            elif skips and abs(x1 - x0) < BOX_WIDTH:
                _draw_beside(axes, placed, feed, at)
            else:
                _draw_down(axes, placed, feed, at)


def _draw_down(axes: Axes, placed: Placed, feed: int, at: int) -> None:
    """From the foot of a box to the head of one below it."""
    (x0, y0), (x1, y1) = placed.centres[feed], placed.centres[at]
    _arrow(axes, (x0, y0 + BOX_HEIGHT / 2), (x1, y1 - BOX_HEIGHT / 2), 0.0)


def _draw_beside(axes: Axes, placed: Placed, feed: int, at: int) -> None:
    """In a bow past the boxes between the two, from the right side to the right side."""
    (x0, y0), (x1, y1) = placed.centres[feed], placed.centres[at]
    _arrow(axes, (x0 + BOX_WIDTH / 2, y0), (x1 + BOX_WIDTH / 2, y1), -0.25)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    style = f"arc3,rad={bend}"
    made = FancyArrowPatch(start, end, arrowstyle="-|>", connectionstyle=style, mutation_scale=7, color=LINE, lw=0.8)
    axes.add_patch(made)


def _draw_around(axes: Axes, placed: Placed, feed: int, at: int) -> None:
    """To another column: between the rows to the gutter left of it, up there, in between the rows again."""
    (x0, y0), (x1, y1) = placed.centres[feed], placed.centres[at]
    gutter, lane = placed.gutters[at], STEP_Y / 2
    # What skips layers besides is drawn apart from the way of the chain itself.
    if placed.layer[at] - placed.layer[feed] > 1:
        gutter, lane = gutter + 0.12, lane - 0.04
    corners = [
        *((x0, y0 + BOX_HEIGHT / 2), (x0, y0 + lane), (gutter, y0 + lane)),
        *((gutter, y1 - lane), (x1, y1 - lane), (x1, y1 - BOX_HEIGHT / 2)),
    ]
    axes.plot([x for x, _ in corners], [y for _, y in corners], color=LINE_AROUND, lw=0.9, zorder=0)
    head = {"arrowstyle": "-|>", "color": LINE_AROUND, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", corners[-1], corners[-2], arrowprops=head)


def _draw_boxes(axes: Axes, fused: FusedModule, placed: Placed, share: Mapping[str, float]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    graphs = {graph.name: graph for graph in fused.subgraphs}
    most = max(share.values(), default=0.0) or 1.0
    for call, (x, y) in zip(fused.calls, placed.centres, strict=True):
        graph = graphs.get(call.subgraph)
        part = share.get(call.subgraph, 0.0)
        # The root spreads the small shares: most subgraphs are below a tenth of the largest.
        level = math.sqrt(max(part, 0.0) / most)
        box = FancyBboxPatch(
            (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
            BOX_WIDTH,
            BOX_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=colormaps["YlOrRd"](0.05 + 0.8 * level),
            edgecolor="#4a5560",
            lw=0.7,
            zorder=2,
        )
        axes.add_patch(box)
        text = _label(call.subgraph, graph, part)
        colour = "white" if level > 0.8 else "black"
        axes.text(x, y, text, ha="center", va="center", fontsize=6.6, color=colour, zorder=3, linespacing=1.15)


def _label(name: str, graph: FusedSubgraph | None, part: float) -> str:
    if graph is None:
        return name[:24]
    extra = len(graph.operators) - 1
    head = graph.anchor_operator[:20] + (f" +{extra}" if extra > 0 else "")
    percent = f" · {part:.1%}" if part >= 0.001 else ""
    shape = "x".join(map(str, graph.outputs[0].shape)) if graph.outputs else ""
    return f"{head}{percent}\n{shape} {graph.output_dtype}"[:60]


def _draw_title(axes: Axes, figure: Figure, fused: FusedModule, share: Mapping[str, float]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    width, height = figure.get_size_inches()
    model = fused.imported.model.name
    axes.text(
        MARGIN, 0.3, f"{model}: {len(fused.calls)} kernel calls of {len(fused.subgraphs)} fused subgraphs",
        fontsize=11, va="center",
    )  # fmt: skip
    axes.text(
        MARGIN, 0.56, "anchor operator +fused operators · share of run time; output shape and dtype",
        fontsize=8, va="center", color="#4a5560",
    )  # fmt: skip
    bar = figure.add_axes((1 - 2.3 / width, 1 - 0.42 / height, 2.0 / width, 0.13 / height))
    most = max(share.values(), default=0.0) or 1.0
    scale = ScalarMappable(norm=PowerNorm(0.5, 0, most * 100), cmap="YlOrRd")
    figure.colorbar(scale, cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=7, length=2)
    bar.set_title("% of run time", fontsize=7, pad=2)
