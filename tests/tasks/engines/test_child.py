"""The parent's side of an engine child: starts that fail, deaths, time limits, and nothing left behind.

Most children here are small programs that misbehave on purpose, in the place of the interpreter; what a
real engine does is in tests/contracts/test_engine.py.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.engines.child import ChildOptions, EngineChild
from tasks.engines.interface import ExecutionRequest
from tasks.engines.wire import WIRE_VERSION, to_plain
from tasks.errors import EngineCrashed, EngineError, EngineTimeout, EngineUnavailable, TunewrightError
from tasks.records import MeasureSettings, Session
from tests.fresh import descendants, in_fresh, start_fresh, wait_until_gone
from tests.infra import sample_records as samples

Start = Callable[..., EngineChild]

#: What every program below can use: says hello as an engine does, reads a request, answers.
PRELUDE = f"""
import json, os, signal, sys, time
INFO = {to_plain(samples.ENGINE)!r}
def say(**message): print(json.dumps(message), flush=True)
def hello(wire={WIRE_VERSION}): say(id=0, result={{"wire": wire, "info": INFO}})
def request():
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit(0)
def complain(text): print(text, file=sys.stderr, flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a child whose interpreter runs the given program instead; ends all of them afterwards."""
    children: list[EngineChild] = []

    def start_program(program: str, **options: Any) -> EngineChild:
        path = tmp_path / f"interpreter-{len(children)}"
        path.write_text(f"#!{sys.executable}\n{PRELUDE}\n{program}\n")
        path.chmod(0o755)
        children.append(start_interpreter(str(path), **options))
        return children[-1]

    yield start_program
    for child in children:
        child.close()


def start_interpreter(python: str, **options: Any) -> EngineChild:
    return EngineChild(ChildOptions("relax", python, "cpu", "cpu:0", 1, **{"start_timeout_s": 20.0, **options}))


def assert_one_line(error: BaseException, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_a_child_that_speaks_is_believed(start: Start) -> None:
    child = start("hello(); r = request(); say(id=r['id'], result={'samples_ms': [r['args']['request']['repeats']]})")

    assert child.describe() == samples.ENGINE
    assert child.execute(ExecutionRequest("a", "b", 3)).samples_ms == (3,)


def test_an_interpreter_that_does_not_exist() -> None:
    with pytest.raises(EngineUnavailable) as caught:
        start_interpreter("/nowhere/python")
    assert_one_line(caught.value, "/nowhere/python", "TUNEWRIGHT_RELAX_PYTHON", "No such file")


def test_an_interpreter_that_may_not_be_run(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    with pytest.raises(EngineUnavailable) as caught:
        start_interpreter(str(tmp_path / "python"))
    assert_one_line(caught.value, "Permission denied")


def test_an_interpreter_without_the_engine(start: Start) -> None:
    child = start("complain('Traceback'); complain('ModuleNotFoundError: No module named tvm'); sys.exit(1)")
    with pytest.raises(EngineUnavailable) as caught:
        child.describe()
    assert_one_line(caught.value, "No module named tvm", "tunewright doctor")


def test_one_that_ends_at_once() -> None:
    child = start_interpreter("/bin/true")
    with pytest.raises(EngineUnavailable) as caught:
        child.describe()
    assert_one_line(caught.value, "/bin/true", "wrote nothing")
    child.close()


def test_an_error_at_the_start_keeps_its_class(start: Start) -> None:
    child = start("say(id=0, error={'type': 'TargetError', 'message': 'no such target', 'detail': ''})")
    with pytest.raises(TunewrightError) as caught:
        child.describe()
    assert type(caught.value).__name__ == "TargetError"


def test_one_that_hangs_at_the_start(start: Start) -> None:
    child = start("complain('waiting for a licence'); time.sleep(60)", start_timeout_s=0.5)
    with pytest.raises(EngineTimeout) as caught:
        child.describe()
    assert_one_line(caught.value, "waiting for a licence")
    assert not psutil.pid_exists(child.pid)


def test_another_version_of_the_wire(start: Start) -> None:
    child = start("hello(wire=99); time.sleep(60)")
    with pytest.raises(EngineUnavailable) as caught:
        child.describe()
    assert_one_line(caught.value, "99", str(WIRE_VERSION), "same version")


def test_one_that_prints_something_else(start: Start) -> None:
    child = start("print('Welcome to conda!', flush=True); time.sleep(60)")
    with pytest.raises(TunewrightError) as caught:
        child.describe()
    assert_one_line(caught.value)


def test_a_death_in_a_call_names_signal_verb_and_last_words(start: Start) -> None:
    child = start("hello(); request(); complain('line one'); complain('stack smashed'); os.kill(os.getpid(), 11)")
    child.describe()
    with pytest.raises(EngineCrashed) as caught:
        child.import_model(samples.model())
    assert_one_line(caught.value, "SIGSEGV", "import_model", "stack smashed")
    assert "line one" in caught.value.__dict__["detail"]
    assert caught.value.retried


def test_sigkill_from_outside_is_a_crash_with_what_was_in_flight(start: Start) -> None:
    trial = {"candidate_key": "c", "workload_key": "w", "trial": 4}
    child = start(
        f"hello(); request(); say(event='record', data={to_plain(samples.record(3))!r})\n"
        f"say(event='trial', data={trial!r}); complain('measuring'); time.sleep(60)"
    )
    heard: list[Any] = []

    def kill_soon(record: Any) -> None:
        heard.append(record)
        threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()

    with pytest.raises(EngineCrashed) as caught:
        child.tune(_session(), kill_soon)
    assert_one_line(caught.value, "SIGKILL", "tune", "measuring")
    assert heard == [samples.record(3)]
    assert child.in_flight == trial


def test_a_record_ends_what_is_in_flight(start: Start) -> None:
    child = start(
        "hello(); r = request(); say(event='trial', data={})\n"
        f"say(event='record', data={to_plain(samples.record(3))!r})\n"
        "say(event='invented later', data=1)\n"
        "say(id=r['id'], result=dict(session_id='s', phase='search', records=1, failures={}, seconds={}))"
    )
    assert child.tune(_session(), lambda record: None).records == 1
    assert child.in_flight is None


def test_after_a_death_it_is_restarted_and_works(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    child = start(
        f"hello(); r = request()\nif not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w').close(); os._exit(3)\n"
        "say(id=r['id'], error={'type': 'ModelError', 'message': 'alive'})"
    )
    with pytest.raises(EngineCrashed) as caught:
        child.import_model(samples.model())
    assert_one_line(caught.value, "status 3")
    assert child.last_info == samples.ENGINE
    child.restart()
    with pytest.raises(TunewrightError, match="alive"):
        child.import_model(samples.model())


def test_a_dead_child_answers_every_call_with_a_crash(start: Start) -> None:
    child = start("hello(); request(); os._exit(3)")
    for _ in range(3):
        with pytest.raises(EngineCrashed):
            child.import_model(samples.model())
    assert child.last_info == samples.ENGINE


def test_no_answer_in_time_ends_the_child_and_all_it_started(start: Start, tmp_path: Path) -> None:
    child = start(
        "import subprocess\nhello(); request(); p = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)",
        step_timeout_s=1.0,
    )
    child.describe()
    with pytest.raises(EngineTimeout, match="import_model"):
        child.import_model(samples.model())
    grandchild = int((tmp_path / "pid").read_text())
    assert wait_until_gone([p for p in psutil.process_iter() if p.pid in (grandchild, child.pid)]) == []


def test_events_prolong_the_time_limit(start: Start) -> None:
    # A session takes as long as its trials do; only silence is a fault.
    child = start(
        "hello(); r = request()\nfor _ in range(6): time.sleep(0.3); say(event='trial', data={})\n"
        "say(id=r['id'], result=dict(session_id='s', phase='search', records=0, failures={}, seconds={}))",
        step_timeout_s=1.0,
    )
    assert child.tune(_session(), lambda record: None).session_id == "s"


def test_a_child_that_was_ended_answers_with_an_engine_error(start: Start) -> None:
    child = start("hello(); request(); time.sleep(60)", step_timeout_s=0.3)
    with pytest.raises(EngineTimeout):
        child.import_model(samples.model())
    with pytest.raises(EngineError):
        child.import_model(samples.model())


def test_close_leaves_no_process_and_may_be_called_twice(start: Start) -> None:
    child = start("import subprocess\nsubprocess.Popen(['sleep', '60']); hello(); time.sleep(60)")
    child.describe()
    below = [psutil.Process(child.pid), *descendants(child.pid)]
    assert len(below) == 2
    child.close()
    child.close()
    assert wait_until_gone(below) == []
    child.finish_trial()  # nobody is there to hear it


def start_and_close(python: str) -> str:
    child = start_interpreter(python)
    child.close()
    folders = Path(tempfile.gettempdir()).glob("tunewright-path-*")
    return " ".join(sorted(str(folder) for folder in folders))


def test_one_folder_in_tmp_serves_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert in_fresh(start_and_close, "/bin/true") == in_fresh(start_and_close, "/bin/true")


def test_the_child_may_be_started_in_a_thread_that_ends() -> None:
    # Prefect runs steps in threads; the kernel's parent-death signal is sent when the *thread* ends.
    started: list[EngineChild] = []

    def begin() -> None:
        started.append(start_interpreter(sys.executable, start_timeout_s=180.0))
        started[0].describe()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(1.5)  # longer than the child takes to notice that its parent has gone
    with started[0] as child, pytest.raises(EngineError) as caught:
        child.import_model(samples.model())
    assert not isinstance(caught.value, EngineCrashed)


def lead_a_real_engine() -> None:
    """Start the relax engine for real, with an idle worker of an artifact; never answers."""
    child = start_interpreter(sys.executable, start_timeout_s=180.0)
    child.describe()
    print(child.pid, flush=True)
    signal.pause()


def test_the_parents_death_ends_the_engine_and_its_workers() -> None:
    process = start_fresh(lead_a_real_engine)
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline())
        below = [psutil.Process(child), *descendants(child)]
        assert len(below) >= 2  # the engine and its fork server
    finally:
        process.kill()
        process.communicate()
    assert wait_until_gone(below) == []


def _session() -> Any:
    return Session("s", "r", "search", (samples.task(0),), 1, 0, "", MeasureSettings(), "/tmp/none")
