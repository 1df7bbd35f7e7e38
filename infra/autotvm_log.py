"""AutoTVM's own log: a JSON object a line, as ``autotvm.callback.log_to_file`` writes and TVM reads it.

    {"input": [target, task name, args, kwargs], "config": {...}, "result": [costs, error, seconds, timestamp],
     "version": 0.2, "tvm_version": "0.16.0"}

Records of the relay engine hold the same config. A log's figures are of single operators, measured by others:
they say which configs are worth a trial, and are not taken for measurements of ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import InputError
from tasks.records import EngineInfo, TuningRecord, short_hash

LOG_VERSION = 0.2
#: AutoTVM's numbers for why a measurement failed (autotvm.measure.MeasureErrorNo).
_ERRORS = {
    "instantiation": 1, "build": 2, "run": 4, "device_lost": 4, "wrong_output": 5,
    "build_timeout": 6, "run_timeout": 7,
}  # fmt: skip
#: What AutoTVM writes as the cost of a failed measurement.
_FAILED_S = 1e9


@dataclass(frozen=True)
class LogEntry:
    """One successful line: AutoTVM's workload (task name and arguments), its config, and the mean cost."""

    workload: tuple[Any, ...]
    config: Mapping[str, Any]
    latency_us: float

    @property
    def name(self) -> str:
        """A name for the workload."""
        return f"log-{short_hash(json.dumps(self.workload))}"

    @property
    def schedule(self) -> str:
        """The config as a record of the relay engine holds it."""
        plain = {
            "operator": "", "implementation": self.workload[0], "workload": self.workload, "config": self.config,
        }  # fmt: skip
        return json.dumps(plain, separators=(",", ":"))


@dataclass
class Log:
    """What a log file holds for one engine, and how many of its lines are of no use, by the reason."""

    entries: list[LogEntry] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read_log(path: Path, info: EngineInfo) -> Log:
    """The lines of ``path`` that ``info``'s engine and target can use.

    Raises InputError where the file cannot be read, is no log, or was written by another TVM version.
    """
    log = Log()
    foreign: Counter[str] = Counter()
    ours = tvm_number(info)
    for line in _lines(path):
        try:
            plain = json.loads(line)
            version = str(plain["tvm_version"])
            if version != ours:
                foreign[version] += 1
            elif (reason := _unusable(plain, info)) != "":
                log.skipped[reason] += 1
            else:
                log.entries.append(_entry(plain))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            log.skipped["no line of an AutoTVM log"] += 1
    if foreign and not log.entries:
        raise InputError(
            f"{path} was written by TVM {', '.join(sorted(foreign))}, the relay engine has {ours}: a config means the "
            "same only within a version; name that TVM's Python with TUNEWRIGHT_RELAY_PYTHON"
        )
    if foreign:
        log.skipped["written by another TVM version"] += sum(foreign.values())
    if not log.entries and set(log.skipped) <= {"no line of an AutoTVM log"}:
        raise InputError(
            f"{path} is no log of AutoTVM: give a file of JSON lines that autotvm.callback.log_to_file wrote"
        )
    return log


def tvm_number(info: EngineInfo) -> str:
    """TVM's own version number, without the vendor's package."""
    for name, number in info.versions.items():
        info_suffix = f"-{name}-{number}"
        if info.tvm_version.endswith(info_suffix):
            return info.tvm_version.removesuffix(info_suffix)
    return info.tvm_version


def log_lines(records: Iterable[TuningRecord], info: EngineInfo) -> Iterator[str]:
    """``records`` as lines of a log, newline included; those without a config (default schedules) are left out."""
    target = target_text(info)
    for record in records:
        plain = _choice(record.schedule)
        if plain is None or record.phase == "default":
            continue
        name, *args = plain["workload"]
        if record.measurement is not None:
            costs = [us / 1e6 for us in record.measurement.comparable_us]
            spent_s, error = record.measurement.build_s + record.measurement.run_s, 0
        else:
            assert record.failure is not None
            costs, spent_s, error = [_FAILED_S], 0.0, _ERRORS.get(record.failure.kind, 8)
        line = {
            "input": [target, name, args, {}],
            "config": plain["config"],
            "result": [costs, error, spent_s, record.started_at],
            "version": LOG_VERSION,
            "tvm_version": tvm_number(info),
        }
        yield json.dumps(line) + "\n"


def target_text(info: EngineInfo) -> str:
    """The target as TVM's options, which is how a log names it."""
    spec = json.loads(info.target.spec)
    parts = [str(spec["kind"])]
    for name in sorted(set(spec) - {"kind", "host", "tag"}):
        value = spec[name]
        parts.append(f"-{name}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return " ".join(parts)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield from (line for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from error


def _unusable(plain: Mapping[str, Any], info: EngineInfo) -> str:
    """Why a line of our TVM version is of no use here; empty where it is."""
    if plain["version"] != LOG_VERSION:
        return f"log version {plain['version']}"
    if plain["result"][1] != 0:
        return "a failed measurement"
    options = dict(part.lstrip("-").partition("=")[::2] for part in plain["input"][0].split()[1:])
    spec = json.loads(info.target.spec)
    if plain["input"][0].split()[0] != spec["kind"]:
        return f"a target of another kind than {spec['kind']}"
    for name in ("mcpu", "arch", "model"):
        if name in options and name in spec and options[name] != str(spec[name]):
            return f"another {name} than {spec[name]}"
    return ""


def _entry(plain: Mapping[str, Any]) -> LogEntry:
    _, name, args, _ = plain["input"]
    costs = [float(cost) for cost in plain["result"][0]]
    if not isinstance(name, str) or not costs or not plain["config"]["entity"]:
        raise ValueError("an empty line")
    return LogEntry((name, *args), plain["config"], sum(costs) / len(costs) * 1e6)


def _choice(schedule: str) -> Mapping[str, Any] | None:
    """A record's schedule, where it has a config of AutoTVM's."""
    try:
        plain = json.loads(schedule)
        return plain if plain["config"] and plain["workload"] else None
    except (ValueError, KeyError, TypeError):
        return None
