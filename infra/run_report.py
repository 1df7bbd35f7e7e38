"""The description of a parent run: a short report in Markdown, the answers in the order of the questions.

Is my model faster, is it right, what took the time, why did this task not improve, what changed since yesterday.
"""

from __future__ import annotations

from collections.abc import Sequence

from infra.promotion import ratio_interval
from infra.run_tables import SubgraphTime, TaskLog
from tasks.records import Latency, TuningSummary

HEAVIEST = 5
#: A gain below this one is none: two timings of one kernel differ by as much.
NO_GAIN = 1.02
_ABOUT_RATIOS = (
    "The ratio is the median over the rounds, in which all took turns: below 1 tuned is faster. "
    "Noise explains it where its interval has 1 inside."
)
#: What a session's wall time goes to, by its keys.
_STEPS = (("searching", "search"), ("building", "build_wall"), ("timing", "run_wall"))
#: MLflow cuts a description off; the whole report is an artifact.
DESCRIPTION_LENGTH = 4900


def report(summary: TuningSummary, times: Sequence[SubgraphTime], changed: str = "") -> str:
    """The five answers; ``changed`` is the last of them."""
    parts = (
        _headline(summary),
        _latencies(summary),
        _correctness(summary),
        _heaviest(times),
        _inside(summary),
        _budget(summary),
        _not_improved(summary, times),
        f"### What changed\n{changed}" if changed else "",
        _published(summary),
        _notes(summary),
    )
    return "\n\n".join(part for part in parts if part)


def description(text: str) -> str:
    """``text``, without the paragraphs at its end that a description has no room for."""
    if len(text) <= DESCRIPTION_LENGTH:
        return text
    kept = text[:DESCRIPTION_LENGTH].rpartition("\n")[0]
    return f"{kept}\n\n(The whole report is the artifact `report.md`.)"


def task_note(log: TaskLog, reason: str = "") -> str:
    """Why this task did or did not improve, in a sentence or two; ``reason`` is what the plan says."""
    failed = sum(log.failures.values())
    text = f"{len(log.records)} trials, {failed} failed"
    if failed:
        text += f" ({_counts(log.failures)})"
    why = f"\n\nWhy it is no faster: {reason}." if reason else ""
    if log.best_us is None:
        return f"{text}. **No trial succeeded**: the default schedule is used.{why}"
    if log.untuned_us is None:
        return f"{text}. Best {_us(log.best_us)}; the default schedule has no latency.{why}"
    gain = log.untuned_us / log.best_us
    if gain < NO_GAIN:
        return f"{text}. **No gain**: nothing was faster than the default schedule's {_us(log.untuned_us)}.{why}"
    return f"{text}. {_us(log.untuned_us)} untuned, **{_us(log.best_us)}** best: {gain:.2f} times as fast.{why}"


def _headline(summary: TuningSummary) -> str:
    verdict, model, engine = summary.verdict, summary.model, summary.engine
    version = f" {model.source_version}" if model.source_version else ""
    low, _, high = ratio_interval(verdict.tuned.samples_ms, verdict.untuned.samples_ms)
    noise = ", which noise explains" if low <= 1.0 <= high else ""
    return (
        f"## {model.name}{version}: {verdict.speedup:.2f} times as fast as untuned{noise}\n"
        f"Target `{engine.target.key}` ({engine.target.kind}, {engine.device}, {verdict.threads} threads), "
        f"engine {engine.engine} on TVM {engine.tvm_version}, granularity {summary.granularity}."
    )


def _latencies(summary: TuningSummary) -> str:
    """All contenders of one benchmark, run in turns; intervals are of 95% confidence, by bootstrap."""
    verdict = summary.verdict
    rows = [("untuned", verdict.untuned), ("**tuned**", verdict.tuned), ("onnxruntime", verdict.onnxruntime)]
    if verdict.champion is not None:
        rows.append((f"champion (version {verdict.champion_version})", verdict.champion))
    lines = ["### Faster?", "| | median (95% confidence) | tuned takes, of its time |", "|---|---|---|"]
    for name, latency in rows:
        ratio = "" if latency is verdict.tuned else _ratio(verdict.tuned, latency)
        lines.append(f"| {name} | {_median(latency)} | {ratio} |")
    return "\n".join([*lines, "", _ABOUT_RATIOS])


def _correctness(summary: TuningSummary) -> str:
    verdict = summary.verdict
    state = "**Right**" if verdict.correct else f"**WRONG** in {', '.join(verdict.failed_outputs) or 'outputs'}"
    text = (
        f"### Right?\n{state}: largest absolute error {verdict.max_abs_error:.2g} against onnxruntime on "
        f"{len(verdict.seeds)} seeded inputs, tolerance {verdict.tolerance}."
    )
    if verdict.repairs:
        text += "\n\nIt was wrong at first, and was mended:\n"
        text += "\n".join(f"- {repair}" for repair in verdict.repairs)
    return text


def _heaviest(times: Sequence[SubgraphTime]) -> str:
    if not times:
        return "### What took the time?\nNo subgraph of this model could be tuned and measured."
    before, after = sum(t.untuned_us for t in times), sum(t.tuned_us for t in times)
    lines = [
        "### What took the time?",
        "| heaviest subgraphs, each timed alone | calls | before | after | gain |",
        "|---|---|---|---|---|",
    ]
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


def _inside(summary: TuningSummary) -> str:
    profile = summary.profile
    if profile is None or not profile.whole_us:
        return ""
    text = f"In a run of the whole model {profile.outside_us / profile.whole_us:.0%} is outside of kernels"
    if profile.kernels:
        first = profile.kernels[0]
        text += f"; the longest kernel, `{first.name[:60]}`, takes {first.in_run_us / profile.whole_us:.0%}"
    return text + " (table `profile.json`)."


def _budget(summary: TuningSummary) -> str:
    text = (
        f"Budget: {summary.trials} trials on {summary.tasks} tasks "
        f"in {_minutes(summary.seconds.get('total', 0.0))}, {summary.reused_records} records of earlier runs reused."
    )
    steps = [f"{name} {_minutes(summary.seconds[key])}" for name, key in _STEPS if key in summary.seconds]
    if steps:
        text += f" On the devices: {', '.join(steps)}."
    failed = sum(summary.failures.values())
    return text + (f" {failed} trials failed: {_counts(summary.failures)}." if failed else " No trial failed.")


def _not_improved(summary: TuningSummary, times: Sequence[SubgraphTime]) -> str:
    """The tasks without a gain that take most of the time now, and why; each child run has its own."""
    without = [t for t in times if t.untuned_us / t.tuned_us < NO_GAIN]
    unmeasured = summary.reasons.keys() - {t.name for t in times}
    if not without and not unmeasured:
        return "### Why did a task not improve?\nEvery task improved." if times else ""
    without.sort(key=lambda t: -t.tuned_us)
    names = [*sorted(unmeasured), *(t.name for t in without)]
    lines = [f"- `{name[:60]}`: {summary.reasons.get(name, 'no gain')}" for name in names[:HEAVIEST]]
    if len(names) > HEAVIEST:
        lines.append(f"- {len(names) - HEAVIEST} lighter ones: the description of each child run says why")
    counts = f"{len(names)} of {summary.tasks} did not (less than {NO_GAIN - 1:.0%} faster as built):"
    return "\n".join(["### Why did a task not improve?", counts, *lines])


def _published(summary: TuningSummary) -> str:
    published = summary.published
    if not published.version:
        return f"Not published: {published.reason}" if published.reason else ""
    return (
        f"### Published\n**{published.name} version {published.version}**, alias `{published.alias}`: "
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
    # Against one, the ratio is the latency itself.
    low, _, high = ratio_interval(latency.samples_ms, (1.0,) * len(latency.samples_ms))
    return f"{latency.median_ms:.3g} ms ({low:.3g} to {high:.3g}, {len(latency.samples_ms)} rounds)"


def _ratio(tuned: Latency, other: Latency) -> str:
    low, ratio, high = ratio_interval(tuned.samples_ms, other.samples_ms)
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def _us(latency_us: float) -> str:
    return f"{latency_us / 1000:.3g} ms" if latency_us >= 1000 else f"{latency_us:.3g} us"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
