"""``tunewright records import`` and ``export``: AutoTVM's own log format, in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.command_line import one_line_errors
from tasks.errors import InputError

if TYPE_CHECKING:
    from infra.autotvm_log import Log
    from tasks.records import EngineInfo

records = typer.Typer(no_args_is_help=True, help="AutoTVM's logs: import them, or export what was measured.")
console = Console()

LogArgument = Annotated[Path, typer.Argument(help="A log as autotvm.callback.log_to_file writes it.")]
TargetOption = Annotated[str, typer.Option(help="cpu, cuda, TVM's JSON or options.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(records, name="records")


@records.command("import")
def import_log(log: LogArgument, target: TargetOption = "cpu") -> None:
    """Have searches of the relay engine begin with a log's configs. They are measured anew."""
    with one_line_errors(False):
        from infra.autotvm_log import read_log

        if not log.exists():
            raise InputError(f"there is no file {log}")
        info = _describe(target)
        found = read_log(log, info)
        count = _store(found, info, log) if found.entries else 0
        workloads = len({entry.name for entry in found.entries})
        console.print(f"{count} configs of {workloads} workloads for {info.target.key}", highlight=False)
        for reason, lines in found.skipped.most_common():
            console.print(f"left out: {lines} ({reason})", highlight=False)


@records.command("export")
def export_log(log: LogArgument, target: TargetOption = "cpu") -> None:
    """Write every trial of a config that is stored for the relay engine and the target, as AutoTVM's log."""
    with one_line_errors(False):
        from infra.autotvm_log import log_lines
        from infra.object_store import open_store
        from infra.record_store import RecordStore
        from infra.settings import settings

        config = settings()
        info = _describe(target)
        store = open_store(config.store_url, config.s3_endpoint_url or None)
        stored = RecordStore(store, info.engine, info.tvm_version, info.target.key, config.home / "cache").load()
        lines = [line for key in sorted(stored) for line in log_lines(stored[key], info)]
        try:
            log.write_text("".join(lines))
        except OSError as error:
            raise InputError(f"cannot write {log}: {error.strerror}") from error
        console.print(f"{len(lines)} measurements of {len(stored)} workloads of {info.target.key}", highlight=False)


def _describe(target: str) -> EngineInfo:
    """The relay engine and how it names ``target``. Raises EngineUnavailable, TargetError."""
    from infra.settings import settings
    from tasks.engines.child import ChildOptions, EngineChild

    config = settings()
    options = ChildOptions(
        "relay", config.python_of("relay"), target, "cpu:0", config.core_count,
        start_timeout_s=config.engine_start_timeout_s, extra_environment=config.engine_environment("relay"),
    )  # fmt: skip
    with EngineChild(options) as child:
        return child.describe()


def _store(found: Log, info: EngineInfo, path: Path) -> int:
    """Put the configs where searches look for what was learned before; how many."""
    import numpy as np

    from infra.object_store import open_store
    from infra.sample_store import SampleStore
    from infra.settings import settings
    from tasks.records import short_hash

    config = settings()
    samples = SampleStore(open_store(config.store_url, config.s3_endpoint_url or None), info, config.home)
    entries = found.entries
    run_id = f"import-{short_hash(path.read_bytes())}"
    latencies = np.array([entry.latency_us for entry in entries])
    names = np.array([entry.name for entry in entries])
    np.savez(
        samples.folder / f"{run_id}-0001.npz", allow_pickle=False,
        rows=np.zeros((len(entries), 1), "float32"), lengths=np.ones(len(entries), "int64"), workloads=names,
        candidates=np.array([short_hash(entry.schedule) for entry in entries]), latencies_us=latencies,
        schedules=np.array([entry.schedule for entry in entries]), schedule_workloads=names,
        schedule_latencies_us=latencies,
    )  # fmt: skip
    return samples.publish(run_id)
