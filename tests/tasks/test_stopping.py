"""Ctrl-C that a library swallows ends the run at its next step."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from tasks import stopping


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    with stopping.interruptible():
        stopping.check()
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stopping.check()
    stopping.check()


def test_an_interrupt_is_raised_at_once_too() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopping.interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
