"""What people read in the morning: a line a model, those first that need somebody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: What became of a model in a night, in the order of the report.
STATUSES = ("failed", "faster", "not faster", "no time", "given up", "skipped")


@dataclass(frozen=True)
class NightEntry:
    """One model and target. ``before_ms`` is what its last run measured, in another night and maybe on another
    machine; only ``untuned_ms`` and ``tuned_ms`` were measured side by side."""

    title: str
    status: str
    why: str
    trials: int = 0
    untuned_ms: float | None = None
    before_ms: float | None = None
    tuned_ms: float | None = None
    published: str = ""
    run_id: str = ""


def night_report(entries: Sequence[NightEntry], hours: float) -> str:
    """The night in Markdown."""
    counts = Counter(entry.status for entry in entries)
    found = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "nothing to do"
    lines = [f"## {len(entries)} models, {hours:.1f} hours: {found}", ""]
    tried = [entry for entry in in_order(entries) if entry.status not in ("skipped", "given up")]
    if tried:
        lines += [
            "| model | | trials | untuned | last time | tuned | published | what happened |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(entry) for entry in tried),
            "",
        ]
    lines += [f"- **given up** {_cell(e.title)}: {_cell(e.why)}" for e in entries if e.status == "given up"]
    if counts["skipped"]:
        lines += ["", f"Skipped, without an engine being started: {counts['skipped']}.", ""]
        lines += [f"- {_cell(entry.title)}: {_cell(entry.why)}" for entry in entries if entry.status == "skipped"]
    return "\n".join(lines)


def in_order(entries: Sequence[NightEntry]) -> list[NightEntry]:
    """Failures first."""
    return sorted(entries, key=lambda entry: (STATUSES.index(entry.status), entry.title))


def rows(entries: Sequence[NightEntry]) -> list[dict[str, object]]:
    """The entries as rows of a table."""
    return [asdict(entry) for entry in in_order(entries)]


def _row(entry: NightEntry) -> str:
    cells = (
        entry.title, f"**{entry.status}**", entry.trials or "", _ms(entry.untuned_ms), _ms(entry.before_ms),
        _tuned(entry), entry.published, entry.why,
    )  # fmt: skip
    return "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"


def _tuned(entry: NightEntry) -> str:
    if not entry.tuned_ms or not entry.untuned_ms:
        return _ms(entry.tuned_ms)
    return f"{_ms(entry.tuned_ms)} ({entry.untuned_ms / entry.tuned_ms:.2f} times as fast)"


def _ms(latency_ms: float | None) -> str:
    return "" if latency_ms is None else f"{latency_ms:.3g} ms"


def _cell(text: str) -> str:
    """Names and errors are others' text: they must not break the table or become markup."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())[:400]
