"""Engines as child processes: starts one, speaks with it, ends it with its whole process group."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import tasks
from tasks.engines.interface import BuildRequest, ExecutionRequest
from tasks.engines.wire import WIRE_VERSION, error_from_plain, from_plain, to_plain
from tasks.errors import EngineCrashed, EngineTimeout, EngineUnavailable
from tasks.records import (
    Artifact,
    EngineInfo,
    FusedModule,
    ImportedModule,
    Latency,
    ModelFile,
    Session,
    SessionResult,
    TuningRecord,
    TuningTask,
    short_hash,
)

T = TypeVar("T")
_TAIL_BYTES = 3000
#: How an engine's own environment comes to be.
_SET_UP = {"relay": ", or set it up with 'make relay-env'"}


@dataclass(frozen=True)
class ChildOptions:
    """How an engine child is started."""

    engine: str
    python: str
    target: str
    device: str
    threads: int
    seed: int = 0
    start_timeout_s: float = 120.0
    step_timeout_s: float = 1800.0
    extra_environment: tuple[tuple[str, str], ...] = ()


class EngineChild:
    """An ``Engine`` whose work is done in a child process. Not for use by several threads.

    A child that died is not restarted here: ``restart`` is the caller's decision.
    """

    def __init__(self, options: ChildOptions) -> None:
        """Start the child; it gets ready while the caller goes on."""
        self.options = options
        #: The trial that the child has begun and not finished, as it announced it.
        self.in_flight: dict[str, Any] | None = None
        self._info: EngineInfo | None = None
        self._last_info: EngineInfo | None = None
        self._next_id = 1
        self._start()

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The child's process id, which is its process group's too."""
        return self._process.pid

    def describe(self) -> EngineInfo:
        """Wait until the child is ready. Raises EngineUnavailable, TargetError."""
        if self._info is None:
            hello = self._read_reply(0, self.options.start_timeout_s, None)
            if hello.get("wire") != WIRE_VERSION:
                raise EngineUnavailable(
                    f"the engine speaks wire version {hello.get('wire')}, this Tunewright {WIRE_VERSION}: "
                    "install the same version in both environments"
                )
            self._info = self._last_info = from_plain(EngineInfo, hello["info"])
        return self._info

    @property
    def last_info(self) -> EngineInfo:
        """What the child that last answered said of itself, also when it has died since."""
        if self._last_info is None:
            return self.describe()
        return self._last_info

    def import_model(self, model: ModelFile) -> ImportedModule:
        """See Engine."""
        return from_plain(ImportedModule, self._call("import_model", {"model": model}))

    def fuse(self, imported: ImportedModule, granularity: str) -> FusedModule:
        """See Engine."""
        return from_plain(FusedModule, self._call("fuse", {"imported": imported, "granularity": granularity}))

    def extract(self, fused: FusedModule, out_dir: str) -> tuple[TuningTask, ...]:
        """See Engine."""
        found = self._call("extract", {"fused": fused, "out_dir": out_dir})
        return tuple(from_plain(TuningTask, task) for task in found)

    def tune(self, session: Session, on_record: Callable[[TuningRecord], None]) -> SessionResult:
        """See Engine."""

        def on_event(event: str, data: Any) -> None:
            if event == "trial":
                self.in_flight = data
            elif event == "record":
                self.in_flight = None
                on_record(from_plain(TuningRecord, data))

        self.in_flight = None
        return from_plain(SessionResult, self._call("tune", {"session": session}, on_event))

    def build(self, request: BuildRequest) -> Artifact:
        """See Engine."""
        return from_plain(Artifact, self._call("build", {"request": request}))

    def execute(self, request: ExecutionRequest) -> Latency:
        """See Engine. Tried again where the child dies: whatever an artifact does, it does in a process below it."""
        try:
            return from_plain(Latency, self._call("execute", {"request": request}))
        except EngineCrashed:
            self.restart()
            return from_plain(Latency, self._call("execute", {"request": request}))

    def finish_trial(self) -> None:
        """Ask the child to end its session after the trial in flight; one that is starting would just die of it."""
        if self._info is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def restart(self) -> None:
        """A new child in place of one that died."""
        self.close()
        self._info = None
        self._next_id = 1
        self._start()

    def close(self) -> None:
        """End the child and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stderr.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def stderr_tail(self) -> str:
        """The last lines of the child's log."""
        if self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(0, size - _TAIL_BYTES)
        return os.pread(self._stderr.fileno(), _TAIL_BYTES, start).decode(errors="replace").strip()

    def _start(self) -> None:
        options = self.options
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._buffer = bytearray()
        self._scratch = tempfile.mkdtemp(prefix="tunewright-engine-")
        arguments = {
            "scratch": self._scratch,
            "target": options.target, "device": options.device,
            "threads": options.threads, "seed": options.seed,
        }  # fmt: skip
        command = [options.python, "-m", f"tasks.engines.{options.engine}.worker", json.dumps(arguments)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
                start_new_session=True, env=_environment(options), cwd=tempfile.gettempdir(),
            )  # fmt: skip
        except OSError as error:
            raise EngineUnavailable(
                f"the {options.engine} engine's interpreter {options.python} does not start ({error.strerror}); "
                f"name another with TUNEWRIGHT_{options.engine.upper()}_PYTHON{_SET_UP.get(options.engine, '')}"
            ) from error

    def _call(self, verb: str, args: dict[str, Any], on_event: Callable[[str, Any], None] | None = None) -> Any:
        self.describe()
        number, self._next_id = self._next_id, self._next_id + 1
        request = {"id": number, "verb": verb, "wire": WIRE_VERSION, "args": to_plain(args)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed at a time limit
            raise self._death(verb) from error
        return self._read_reply(number, self.options.step_timeout_s, on_event, verb)

    def _read_reply(
        self, number: int, timeout_s: float, on_event: Callable[[str, Any], None] | None, verb: str = "start"
    ) -> Any:
        """Hand events on until the reply ``number`` comes. Each event starts the time limit anew."""
        while True:
            message = _parse(self._read_line(time.monotonic() + timeout_s, verb))
            if "event" in message:
                if on_event is not None:
                    on_event(message["event"], message["data"])
            elif message.get("id") == number:
                if "error" in message:
                    raise error_from_plain(message["error"])
                return message["result"]

    def _read_line(self, deadline: float, verb: str) -> bytes:
        assert self._process.stdout is not None
        while (end := self._buffer.find(b"\n")) < 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    tail = self.stderr_tail()
                    self.close()
                    raise EngineTimeout(self._overdue(verb, tail))
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._death(verb)
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _overdue(self, verb: str, tail: str) -> str:
        name = self.options.engine
        text = f"the {name} engine gave no answer to {verb} in time: {tail[-300:] or 'it wrote nothing'}"
        if verb != "start":
            return text
        return (
            f"{text}; is {self.options.python} a Python that starts? Name another with "
            f"TUNEWRIGHT_{name.upper()}_PYTHON, or allow more time with TUNEWRIGHT_ENGINE_START_TIMEOUT_S"
        )

    def _death(self, verb: str) -> EngineCrashed | EngineUnavailable:
        status = self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        tail = self.stderr_tail()
        last = tail.splitlines()[-1] if tail else "it wrote nothing"
        name = self.options.engine
        error: EngineCrashed | EngineUnavailable
        if verb == "start":
            error = EngineUnavailable(
                f"the {name} engine does not start with {self.options.python}: {last}; run 'tunewright doctor'"
            )
        else:
            error = EngineCrashed(f"the {name} engine was {how} during {verb}: {last}")
        error.__dict__["detail"] = tail
        return error


def _parse(line: bytes) -> dict[str, Any]:
    """A message; a line that is none, such as an interpreter's banner, is an empty one."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _environment(options: ChildOptions) -> dict[str, str]:
    """The child's environment: this one's, with the threads set and our package importable."""
    environment = dict(os.environ)
    environment.update(
        PYTHONPATH=str(_package_path()),
        PYTHONUNBUFFERED="1",
        TVM_NUM_THREADS=str(options.threads),
        OMP_NUM_THREADS=str(options.threads),
        # Threads that spin while they wait take the cores from what is measured next: TVM's do so for
        # 220 ms after a run, with this count for some milliseconds, longer than between two kernels.
        OMP_WAIT_POLICY="PASSIVE",
        TVM_THREAD_POOL_SPIN_COUNT="10000",
        # A thread of numpy's in the zygote would make its forks unsafe.
        OPENBLAS_NUM_THREADS="1",
    )
    environment.update(options.extra_environment)
    return environment


def _package_path() -> Path:
    """A folder that holds our package ``tasks`` and nothing else, for interpreters of another environment."""
    package = Path(tasks.__file__).parent
    folder = Path(tempfile.gettempdir()) / f"tunewright-path-{os.getuid()}-{short_hash(package)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    link = folder / "tasks"
    if not link.is_symlink() or link.resolve() != package.resolve():
        temporary = folder / f"tasks.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(package)
        temporary.rename(link)
    return folder
