"""The comparison of two runs as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from flows.results_tables import noise_text, ratio_text, samples_text, timing_text, verdict_lines, when
from infra.compare import STATES, Comparison, SubgraphChange, meaning
from infra.finished_run import FinishedRun

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #1b1f24 }
h1 { font-size: 1.5em; margin-bottom: .2em } h2 { font-size: 1.15em; margin-top: 1.8em }
table { border-collapse: collapse; width: 100% } th { text-align: left; color: #57606a; font-weight: 600 }
th, td { padding: .35em .6em; border-bottom: 1px solid #d8dee4; vertical-align: top }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.name { font-family: ui-monospace, monospace; font-size: .87em; overflow-wrap: anywhere }
.dim { color: #6e7781; font-size: .87em }
.bar { width: 190px } .bar i { display: block; height: 11px; margin-top: 5px }
.slower { color: #b3261e } .faster { color: #1a7f37 } .new, .vanished { color: #0550ae } .failed { color: #b3261e }
.bar .up { background: #e0776f; margin-left: 50% } .bar .down { background: #6fbf86 }
.lead { font-size: 1.1em }
"""
#: Rows of the subgraph table; a page with more is not read.
_MOST_ROWS = 200


def comparison_page(comparison: Comparison) -> str:
    """The whole page: is it faster, which subgraphs changed, what else changed, what noise is."""
    first, second = comparison.before, comparison.after
    title = f"{first.name} against {second.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=lead>{escape(line[:1].upper() + line[1:])}.</p>" for line in verdict_lines(comparison)),
        _runs(comparison),
        "<h2>By subgraph</h2>",
        f"<p>{_counts(comparison)}</p>",
        _subgraphs(comparison),
        "<h2>Versions and parameters that changed</h2>",
        _settings(comparison),
        "<h2>What counts as a difference</h2>",
        f"<p>{escape(noise_text(comparison))} Latencies are medians, in brackets the range of the repeats. "
        "The effect is latency times calls, after less before.</p>",
    ]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _runs(comparison: Comparison) -> str:
    runs = comparison.before, comparison.after
    rows = [("run", *(_run_name(run) for run in runs)), ("started", *map(when, runs))]
    rows += [("status", *(run.status.lower() for run in runs))]
    for label, contender in (("model, tuned", "tuned"), ("onnxruntime", "onnxruntime"), ("model, untuned", "untuned")):
        rows.append((label, *(samples_text(run, contender) for run in runs)))
    rows += [(name, before or "-", after or "-") for name, (before, after) in comparison.budget.items()]
    return _table(("", "before", "after"), rows)


def _run_name(run: FinishedRun) -> str:
    return f"{run.name} (MLflow {run.mlflow_run_id})"


def _counts(comparison: Comparison) -> str:
    return "; ".join(
        f"<b class={state}>{comparison.count(state)} {state}</b>: {escape(meaning(state))}"
        for state in STATES
        if comparison.count(state)
    )


def _subgraphs(comparison: Comparison) -> str:
    largest = max((abs(s.effect_us) for s in comparison.subgraphs), default=0.0) or 1.0
    rows = [_subgraph(subgraph, largest) for subgraph in comparison.subgraphs[:_MOST_ROWS]]
    left_out = len(comparison.subgraphs) - len(rows)
    more = f"<p class=dim>{left_out} more without an effect worth a row.</p>" if left_out > 0 else ""
    headings = ("subgraph", "change", "before", "after", "after / before", "calls", "effect on the model", "")
    numeric = ("before", "after", "after / before", "calls", "effect on the model")
    cells = "".join(f"<th{' class=n' if h in numeric else ''}>{escape(h)}</th>" for h in headings)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


def _subgraph(subgraph: SubgraphChange, largest_us: float) -> str:
    change, effect = subgraph.change, subgraph.effect_us
    share = min(50.0, abs(effect) / largest_us * 50)
    side = (
        f"class=up style='width:{share:.1f}%'"
        if effect > 0
        else (f"class=down style='width:{share:.1f}%;margin-left:{50 - share:.1f}%'")
    )
    calls = " to ".join(map(str, dict.fromkeys((subgraph.weight_before, subgraph.weight_after))))
    chance = "" if change.chance is None else f"<div class=dim>chance {change.chance:.2g}</div>"
    return (
        f"<tr><td class=name>{escape(subgraph.name)}<div class=dim>{escape(subgraph.operators)}</div></td>"
        f"<td class={change.state}>{change.state}{chance}</td>"
        f"<td class=n>{_two_lines(timing_text(change.before))}</td>"
        f"<td class=n>{_two_lines(timing_text(change.after))}</td>"
        f"<td class=n>{ratio_text(change)}</td><td class=n>{calls}</td><td class=n>{effect:+.1f} us</td>"
        f"<td class=bar><i {side}></i></td></tr>"
    )


def _two_lines(timing: str) -> str:
    figure, _, spread = timing.partition(" (")
    return escape(figure) + (f"<div class=dim>{escape(spread.rstrip(')'))}</div>" if spread else "")


def _settings(comparison: Comparison) -> str:
    if not comparison.settings:
        return "<p>None.</p>"
    rows = [(name, before or "-", after or "-") for name, (before, after) in comparison.settings.items()]
    return _table(("what", "before", "after"), rows)


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
