"""Pictures of a tuning run, drawn with matplotlib into PNG files.

Figures are made without pyplot: it keeps every figure in a global list and wants a display.
Each function raises OSError where ``path`` cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.graph_picture import fused_graph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["best_latency_curves", "failures_by_kind", "fused_graph", "time_by_subgraph"]

DPI = 110
BEFORE, AFTER, FAILED = "#9aa5b1", "#1f77b4", "#c44e52"
#: Small plots in one picture; more cannot be read.
MOST_CURVES = 32
HEAVIEST = 20


def best_latency_curves(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """One small plot a task: best latency (us) by trial index, the given order, at most 32."""
    from matplotlib.ticker import MaxNLocator

    shown = {name: points for name, points in curves.items() if points}
    names = list(shown)[:MOST_CURVES]
    columns = min(4, max(1, len(names)))
    height = max(1, math.ceil(len(names) / columns))
    figure = _figure(3.4 * columns, 2.1 * height + 0.5)
    for at, name in enumerate(names):
        axes = figure.add_subplot(height, columns, at + 1)
        trials, best = zip(*shown[name], strict=True)
        axes.step(trials, best, where="post", color=AFTER, marker="o" if len(trials) == 1 else "", ms=4)
        axes.set_title(f"{_short(name, 34)}\n{_us(best[0])} to {_us(best[-1])}", fontsize=8)
        axes.set_ylim(0, max(best) * 1.1)
        _plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.tick_params(labelsize=7)
    rest = len(shown) - len(names)
    also = f" (the {len(names)} heaviest of {len(shown)} tasks)" if rest else ""
    figure.suptitle(f"Best latency in us by trial{also}", fontsize=11)
    _save(figure, path)


def time_by_subgraph(path: Path, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Bars of what one run of the model spends in each subgraph (us, all calls), before and after.

    The twenty heaviest before tuning and the sum of the rest.
    """
    ranked = sorted(before, key=lambda name: -before[name])
    top, rest = ranked[:HEAVIEST], ranked[HEAVIEST:]
    bars = [(name, before[name], after.get(name, before[name])) for name in top]
    if rest:
        sums = sum(before[n] for n in rest), sum(after.get(n, before[n]) for n in rest)
        bars.append((f"{len(rest)} others", *sums))
    figure = _figure(10, 1.2 + 0.36 * max(1, len(bars)))
    axes = figure.add_subplot()
    places = range(len(bars))
    axes.barh([p - 0.2 for p in places], [b for _, b, _ in bars], 0.38, color=BEFORE, label="untuned")
    axes.barh([p + 0.2 for p in places], [a for _, _, a in bars], 0.38, color=AFTER, label="tuned")
    for place, (_, was, now) in enumerate(bars):
        gain = f"{was / now:.1f}x" if now else ""
        axes.annotate(gain, (max(was, now), place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(list(places), [_short(name, 52) for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("us in one run of the model")
    total = sum(before.values()), sum(after.get(name, was) for name, was in before.items())
    axes.set_title(f"Time by subgraph: {_us(total[0])} before, {_us(total[1])} after", fontsize=11)
    axes.legend(loc="center right")
    _plain(axes)
    _save(figure, path)


def failures_by_kind(path: Path, counts: Mapping[str, int]) -> None:
    """Bars of how many trials failed, by kind; a picture that says so where none did."""
    ranked = sorted(((k, n) for k, n in counts.items() if n), key=lambda kind: -kind[1])
    figure = _figure(7, 1.3 + 0.4 * max(1, len(ranked)))
    axes = figure.add_subplot()
    if ranked:
        drawn = axes.barh([kind for kind, _ in ranked], [count for _, count in ranked], color=FAILED)
        axes.bar_label(drawn, padding=3, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        _plain(axes)
    else:
        axes.text(0.5, 0.5, "no trial failed", ha="center", va="center", fontsize=12)
        axes.set_axis_off()
    axes.set_title(f"Failed trials by kind: {sum(n for _, n in ranked)}", fontsize=11)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e8eb", zorder=0)
    axes.set_axisbelow(True)


def _us(latency_us: float) -> str:
    return f"{latency_us / 1000:.3g} ms" if latency_us >= 1000 else f"{latency_us:.3g} us"


def _short(text: str, length: int) -> str:
    """The middle is cut: names of subgraphs differ in their first operator and their last number."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[-(length - 1 - head) :]}"
