"""Processes that a rank forks, such as helpers that load data: stop signals to the whole group are not for them.

A scheduler or launcher signals every process of a rank's group. Helpers must outlive that, as the rank still needs
their data for the minibatches up to the cut; but a SIGTERM that the rank sends to them alone is how it ends them.
A helper tells the two apart by a note of when one arrived at the rank itself, in memory that both see. Signals are
handled, never set to be ignored, because programs started by exec would inherit that.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType

SAME_WITHIN_S = 0.5
"""SIGTERMs that arrive at a rank and at its helper within this time are one to the group."""
LOOK_AGAIN_S = 0.01

_TIME = struct.Struct("d")
_RELEASED = 0
"""No signal has this number."""


class Arrivals:
    """When each signal last arrived at this process, legible for the processes that it forks.

    Python runs a handler only when the main thread is back from whatever library it is in. The note is made by a
    thread of its own, as soon as the interpreter's lock is free.
    """

    def __init__(self) -> None:
        self._times = mmap.mmap(-1, mmap.PAGESIZE)
        # A handler may interrupt another one in `catch_up`.
        self._lock = threading.RLock()
        self._source, self._sink = socket.socketpair()
        self._source.setblocking(False)
        self._sink.setblocking(False)
        signal.set_wakeup_fd(self._sink.fileno(), warn_on_full_buffer=False)
        # Every signal is for the main thread, which none that another thread got would wake from a wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._note, name="hpcpipe-signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def last(self, number: int) -> float:
        """When signal `number` last arrived, on the monotonic clock of this host; 0.0 if it never did."""
        time_s: float = _TIME.unpack_from(self._times, number * _TIME.size)[0]
        return time_s

    @property
    def released(self) -> bool:
        """Whether `release` has been called, in this process or in the one that has forked it."""
        return self.last(_RELEASED) > 0.0

    def release(self) -> None:
        """Tell forked processes that no signal to the group is of any concern to this one any more."""
        _TIME.pack_into(self._times, _RELEASED * _TIME.size, time.monotonic())

    def catch_up(self) -> None:
        """Note what has arrived and is not noted yet."""
        with self._lock, suppress(BlockingIOError):
            for number in self._source.recv(64):
                _TIME.pack_into(self._times, number * _TIME.size, time.monotonic())

    def _note(self) -> None:
        while True:
            select.select([self._source], [], [])
            self.catch_up()


_rank: Arrivals | None = None
"""What arrives at the rank, also in the processes that it forks."""
_here: Arrivals | None = None
"""What arrives at this process, if it was forked."""
_numbers: frozenset[int] = frozenset()


def protect(arrivals: Arrivals, numbers: Collection[int]) -> None:
    """Let processes that this one forks from here on ignore these signals where they are meant for the group.

    `arrivals` are those of this process.
    """
    global _rank, _numbers
    if _rank is None:
        os.register_at_fork(after_in_child=_protect_this)
    _rank, _numbers = arrivals, frozenset(numbers)


def _protect_this() -> None:
    global _here
    # It takes the place of the parent's, in which nothing of this process must be noted.
    _here = Arrivals()
    for number in _numbers:
        signal.signal(number, _terminated if number == signal.SIGTERM else _ignored)
    if signal.SIGTERM in _numbers:
        _outlast_torch()


def _ignored(number: int, frame: FrameType | None) -> None:
    return


def _terminated(number: int, frame: FrameType | None) -> None:
    if _is_for_this_alone():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _terminated_in_torch(number: int, frame: FrameType | None) -> None:
    if _is_for_this_alone():
        # As torch's own handler does: any other end would count as a crash of the worker.
        os._exit(0)


def _is_for_this_alone() -> bool:
    """Whether the rank itself got no SIGTERM when this process did; waits until it would have been noted."""
    assert _rank is not None
    assert _here is not None
    _here.catch_up()
    arrived = _here.last(signal.SIGTERM)
    while not _rank.released and _rank.last(signal.SIGTERM) < arrived - SAME_WITHIN_S:
        if time.monotonic() >= arrived + SAME_WITHIN_S:
            return True
        time.sleep(LOOK_AGAIN_S)
    return _rank.released


def _outlast_torch() -> None:
    """Have the workers of torch's DataLoader take SIGTERM as others do: as they start, torch sets a handler.

    That one knows only the parent's SIGTERM and dies of all others, for which the rank would then end the job.
    """
    handling = sys.modules.get("torch.utils.data._utils.signal_handling")
    torchs: Callable[[], None] | None = getattr(handling, "_set_worker_signal_handlers", None)
    if handling is None or torchs is None:
        return

    def set_handlers() -> None:
        torchs()
        signal.signal(signal.SIGTERM, _terminated_in_torch)

    handling._set_worker_signal_handlers = set_handlers  # type: ignore[attr-defined]
