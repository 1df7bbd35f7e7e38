"""Records and errors as JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tasks import records
from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.engines.wire import error_from_plain, error_to_plain, from_line, from_plain, to_line, to_plain
from tasks.errors import EngineError, TargetError, TunewrightError, all_errors
from tests.infra import sample_records as samples

SESSION = records.Session(
    session_id="s", run_id="r", phase="search", tasks=(samples.task(0), samples.task(1)), trials=16, seed=7,
    reason="expected gain", settings=records.MeasureSettings(repeat=3), journal_path="/j", stop_at=1.5e9,
)  # fmt: skip

#: At least one of every record, optional fields with and without a value.
SAMPLES: list[Any] = [
    samples.TARGET,
    samples.ENGINE,
    samples.model(),
    samples.model().inputs[0],
    samples.subgraph(1),
    samples.fused(3, 9),
    samples.fused(3, 9).imported,
    samples.fused(3, 9).calls[0],
    samples.task(2),
    samples.record(1),
    samples.record(0, latency_us=None),
    samples.record(2, predicted_us=3.5, implementation="nchwc"),
    samples.record(1).measurement,
    records.Failure("run", 'a "quoted" line\nand \u00e4nother'),
    records.MeasureSettings(flush_cache=True),
    SESSION,
    dataclasses.replace(SESSION, stop_at=None),
    records.SessionResult("s", "search", 3, {"build": 2}, {"total": 1.5}, True, "note"),
    records.FirstSessions({"conv2d": (0.25, 0.0)}, (3, 1)),
    records.SubgraphChoice("n", "w", "", "", None),
    samples.summary(),
    samples.summary().verdict,
    samples.summary().verdict.untuned,
    samples.summary().artifact,
    samples.summary().published,
    records.KernelTime("k", "w", 2, 30.5, None),
    records.Profile((records.KernelTime("k", "w", 2, 30.5, 28.0),), 4.0, 34.5),
    records.Roof(1.9e11, 1.2e10, 9e10, "cpu:0-1", 2),
    BuildRequest(samples.fused(2, 2), {"w": (samples.record(1), samples.record(2))}, "/out", True),
    ExecutionRequest("/artifact", "/in.npz", 3),
]


def test_every_record_type_has_a_sample() -> None:
    types = {value for value in vars(records).values() if isinstance(value, type) and dataclasses.is_dataclass(value)}
    assert types - {type(sample) for sample in SAMPLES} == set()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_round_trip(sample: Any) -> None:
    line = to_line(sample)

    assert line.endswith("\n")
    assert "\n" not in line[:-1]
    assert from_line(type(sample), line) == sample  # tuples too: a list is equal to none
    assert from_line(type(sample), line.encode()) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_fields_of_a_later_version_are_dropped(sample: Any) -> None:
    plain = {**to_plain(sample), "invented_later": {"a": [1]}}

    assert from_plain(type(sample), plain) == sample


def test_unknown_fields_inside_are_dropped_too() -> None:
    plain = to_plain(samples.record(1))
    plain["measurement"]["settings"]["invented_later"] = 1

    assert from_plain(records.TuningRecord, plain) == samples.record(1)


def test_a_field_of_an_earlier_version_gets_its_default() -> None:
    plain = to_plain(samples.record(1))
    del plain["implementation"], plain["measurement"]["cut_short"], plain["measurement"]["settings"]["flush_cache"]

    assert from_plain(records.TuningRecord, plain) == samples.record(1)


@pytest.mark.parametrize("missing", ["record_id", "workload_key", "phase", "started_at"])
def test_a_missing_field_is_a_value_error_that_names_it(missing: str) -> None:
    plain = to_plain(samples.record(1))
    del plain[missing]

    with pytest.raises(ValueError, match=f"TuningRecord.*{missing}"):
        from_plain(records.TuningRecord, plain)


@pytest.mark.parametrize("value", [None, 3, "text", [], [1], {"measurement": 5}, {}], ids=repr)
def test_what_is_no_record_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        from_plain(records.TuningRecord, value)
    with pytest.raises(ValueError):
        from_line(records.TuningRecord, json.dumps(value))


@pytest.mark.parametrize("line", ["", "{", b"\xff\xfe", "NaN"], ids=repr)
def test_what_is_no_json_is_a_value_error(line: Any) -> None:
    with pytest.raises(ValueError):
        from_line(records.TuningRecord, line)


def test_a_record_must_have_a_measurement_or_a_failure() -> None:
    plain = {**to_plain(samples.record(1)), "failure": {"kind": "run", "message": ""}}
    with pytest.raises(ValueError, match="not both"):
        from_plain(records.TuningRecord, plain)


@pytest.mark.parametrize(("name", "value"), [("trial", "seven"), ("started_at", None), ("task_name", ["a"])])
def test_a_field_of_another_kind_is_a_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError):
        from_plain(records.TuningRecord, {**to_plain(samples.record(1)), name: value})


def test_a_number_that_json_has_no_name_for_is_refused() -> None:
    with pytest.raises(ValueError):
        to_line(records.Latency((float("nan"),)))


@pytest.mark.parametrize("cls", all_errors().values(), ids=lambda cls: cls.__name__)
def test_errors_come_back_as_what_they_were(cls: type[TunewrightError]) -> None:
    plain = json.loads(json.dumps(error_to_plain(cls("what failed; what to do"), "Traceback ...")))
    again = error_from_plain(plain)

    assert type(again) is cls
    assert str(again) == "what failed; what to do"
    assert again.__dict__["detail"] == "Traceback ..."


def test_a_foreign_error_arrives_as_an_engine_error_with_its_name() -> None:
    again = error_from_plain(error_to_plain(KeyError("x")))

    assert type(again) is EngineError
    assert str(again) == "KeyError: 'x'"


@pytest.mark.parametrize("plain", [{"type": "InventedLater", "message": "m"}, {"message": "m"}])
def test_an_unknown_class_is_an_engine_error(plain: dict[str, str]) -> None:
    assert type(error_from_plain(plain)) is EngineError
    assert str(error_from_plain(plain)) == "m"


def test_an_error_without_text_still_says_something() -> None:
    assert str(error_from_plain({}))
    assert type(error_from_plain({"type": "TargetError", "message": "t"})) is TargetError
