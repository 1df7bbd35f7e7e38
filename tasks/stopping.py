"""Ctrl-C is heard even where somebody swallows it.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a library that catches everything it
is gone, and a run that was told to stop went on for all of its trials. So it is remembered, and looked at between
the steps of a run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this, Ctrl-C raises KeyboardInterrupt as ever, and ``check`` does once more. In the main thread only."""
    global _asked
    _asked = False

    def note(number: int, frame: FrameType | None) -> None:
        global _asked
        _asked = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _asked = False


def check() -> None:
    """Raise KeyboardInterrupt where Ctrl-C was pressed and nobody has ended."""
    if _asked:
        raise KeyboardInterrupt
