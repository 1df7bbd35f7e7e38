"""The roofline: how near each subgraph comes to what the machine can do at most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.pictures import AFTER, BEFORE, new_figure, save, short
from infra.run_figures import Dot
from tasks.records import Roof

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Subgraphs that are named in the picture; the others are dots only.
_NAMED = 5


def roofline(path: Path, dots: Sequence[Dot], roof: Roof) -> None:
    """One dot a subgraph: FLOPs a second against FLOPs a byte; its area is its share of the time after tuning.

    Raises OSError where ``path`` cannot be written.
    """
    figure = new_figure(10, 6.2)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [dot.intensity for dot in dots]
    low, high = min(intensities) / 2, max(*intensities, 2 * roof.flops_per_s / roof.bytes_per_s) * 2
    _draw_roof(axes, roof, low, high)
    for dot in dots:
        area = 18 + 900 * dot.share
        if dot.before_flops_per_s:
            axes.plot([dot.intensity] * 2, [dot.before_flops_per_s, dot.after_flops_per_s], color=BEFORE, lw=0.8)
            axes.scatter(dot.intensity, dot.before_flops_per_s, 16, facecolor="white", edgecolor=BEFORE, zorder=3)
        axes.scatter(dot.intensity, dot.after_flops_per_s, area, color=AFTER, alpha=0.75, zorder=4)
    for number, dot in enumerate(dots[:_NAMED], 1):
        place = (dot.intensity, dot.after_flops_per_s)
        axes.annotate(str(number), place, ha="center", va="center", fontsize=8, color="white", zorder=5)
    _name(axes, dots[:_NAMED], roof)
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOPs per byte moved (inputs and outputs of the subgraph)")
    axes.set_ylabel("FLOP/s, float32")
    axes.set_title(
        f"Roofline: {len(dots)} subgraphs, untuned (white) and tuned (blue, area by share of time), "
        f"{roof.threads} threads",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", color="#e5e8eb", zorder=0)
    save(figure, path)


def _draw_roof(axes: Axes, roof: Roof, low: float, high: float) -> None:
    """What memory allows up to the ridge, what arithmetic allows after it; what the caches allow, dashed."""
    for bandwidth, style, what in (
        (roof.bytes_per_s, "-", "memory"),
        (roof.cache_bytes_per_s, "--", "nearest caches"),
    ):
        ridge = min(max(roof.flops_per_s / bandwidth, low), high)
        label = f"{what}: {bandwidth / 1e9:.3g} GB/s, as measured"
        axes.plot([low, ridge], [low * bandwidth, ridge * bandwidth], style, color="#333a42", lw=1.3, label=label)
    axes.legend(loc="upper left", fontsize=8)
    first = min(max(roof.flops_per_s / roof.cache_bytes_per_s, low), high)
    axes.plot([first, high], [roof.flops_per_s] * 2, "-", color="#333a42", lw=1.3)
    axes.annotate(
        f"measured peak: {roof.flops_per_s / 1e9:.3g} GFLOP/s", (high, roof.flops_per_s), (-4, 5),
        textcoords="offset points", ha="right", fontsize=8, color="#333a42",
    )  # fmt: skip


def _name(axes: Axes, dots: Sequence[Dot], roof: Roof) -> None:
    """Which dots take most of the time, and how much of what is possible there they reach."""
    lines = []
    for number, dot in enumerate(dots, 1):
        # Small tensors stay in the caches between two kernels, so that memory's roof is none for them.
        possible = min(roof.flops_per_s, dot.intensity * roof.cache_bytes_per_s)
        lines.append(
            f"{number}  {short(dot.name, 44):44}  {dot.share:4.0%} of the time, "
            f"{dot.after_flops_per_s / 1e9:6.3g} GFLOP/s, {dot.after_flops_per_s / possible:4.0%} of the upper roof"
        )
    axes.text(
        0.99, 0.02, "\n".join(lines), transform=axes.transAxes, ha="right", va="bottom", fontsize=8, zorder=6,
        family="monospace", multialignment="left", bbox={"facecolor": "white", "edgecolor": "#cdd3da", "alpha": 0.85},
    )  # fmt: skip
