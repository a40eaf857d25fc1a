"""The one way in which a rank waits: poll, yield the core, then sleep, and in the end say who waits for what.

It never calls a blocking MPI function, so that signal handlers run, outstanding sends make progress, and more
ranks than cores do not starve each other. It knows requests only by their `Test`, and never which library
they are from. What is to be done when a wait is long belongs to `long_wait`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hpcpipe.transport.long_wait import (
    ABORT_AFTER_S,
    NAME_AFTER_S,
    WARN_AFTER_S,
    LongWait,
    Patience,
    Watch,
)
from hpcpipe.transport.standing import Standing

SOON_TESTS = 20
"""Tests at once after another before a wait begins."""
YIELDING_S = 200e-6
"""How long a wait only yields the core between two tests before it begins to sleep."""
PATIENT_YIELDING_S = 20e-3
"""The same for bytes that are already on their way: many MPI libraries move them only inside MPI calls."""
FIRST_SLEEP_S = 10e-6
LONGEST_SLEEP_S = 100e-6
SUSPENDED_S = 5.0
"""A sleep that takes so long was no sleep: the process was stopped, and its clock went on."""


class Request(Protocol):
    """What can be waited for: `Test` makes progress and says whether it is done; afterwards it stays done."""

    def Test(self) -> bool: ...


class Waiter:
    """Waits for requests on behalf of one rank.

    rank: whose waits these are.
    warn_after_s: a wait says so each time it has lasted this many seconds more.
    abort_after_s: a wait raises TransportError after this many seconds; None waits for ever. Time in which this
        process was stopped itself does not count.
    describe: says what the rank is, as "stage 2"; asked only when there is something to say.
    log: takes a line for the user; by default it goes to stderr at once.

    idle: callables that run while this rank waits, such as `Transport.progress`; they must not wait themselves.
    waited_s: seconds spent waiting, by kind.
    watch: asks other ranks what they do, in waits that last; None where nobody can be asked.
    task: what the rank is at between waits, as ("F of minibatch 71", since when on the clock), or None. Other
        threads call it.
    """

    def __init__(
        self,
        *,
        rank: int,
        warn_after_s: float = WARN_AFTER_S,
        abort_after_s: float | None = ABORT_AFTER_S,
        describe: Callable[[], str] | None = None,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.warn_after_s = warn_after_s
        self.abort_after_s = abort_after_s
        self.describe = describe
        self.idle: list[Callable[[], None]] = []
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.watch: Watch | None = None
        self.task: Callable[[], tuple[str, float] | None] = lambda: None
        self._long: LongWait | None = None
        self._patient = False
        self._log = log or _to_stderr
        self._clock = clock
        self._sleep = sleep

    def wait(
        self,
        requests: Iterable[Request],
        what: Callable[[], str] | str,
        *,
        kind: str = "other",
        peers: Callable[[], Sequence[int]] | Sequence[int] = (),
        yielding_s: float = YIELDING_S,
    ) -> None:
        """Return when every request is done.

        what: names the awaited thing in messages, as "activation of minibatch 71 from rank 1".
        kind: the account in `waited_s` that the time goes to.
        peers: the ranks without which it cannot be done; none for a wait for a device or a disk.
        yielding_s: how long to poll without sleeping.

        Raises TransportError when it takes longer than `abort_after_s`, when a rank that it depends on is gone, or
        when MPI reports an error; FailedElsewhere when another rank ends the job.
        """
        began = started = last = self._clock()
        pause = FIRST_SLEEP_S
        long: LongWait | None = None
        look_after_s = min(NAME_AFTER_S, self.warn_after_s)
        try:
            pending = [request for request in requests if not request.Test()]
            while pending:
                for hook in self.idle:
                    hook()
                now = self._clock()
                if now - last > SUSPENDED_S:
                    started += now - last
                    if long is not None:
                        long.wake()
                last = now
                waited = now - started
                if waited < yielding_s:
                    _yield_core()
                else:
                    self._sleep(pause)
                    pause = min(2 * pause, LONGEST_SLEEP_S)
                    if waited >= look_after_s:
                        if long is None:
                            long = self._long = self._lasting(what, peers)
                        look_after_s = long.look(waited)
                pending = [request for request in pending if not request.Test()]
        except RuntimeError as error:  # mpi4py's exceptions are RuntimeErrors
            raise (long or self._lasting(what, peers)).after_an_error(error, self._sleep) from error
        finally:
            self._long = None
            self.waited_s[kind] += self._clock() - began

    def _lasting(
        self, what: Callable[[], str] | str, peers: Callable[[], Sequence[int]] | Sequence[int]
    ) -> LongWait:
        patience = Patience(
            warn_after_s=self.warn_after_s, abort_after_s=self.abort_after_s, patient=self._patient
        )
        return LongWait(
            self.subject(),
            what,
            peers,
            patience=patience,
            watch=self.watch,
            log=self._log,
            clock=self._clock,
        )

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Waits in this block warn, but never give up while others can be heard: for a disk that may be slow but
        is not lost. Silence of a rank they depend on still ends them after `abort_after_s`."""
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """This rank is at `what` between the waits in this block."""
        since = self._clock()
        before, self.task = self.task, lambda: (what, since)
        try:
            yield
        finally:
            self.task = before

    def standing(self) -> Standing:
        """What this rank does right now; other threads may call it."""
        long = self._long
        if long is not None:
            return long.standing
        task = self.task()
        if task is None:
            return Standing()
        what, since = task
        return Standing(what=what, seconds=self._clock() - since)

    def subject(self) -> str:
        """This rank in words, as "rank 2 (stage 2)"."""
        return f"rank {self.rank}" if self.describe is None else f"rank {self.rank} ({self.describe()})"


def done_soon(request: Request) -> bool:
    """Whether a request is done within the few microseconds in which a wait would not be worth its bookkeeping."""
    for _ in range(SOON_TESTS):  # noqa: SIM110 (a generator costs as much as the tests)
        if request.Test():
            return True
    return False


class Condition:
    """Any question that can be asked again and again, as a request."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def Test(self) -> bool:
        return self._holds()


def _yield_core() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _to_stderr(line: str) -> None:
    print(f"hpcpipe: {line}", file=sys.stderr, flush=True)
