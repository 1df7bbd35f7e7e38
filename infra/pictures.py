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
from infra.run_figures import ModelPoint
from tasks.records import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "best_latency_curves",
    "failures_by_kind",
    "fused_graph",
    "model_latency",
    "profile_by_kernel",
    "savings_by_subgraph",
    "time_by_subgraph",
]

DPI = 110
BEFORE, AFTER, FAILED = "#9aa5b1", "#1f77b4", "#c44e52"
#: Small plots in one picture; more cannot be read.
MOST_CURVES = 24
HEAVIEST = 20
#: Steps of the waterfall; the others are one.
MOST_STEPS = 14
LEAST_STEP = 0.001


def best_latency_curves(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """One small plot a task that was searched: best latency (us) by trial index, the given order, at most 24."""
    from matplotlib.ticker import MaxNLocator

    shown = {name: points for name, points in curves.items() if len(points) > 1}
    shown = shown or {name: points for name, points in curves.items() if points}
    names = list(shown)[:MOST_CURVES]
    columns = min(4, max(1, len(names)))
    height = max(1, math.ceil(len(names) / columns))
    inches = 2.1 * height + 0.5
    # The layout is known; to have it found takes seconds for so many plots.
    figure = new_figure(3.4 * columns, inches, find_layout=False)
    figure.subplots_adjust(
        left=0.55 / (3.4 * columns), right=1 - 0.1 / (3.4 * columns), bottom=0.3 / inches, top=1 - 0.85 / inches,
        wspace=0.2, hspace=0.6,
    )  # fmt: skip
    for at, name in enumerate(names):
        axes = figure.add_subplot(height, columns, at + 1)
        trials, best = zip(*shown[name], strict=True)
        axes.step(trials, best, where="post", color=AFTER, marker="o" if len(trials) == 1 else "", ms=4)
        axes.set_title(f"{short(name, 34)}\n{_us(best[0])} to {_us(best[-1])}", fontsize=8)
        axes.set_ylim(0, max(best) * 1.1)
        _plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.tick_params(labelsize=7)
    rest = len(shown) - len(names)
    also = f" (the {len(names)} heaviest of {len(shown)} tasks)" if rest else ""
    figure.suptitle(f"Best latency in us by trial{also}", fontsize=11, y=1 - 0.2 / inches)
    save(figure, path)


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
    figure = new_figure(10, 1.2 + 0.36 * max(1, len(bars)))
    axes = figure.add_subplot()
    places = range(len(bars))
    axes.barh([p - 0.2 for p in places], [b for _, b, _ in bars], 0.38, color=BEFORE, label="untuned")
    axes.barh([p + 0.2 for p in places], [a for _, _, a in bars], 0.38, color=AFTER, label="tuned")
    for place, (_, was, now) in enumerate(bars):
        gain = f"{was / now:.1f}x" if now else ""
        axes.annotate(gain, (max(was, now), place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(list(places), [short(name, 52) for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("us in one run of the model")
    total = sum(before.values()), sum(after.get(name, was) for name, was in before.items())
    axes.set_title(f"Time by subgraph: {_us(total[0])} before, {_us(total[1])} after", fontsize=11)
    axes.legend(loc="center right")
    _plain(axes)
    save(figure, path)


def model_latency(path: Path, points: Sequence[ModelPoint], untuned_us: float) -> None:
    """The model's latency by the best schedules so far: over time on the left, over trials on the right."""
    figure = new_figure(11, 4.2)
    latencies = [point.latency_us for point in points]
    unit, name = (1e3, "ms") if max(latencies) >= 1000 else (1.0, "us")
    axes_by: tuple[tuple[str, list[float]], ...] = (
        ("minutes since the first trial", [point.elapsed_s / 60 for point in points]),
        ("search trials", [float(point.trials) for point in points]),
    )
    for at, (label, steps) in enumerate(axes_by, 1):
        axes = figure.add_subplot(1, 2, at)
        marker = "o" if len(points) == 1 else ""
        axes.step(steps, [us / unit for us in latencies], where="post", color=AFTER, marker=marker, lw=1.8)
        if untuned_us:
            axes.axhline(untuned_us / unit, color=BEFORE, lw=1.2, ls="--")
            axes.annotate(
                f"untuned {_us(untuned_us)}", (1, untuned_us / unit), (0, -11), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", fontsize=9, color="#5b6673",
            )  # fmt: skip
        axes.set_ylim(0, max(*latencies, untuned_us) / unit * 1.08)
        axes.set_xlabel(label)
        axes.set_ylabel(f"{name}, sum of the subgraphs")
        _plain(axes)
    figure.suptitle(
        f"Latency of the model by its best schedules so far: {_us(latencies[0])} to {_us(latencies[-1])}", fontsize=11
    )
    save(figure, path)


def savings_by_subgraph(path: Path, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """A waterfall from the time before to the time after (us, all calls): what each subgraph took off."""
    saved = {name: was - after.get(name, was) for name, was in before.items()}
    ranked = sorted(saved, key=lambda name: -abs(saved[name]))
    total_us = sum(before.values())
    shown = [name for name in ranked[:MOST_STEPS] if abs(saved[name]) >= LEAST_STEP * total_us]
    steps = [(name, saved[name]) for name in shown]
    if rest := ranked[len(shown) :]:
        steps.append((f"{len(rest)} others", sum(saved[name] for name in rest)))
    figure = new_figure(10, 1.5 + 0.34 * (len(steps) + 2))
    axes = figure.add_subplot()
    axes.barh(0, total_us, 0.7, color=BEFORE)
    labels, level_us = ["untuned"], total_us
    for place, (name, less) in enumerate(steps, 1):
        axes.barh(place, -less, 0.7, left=level_us, color=AFTER if less >= 0 else FAILED)
        axes.plot([level_us] * 2, [place - 1, place], color="#6b7785", lw=0.7)
        level_us -= less
        end = max(level_us, level_us + less)
        axes.annotate(
            f"{-less / total_us:+.1%}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
        labels.append(short(name, 52))
    axes.barh(len(steps) + 1, level_us, 0.7, color=AFTER)
    axes.set_yticks(range(len(steps) + 2), [*labels, "tuned"], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("us in one run of the model")
    axes.set_title(f"What tuning took off: {_us(total_us)} before, {_us(level_us)} after", fontsize=11)
    _plain(axes)
    save(figure, path)


def profile_by_kernel(path: Path, profile: Profile) -> None:
    """Bars of a whole run's time by kernel (us): inside the run, and where it was measured alone."""
    top, rest = profile.kernels[:HEAVIEST], profile.kernels[HEAVIEST:]
    bars = [(kernel.name, kernel.in_run_us, kernel.alone_us) for kernel in top]
    if rest:
        alone = [kernel.alone_us for kernel in rest]
        known = None if None in alone else sum(us for us in alone if us is not None)
        bars.append((f"{len(rest)} others", sum(kernel.in_run_us for kernel in rest), known))
    bars.append(("outside of kernels", profile.outside_us, None))
    figure = new_figure(10, 1.3 + 0.36 * len(bars))
    axes = figure.add_subplot()
    for place, (_, in_run, alone_us) in enumerate(bars):
        colour = FAILED if place == len(bars) - 1 else AFTER
        axes.barh(place - 0.2, in_run, 0.38, color=colour, label="in a run of the model" if place == 0 else None)
        if alone_us is not None:
            axes.barh(place + 0.2, alone_us, 0.38, color=BEFORE, label="measured alone" if place == 0 else None)
        text = f"{in_run / profile.whole_us:.1%}"
        axes.annotate(
            text, (max(in_run, alone_us or 0), place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(bars)), [short(name, 52) for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("us in one run of the model, all calls together")
    axes.set_title(
        f"Where a run of {_us(profile.whole_us)} goes: {profile.outside_us / profile.whole_us:.0%} outside of kernels",
        fontsize=11,
    )
    axes.legend(loc="lower right")
    _plain(axes)
    save(figure, path)


def failures_by_kind(path: Path, counts: Mapping[str, int]) -> None:
    """Bars of how many trials failed, by kind; a picture that says so where none did."""
    ranked = sorted(((k, n) for k, n in counts.items() if n), key=lambda kind: -kind[1])
    figure = new_figure(7, 1.3 + 0.4 * max(1, len(ranked)))
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
    save(figure, path)


def new_figure(width: float, height: float, find_layout: bool = True) -> Figure:
    """A figure of that size in inches; ``find_layout``: matplotlib makes room for all texts."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained" if find_layout else None)


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as a PNG. Raises OSError."""
    figure.savefig(path, format="png")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e8eb", zorder=0)
    axes.set_axisbelow(True)


def _us(latency_us: float) -> str:
    return f"{latency_us / 1000:.3g} ms" if latency_us >= 1000 else f"{latency_us:.3g} us"


def short(text: str, length: int) -> str:
    """The middle is cut: names of subgraphs differ in their first operator and their last number."""
    if len(text) <= length:
        return text
    head = (length - 1) * 2 // 3
    return f"{text[:head]}…{text[-(length - 1 - head) :]}"
