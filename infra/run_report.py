"""The description of a parent run: a short report in Markdown, the answers in the order of the questions."""

from __future__ import annotations

from collections.abc import Sequence

from infra.run_tables import SubgraphTime, TaskLog
from tasks.records import Latency, TuningSummary

HEAVIEST = 5


def report(summary: TuningSummary, times: Sequence[SubgraphTime]) -> str:
    """Is the model faster, is it right, what took the time, what was published, in this order."""
    parts = (
        _headline(summary),
        _latencies(summary),
        _correctness(summary),
        _heaviest(times),
        _budget(summary),
        _published(summary),
        _notes(summary),
    )
    return "\n\n".join(part for part in parts if part)


def task_note(log: TaskLog) -> str:
    """Why this task did or did not improve, in a sentence or two."""
    failed = sum(log.failures.values())
    text = f"{len(log.records)} trials, {failed} failed"
    if failed:
        text += f" ({_counts(log.failures)})"
    if log.best_us is None:
        return f"{text}. **No trial succeeded**: the default schedule is used."
    if log.untuned_us is None:
        return f"{text}. Best {_us(log.best_us)}; the default schedule has no latency."
    gain = log.untuned_us / log.best_us
    if gain < 1.02:
        return f"{text}. **No gain**: nothing was faster than the default schedule's {_us(log.untuned_us)}."
    return f"{text}. {_us(log.untuned_us)} untuned, **{_us(log.best_us)}** best: {gain:.2f} times as fast."


def _headline(summary: TuningSummary) -> str:
    verdict, model, engine = summary.verdict, summary.model, summary.engine
    version = f" {model.source_version}" if model.source_version else ""
    return (
        f"## {model.name}{version}: {verdict.speedup:.2f} times as fast as untuned\n"
        f"Target `{engine.target.key}` ({engine.target.kind}, {engine.device}, {verdict.threads} threads), "
        f"engine {engine.engine} on TVM {engine.tvm_version}, granularity {summary.granularity}."
    )


def _latencies(summary: TuningSummary) -> str:
    verdict = summary.verdict
    tuned_ms = verdict.tuned.median_ms
    lines = ["| | median | middle half of the runs | against tuned |", "|---|---|---|---|"]
    for name, latency in (
        ("untuned", verdict.untuned),
        ("**tuned**", verdict.tuned),
        ("onnxruntime", verdict.onnxruntime),
    ):
        lines.append(f"| {name} | {_median(latency)} | {_spread(latency)} | {latency.median_ms / tuned_ms:.2f} |")
    return "\n".join(lines)


def _correctness(summary: TuningSummary) -> str:
    verdict = summary.verdict
    state = "**Right**" if verdict.correct else f"**WRONG** in {', '.join(verdict.failed_outputs) or 'outputs'}"
    return (
        f"{state}: largest absolute error {verdict.max_abs_error:.2g} against onnxruntime on "
        f"{len(verdict.seeds)} seeded inputs, tolerance {verdict.tolerance}."
    )


def _heaviest(times: Sequence[SubgraphTime]) -> str:
    if not times:
        return ""
    before, after = sum(t.untuned_us for t in times), sum(t.tuned_us for t in times)
    lines = ["| heaviest subgraphs | calls | before | after | gain |", "|---|---|---|---|---|"]
    lines += [
        f"| `{t.name[:60]}` | {t.weight} | {_us(t.untuned_us)} ({t.untuned_us / before:.0%}) "
        f"| {_us(t.tuned_us)} ({t.tuned_us / after:.0%}) | {t.untuned_us / t.tuned_us:.1f}x |"
        for t in times[:HEAVIEST]
    ]
    if len(times) > HEAVIEST:
        rest = times[HEAVIEST:]
        b, a = sum(t.untuned_us for t in rest), sum(t.tuned_us for t in rest)
        lines.append(
            f"| {len(rest)} others | | {_us(b)} ({b / before:.0%}) | {_us(a)} ({a / after:.0%}) | {b / a:.1f}x |"
        )
    return "\n".join(lines)


def _budget(summary: TuningSummary) -> str:
    text = (
        f"Budget: {summary.trials} trials on {summary.tasks} tasks "
        f"in {_minutes(summary.seconds.get('total', 0.0))}, {summary.reused_records} records reused."
    )
    failed = sum(summary.failures.values())
    return text + (f" {failed} trials failed: {_counts(summary.failures)}." if failed else " No trial failed.")


def _published(summary: TuningSummary) -> str:
    published = summary.published
    if not published.version:
        return f"Not published: {published.reason}" if published.reason else ""
    return (
        f"Published as **{published.name} version {published.version}**, alias `{published.alias}`: "
        f"{published.reason}\n\nArtifact: `{published.artifact_uri}`"
    )


def _notes(summary: TuningSummary) -> str:
    notes = list(summary.notes)
    if uncovered := summary.artifact.uncovered:
        named = ", ".join(f"`{name}`" for name in uncovered[:HEAVIEST])
        more = f" and {len(uncovered) - HEAVIEST} more" if len(uncovered) > HEAVIEST else ""
        notes.append(f"Built with the default schedule: {named}{more}.")
    return "\n".join(f"- {note}" for note in notes)


def _counts(failures: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items(), key=lambda kc: -kc[1]) if count)


def _median(latency: Latency) -> str:
    return f"{latency.median_ms:.3g} ms"


def _spread(latency: Latency) -> str:
    low, high = latency.spread_ms
    return f"{low:.3g} to {high:.3g} ms of {len(latency.samples_ms)}"


def _us(latency_us: float) -> str:
    return f"{latency_us / 1000:.3g} ms" if latency_us >= 1000 else f"{latency_us:.3g} us"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
