"""Limits for calls into MPI that block and cannot be asked how far they are: starting, ending, joining.

A thread of the C library keeps the time, so that it ends the process even where the call holds Python's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """End this process with exit code 1 when the block takes longer, after a traceback that shows where it was.

    None is no limit. Blocks do not nest.
    """
    if seconds is None or seconds == float("inf"):
        yield
        return
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
    except (OSError, RuntimeError, ValueError):
        # Without a stderr nobody could read where it was; the block still has to run.
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def end_within(seconds: int) -> None:
    """Let the kernel end this process after `seconds`, whatever it is in then; from the main thread only."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
