"""Requests to stop that come from outside: signals and a file named STOP in the run's folder.

A handler only notes the request; what follows is decided between actions by `steering`. It can be installed before
anything heavy is imported, so that a signal in the seconds of a start is kept and kills nothing: this module loads
neither torch nor MPI.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hpcpipe.engine.forked import Arrivals, protect
from hpcpipe.errors import EXIT_TERMINATED
from hpcpipe.transport.launcher import launcher_rank

DEFAULT_SIGNALS = ("SIGUSR1", "SIGTERM")
"""What asks for a stop before the run file has been read."""
STOP_NAME = "STOP"
"""Whoever makes a file of this name in the run's folder asks for a stop."""
LOOK_EVERY_S = 1.0
COPIES_WITHIN_S = 1.0
"""SIGTERMs closer than this are copies of one: srun and Slurm, or mpirun and scancel, each deliver theirs."""
AFTER_RANK_0_S = 0.5
"""A signal mostly reaches every rank: the others leave rank 0 the time to speak for all, and to end them."""


class StopSignals:
    """What this process makes of stop signals, from its first moments on. For the main thread.

    Any number of requests are one. Only a second SIGTERM, no copy of the first, calls `end_at_once`, from within
    the handler.

    end_at_once: ends the whole job; by default this process, which is right while MPI has not started.
    """

    def __init__(self) -> None:
        self.end_at_once: Callable[[], NoReturn] = _end_alone
        self._arrivals: Arrivals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._arrived: list[signal.Signals] = []
        self._request: Callable[[int], None] | None = None
        self._terminated_at: float | None = None
        self._ending = False

    def listen(self, names: Sequence[str]) -> None:
        """Take the named signals for requests, and no others any more; processes forked later ignore them.

        One that has come and is no request is raised again, to do what it would have done.
        """
        if self._arrivals is None:
            self._arrivals = Arrivals()
        wanted = {signal.Signals[name] for name in names}
        protect(self._arrivals, wanted)
        for number in set(self._before) - wanted:
            signal.signal(number, self._before.pop(number))
            if number in self._arrived:
                self._arrived.remove(number)
                signal.raise_signal(number)
        for number in wanted - set(self._before):
            before = signal.signal(number, self._handle)
            self._before[number] = signal.SIG_DFL if before is None else before

    def direct_to(self, request: Callable[[int], None]) -> None:
        """Call `request` with the number of each signal from here on, and at once with the first that has come."""
        self._request = request
        if self._arrived:
            request(self._arrived[0])

    def release(self) -> None:
        """The run is over: the processes that it has forked obey every SIGTERM from here on."""
        if self._arrivals is not None:
            self._arrivals.release()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            return
        if number not in self._arrived:
            self._arrived.append(signal.Signals(number))
        if number == signal.SIGTERM and self._is_second():
            self._ending = True
            self.end_at_once()
        if self._request is not None:
            self._request(number)

    def _is_second(self) -> bool:
        """Whether this SIGTERM is a second one, by when it arrived: long computations put its handling off."""
        assert self._arrivals is not None
        self._arrivals.catch_up()
        arrived = self._arrivals.last(signal.SIGTERM) or time.monotonic()
        if self._terminated_at is None:
            self._terminated_at = arrived
        return arrived - self._terminated_at >= COPIES_WITHIN_S


def stop_file(directory: Path) -> Callable[[], bool]:
    """A question that looks for a file named STOP in `directory`, once a second at most."""
    path = directory / STOP_NAME
    looked = float("-inf")

    def asked() -> bool:
        nonlocal looked
        now = time.monotonic()
        if now - looked < LOOK_EVERY_S:
            return False
        looked = now
        return path.exists()

    return asked


def _end_alone() -> NoReturn:
    # Leaving without MPI_Finalize makes a launcher end the ranks that have come further.
    rank = launcher_rank(os.environ)
    if rank != 0:
        time.sleep(AFTER_RANK_0_S)
    os.write(2, f"hpcpipe: rank {rank}: a second SIGTERM before training began: ending at once\n".encode())
    os._exit(EXIT_TERMINATED)
