"""What the commands about finished runs show in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from infra import noise
from infra.compare import STATES, Change, Comparison, SubgraphChange, meaning
from infra.finished_run import FinishedRun, Timing
from infra.history import HistoryEntry

_COLOURS = {"slower": "red", "faster": "green", "new": "cyan", "vanished": "magenta", "failed": "red"}
#: Subgraphs without a change are counted, not listed.
_QUIET = ("noise", "same")


def show_comparison(console: Console, comparison: Comparison, every: bool = False) -> None:
    """Whole model and budget, then the subgraphs that changed (``every``: all), then what else changed."""
    _show_runs(console, comparison)
    listed = [s for s in comparison.subgraphs if every or s.change.state not in _QUIET]
    table = Table(title="by subgraph, the largest effect on the model first")
    for heading in ("subgraph", "calls", "before", "after", "after/before", "effect", "change"):
        table.add_column(heading, justify="left" if heading in ("subgraph", "change") else "right", overflow="fold")
    for subgraph in listed:
        table.add_row(*_subgraph_row(subgraph))
    if listed:
        console.print(table)
    counts = [f"{comparison.count(state)} {state} ({meaning(state)})" for state in STATES if comparison.count(state)]
    for line in counts:
        console.print(f"- {line}", highlight=False)
    console.print(noise_text(comparison), highlight=False, markup=False)
    if comparison.settings:
        changed = Table(title="versions and parameters that changed")
        for heading in ("what", "before", "after"):
            changed.add_column(heading, overflow="fold")
        for name, (before, after) in comparison.settings.items():
            changed.add_row(name, before or "-", after or "-")
        console.print(changed)
    else:
        console.print("no version and no parameter changed")


def _show_runs(console: Console, comparison: Comparison) -> None:
    table = Table(show_header=True)
    for heading in ("", "before", "after"):
        table.add_column(heading, overflow="fold")
    runs = comparison.before, comparison.after
    table.add_row("run", *(run.name for run in runs))
    table.add_row("started", *(when(run) for run in runs))
    table.add_row("status", *(run.status.lower() for run in runs))
    for label, contender in (("model, tuned", "tuned"), ("onnxruntime", "onnxruntime"), ("model, untuned", "untuned")):
        table.add_row(label, *(samples_text(run, contender) for run in runs))
    for name, (before, after) in comparison.budget.items():
        table.add_row(name, before or "-", after or "-")
    console.print(table)
    for text in verdict_lines(comparison):
        console.print(text, highlight=False, markup=False)


def _subgraph_row(subgraph: SubgraphChange) -> tuple[str, ...]:
    change = subgraph.change
    colour = _COLOURS.get(change.state)
    state = f"[{colour}]{change.state}[/]" if colour else change.state
    calls = {subgraph.weight_before, subgraph.weight_after} - {0}
    return (
        f"{subgraph.name}\n[dim]{subgraph.workload_key}[/]",
        " > ".join(map(str, (subgraph.weight_before, subgraph.weight_after) if len(calls) > 1 else calls)),
        timing_text(change.before),
        timing_text(change.after),
        ratio_text(change),
        f"{subgraph.effect_us:+.1f} us",
        state,
    )


def verdict_lines(comparison: Comparison) -> list[str]:
    """Is the model faster, and is that the machine's doing?"""
    lines = []
    if comparison.model:
        lines.append(f"the model: {_said(comparison.model)}")
    if comparison.machine:
        lines.append(f"onnxruntime on the same model, which shows the machine: {_said(comparison.machine)}")
    else:
        lines.append("nothing shows whether the machine changed: onnxruntime ran something else, or not in both runs")
    return lines


def noise_text(comparison: Comparison) -> str:
    """What counts as a difference, and how many would be seen if there were none."""
    text = (
        f"A difference: an exact rank-sum test over the recorded repeats gives chance at most {noise.ALPHA:.0%}"
        f" (of these subgraphs {comparison.by_chance:.1f} would differ if nothing had changed)"
    )
    if comparison.margin is None:
        return f"{text}; too few candidates were measured twice to say how measuring again varies."
    return f"{text}, and it is more than the {comparison.margin - 1:.1%} by which candidates of these runs strayed \
when they were measured again."


def samples_text(run: FinishedRun, contender: str) -> str:
    """Median and range of a contender's whole-model latencies."""
    samples = sorted(run.samples_ms.get(contender, ()))
    if not samples:
        return "-"
    middle = samples[len(samples) // 2]
    return f"{middle:.3f} ms" + (f" ({samples[0]:.3f} to {samples[-1]:.3f})" if len(samples) > 1 else "")


def timing_text(timing: Timing | None) -> str:
    """A latency with the range of its repeats."""
    if timing is None:
        return "-"
    if not timing.repeats_us:
        return f"{timing.latency_us:.1f} us"
    return f"{timing.latency_us:.1f} us ({min(timing.repeats_us):.1f} to {max(timing.repeats_us):.1f})"


def ratio_text(change: Change) -> str:
    """After over before."""
    return "-" if change.ratio is None else f"{change.ratio:.3f}"


def when(run: FinishedRun) -> str:
    """A run's start, UTC."""
    return datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _said(change: Change) -> str:
    if change.ratio is None:
        return "not in both runs"
    chance = "" if change.chance is None else f", chance {change.chance:.2g}"
    return f"{change.state}, {change.ratio:.3f} times the latency{chance}"


def show_history(console: Console, name: str, entries: Sequence[HistoryEntry]) -> None:
    """One row a version, or a run without one; the newest last."""
    table = Table(title=f"{name}: {sum(bool(e.version) for e in entries)} versions")
    right = ("tuned", "untuned", "onnxruntime", "trials", "minutes")
    for heading in ("night (UTC)", "version", "aliases", "target", *right, "decision"):
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for e in entries:
        figures = (_ms(e.tuned_ms), _ms(e.untuned_ms), _ms(e.onnxruntime_ms))
        minutes = "-" if e.minutes is None else f"{e.minutes:.1f}"
        trials = "-" if e.trials is None else str(e.trials)
        aliases = " ".join(e.aliases)
        table.add_row(e.night, e.version or "-", aliases, e.target, *figures, trials, minutes, e.decision)
    console.print(table)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"
