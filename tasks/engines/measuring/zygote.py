"""A fork server: a process that has imported all that builds and runs need, and has no threads.

Forking it gives a worker in milliseconds, where a new interpreter would import TVM for seconds. A
crash, a hang or a memory leak costs one worker. Start it before anything creates threads: a fork
of a process with threads inherits their locks.

Linux only. Standard library only, Python 3.10.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Makes a worker's handler in the worker, from the options it is started with.
HandlerFactory = Callable[[Mapping[str, Any]], Callable[[Any], Any]]

_HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker is started: its handler, the cores it may use, its limit of further memory."""

    role: str
    options: Mapping[str, Any]
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0


class WorkerError(Exception):
    """The handler raised: ``kind`` is the exception's class name, ``detail`` its traceback."""

    def __init__(self, kind: str, message: str, detail: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.detail = detail


class WorkerDied(Exception):
    """The worker's process ended: the text says how and carries the tail of its stderr."""


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    With ``parent``, its process id, that holds also where it ended before this call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


class Worker:
    """A forked process that handles one job at a time."""

    def __init__(self, zygote: Zygote, options: WorkerOptions) -> None:
        self._zygote = zygote
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        self._said_before = 0
        self._status: int | None = None
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.pid = zygote.fork_worker(options, theirs, self._stderr.fileno())

    def submit(self, job: Any) -> None:
        """Hand over ``job`` (pickled). Raises WorkerDied."""
        # What it wrote about earlier jobs does not explain how it ends in this one.
        self._said_before = os.fstat(self._stderr.fileno()).st_size
        try:
            send_message(self.socket, job)
        except OSError as error:
            raise WorkerDied(self._obituary()) from error

    def result(self) -> Any:
        """Wait for the handler's value. Raises WorkerError or WorkerDied."""
        try:
            status, value = receive_message(self.socket)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkerDied(self._obituary()) from error
        if status == "ok":
            return value
        raise WorkerError(*value)

    def kill(self) -> None:
        """End the process and forget it."""
        # Once reaped, its number may be that of another process.
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._status = self._zygote.reap(self.pid)
        self.socket.close()
        self._stderr.close()

    def _obituary(self) -> str:
        if self._status is None:
            self._status = self._zygote.reap(self.pid)
        status = self._status
        how = "closed its channel"
        if status is None:
            pass
        elif os.WIFSIGNALED(status):
            how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WIFEXITED(status):
            how = f"exited with status {os.WEXITSTATUS(status)}"
        return f"the worker {how}{self._stderr_tail()}"

    def _stderr_tail(self) -> str:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(self._stderr.fileno()).st_size
            start = max(self._said_before, size - _TAIL_BYTES)
            text = os.pread(self._stderr.fileno(), _TAIL_BYTES, start).decode(errors="replace").strip()
            return f"; its last words: {text}" if text else ""
        return ""


class Zygote:
    """The parent's handle on the fork server."""

    def __init__(self, factories: Mapping[str, HandlerFactory]) -> None:
        """Fork the server; ``factories`` makes a worker's handler by its role."""
        self._control, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            with _no_way_out():
                die_with_parent(parent)
                _serve_forks(theirs, factories)
        theirs.close()

    def spawn(self, options: WorkerOptions) -> Worker:
        """A new worker."""
        return Worker(self, options)

    def fork_worker(self, options: WorkerOptions, channel: socket.socket, stderr: int) -> int:
        """Have the server fork a worker that speaks on ``channel``; its process id."""
        socket.send_fds(self._control, [b"f"], [channel.fileno(), stderr])
        send_message(self._control, options)
        return int(receive_message(self._control))

    def reap(self, pid: int) -> int | None:
        """The wait status of the worker ``pid``, which is ending; None where it does not end."""
        with contextlib.suppress(OSError, EOFError):
            self._control.sendall(b"r")
            send_message(self._control, pid)
            status: int | None = receive_message(self._control)
            return status
        return None

    def is_alive(self) -> bool:
        """Can it still fork?"""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        return False

    def close(self) -> None:
        """End the server; its workers end with it."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def send_message(channel: socket.socket, value: Any) -> None:
    """Write one pickled message. Raises OSError when the other side is gone."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    channel.sendall(_HEADER.pack(len(data)) + data)


def receive_message(channel: socket.socket) -> Any:
    """Read one message. Raises EOFError when the other side is gone."""
    (length,) = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
    return pickle.loads(_receive_exactly(channel, length))  # noqa: S301 - our own fork wrote it


def _receive_exactly(channel: socket.socket, length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = channel.recv(min(length - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError("the other side closed the channel")
        chunks += chunk
    return bytes(chunks)


def _serve_forks(control: socket.socket, factories: Mapping[str, HandlerFactory]) -> None:
    """The server's loop; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server = os.getpid()
    while True:
        command, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not command:
            os._exit(0)
        value = receive_message(control)
        if command == b"f":
            pid = os.fork()
            if pid == 0:
                control.close()
                with _no_way_out():
                    die_with_parent(server)
                    _run_worker(fds[0], fds[1], value, factories)
            for fd in fds:
                os.close(fd)
            send_message(control, pid)
        else:
            send_message(control, _wait_briefly(value))


@contextlib.contextmanager
def _no_way_out() -> Iterator[None]:
    """End a forked process here: what it raises must not run on in its parent's code."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _wait_briefly(pid: int, limit_s: float = 5.0) -> int | None:
    """The wait status of ``pid``, None where it does not end; one whose channel closed is about to."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def _run_worker(
    channel_fd: int, stderr_fd: int, options: WorkerOptions, factories: Mapping[str, HandlerFactory]
) -> None:
    """A worker's life; never returns."""
    os.dup2(stderr_fd, 2)
    # A candidate that prints must not write into the engine's replies.
    os.dup2(stderr_fd, 1)
    channel = socket.socket(fileno=channel_fd)
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    if options.memory_bytes:
        _limit_memory(options.memory_bytes)
    handler = factories[options.role](options.options)
    while True:
        try:
            job = receive_message(channel)
        except EOFError:
            os._exit(0)
        send_message(channel, _handle(handler, job))


def _handle(handler: Callable[[Any], Any], job: Any) -> tuple[str, Any]:
    try:
        return "ok", handler(job)
    except BaseException as error:  # whatever a candidate raises is data for the parent
        detail = traceback.format_exc()
        print(detail[-_TAIL_BYTES:], file=sys.stderr, flush=True)  # noqa: T201 - this is the log
        return "error", (type(error).__name__, str(error), detail)


def _limit_memory(further_bytes: int) -> None:
    """Let this process map ``further_bytes`` more than it inherited."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + further_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
