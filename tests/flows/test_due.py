"""What is due and in which order: pure functions."""

from __future__ import annotations

import math

import pytest

from flows.due import LastRun, Request, Rules, in_order, judge, minutes_for, requests_of
from infra.source_versions import SourceVersion, target_slug, targets_of
from tasks.errors import InputError

NOW = 1_000_000_000.0
RULES = Rules(least_share=0.005, again_days=30, attempts=3, now=NOW, tvm_version="0.27.0")


def asking(**tags: str) -> SourceVersion:
    return SourceVersion("m", "3", {f"tunewright.{key}": value for key, value in tags.items()})


def request(name: str = "m", weight: float = 1.0) -> Request:
    return Request(SourceVersion(name, "1"), "cpu", {}, weight=weight)


def last(days: float = 1.0, **fields: object) -> LastRun:
    known = {"tuned_ms": 10.0, "remaining_share": 0.1, "reason": "budget", "tvm_version": "0.27.0"}
    return LastRun(NOW - days * 86400, **{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("cpu", ("cpu",)),
        (" cpu , cuda,cpu,", ("cpu", "cuda")),
        ('cpu,{"kind": "cuda", "keys": ["a", "b"]}', ("cpu", '{"kind": "cuda", "keys": ["a", "b"]}')),
        ('["cpu", {"kind": "cuda"}]', ("cpu", '{"kind": "cuda"}')),
        ("", ()),
    ],
)
def test_targets_of_a_tag(text: str, targets: tuple[str, ...]) -> None:
    assert targets_of({"tunewright.target": text}) == targets


def test_a_published_version_asks_for_nothing() -> None:
    assert targets_of({"tunewright.target": "cpu", "artifact_digest": "a"}) == ()


def test_targets_have_names_that_tags_and_keys_can_hold() -> None:
    assert target_slug("cuda") == "cuda"
    spec = '{"kind": "cuda", "arch": "sm_90"}'
    assert target_slug(spec).startswith("json-")
    assert target_slug(spec) != target_slug(spec.replace("90", "80"))


def test_what_the_tags_ask_for() -> None:
    (found,) = requests_of(asking(target="cpu", shapes="x=1,3; y=2", minutes="2.5", trials="64", weight="3"))
    assert (found.shapes, found.minutes, found.trials, found.weight) == ({"x": (1, 3), "y": (2,)}, 2.5, 64, 3.0)
    parameters = found.parameters(minutes=1.0)
    assert (parameters.model, parameters.minutes, parameters.trials) == ("models:/m/3", 1.0, 64)


@pytest.mark.parametrize(
    ("key", "text"),
    [("minutes", "soon"), ("trials", "-1"), ("weight", "inf"), ("shapes", "x=1,a"), ("target", '{"kind"')],
)
def test_a_tag_that_cannot_be_read_is_named(key: str, text: str) -> None:
    with pytest.raises(InputError, match=f"tunewright.{key}"):
        requests_of(asking(**{"target": "cpu", key: text}))


def test_without_a_budget_a_run_has_the_default_one() -> None:
    (found,) = requests_of(asking(target="cpu"))
    assert found.parameters().minutes == 30.0
    assert minutes_for(found, minutes_left=100, default_minutes=20) == 20
    assert minutes_for(found, minutes_left=7, default_minutes=20) == 7
    assert minutes_for(found, minutes_left=0.5, default_minutes=20) is None


def test_a_budget_of_trials_may_take_the_rest_of_the_night() -> None:
    (found,) = requests_of(asking(target="cpu", trials="100"))
    assert minutes_for(found, minutes_left=100, default_minutes=20) == 100


def test_nothing_new_and_nothing_to_gain_is_skipped() -> None:
    judgement = judge(request(), last(remaining_share=0.004, reason="no task is expected to improve"), RULES)
    assert judgement.gain is None
    assert "no task is expected to improve" in judgement.reason


@pytest.mark.parametrize(
    "run",
    [
        None,
        last(remaining_share=0.006),
        last(remaining_share=0.0, days=31),
        last(remaining_share=0.0, tvm_version="0.26.0"),
        last(remaining_share=None),
        last(failure="EngineCrashed", failures_in_a_row=2),
        last(failure="EngineCrashed", failures_in_a_row=3, days=31),
    ],
)
def test_what_is_due(run: LastRun | None) -> None:
    assert judge(request(), run, RULES).gain


def test_what_always_fails_is_given_up_with_its_reason() -> None:
    judgement = judge(request(), last(failure="ShapeError: x", failures_in_a_row=3), RULES)
    assert judgement.gain is None
    assert judgement.reason == "given up after 3 failed runs: ShapeError: x"


def test_the_most_to_gain_goes_first() -> None:
    runs = {
        "never": (None, 1.0),
        "heavy": (last(tuned_ms=100.0), 1.0),
        "wide": (last(tuned_ms=100.0, remaining_share=0.5), 1.0),
        "light": (last(tuned_ms=1.0), 1.0),
        "weighty": (last(tuned_ms=1.0), 1000.0),
        "old": (last(tuned_ms=100.0, days=10), 1.0),
        "done": (last(remaining_share=0.0), 1.0),
    }
    judged = [judge(request(name, weight), run, RULES) for name, (run, weight) in runs.items()]
    order = [judgement.request.source.name for judgement in in_order(judged)]
    assert order == ["never", "weighty", "wide", "old", "heavy", "light"]
    assert in_order(judged)[0].gain == math.inf
