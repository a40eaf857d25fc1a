"""The one way in which a rank waits: poll, yield the core, then sleep, and in the end say who waits for what.

It never calls a blocking MPI function, so that signal handlers run, outstanding sends make progress, and more
ranks than cores do not starve each other. It knows requests only by their `Test`, and never which library
they are from.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hpcpipe.errors import TransportError

SOON_TESTS = 20
"""Tests at once after another before a wait begins."""
YIELDING_S = 200e-6
"""How long a wait only yields the core between two tests before it begins to sleep."""
PATIENT_YIELDING_S = 20e-3
"""The same for bytes that are already on their way: many MPI libraries move them only inside MPI calls."""
FIRST_SLEEP_S = 10e-6
LONGEST_SLEEP_S = 100e-6

WARN_AFTER_S = 60.0
ABORT_AFTER_S = 600.0


class Request(Protocol):
    """What can be waited for: `Test` makes progress and says whether it is done; afterwards it stays done."""

    def Test(self) -> bool: ...


class Waiter:
    """Waits for requests on behalf of one rank.

    rank: whose waits these are.
    warn_after_s: a wait says so each time it has lasted this many seconds more.
    abort_after_s: a wait raises TransportError after this many seconds; None waits for ever.
    describe: says what the rank is, as "stage 2"; asked only when there is something to say.
    log: takes a line for the user; by default it goes to stderr at once.

    idle: callables that run while this rank waits, such as `Transport.progress`; they must not wait themselves.
    waited_s: seconds spent waiting, by kind.
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
        self._log = log or _to_stderr
        self._clock = clock
        self._sleep = sleep

    def wait(
        self,
        requests: Iterable[Request],
        what: Callable[[], str] | str,
        *,
        kind: str = "other",
        yielding_s: float = YIELDING_S,
    ) -> None:
        """Return when every request is done.

        what: names the awaited thing in messages, as "activation of minibatch 71 from rank 1".
        kind: the account in `waited_s` that the time goes to.
        yielding_s: how long to poll without sleeping.

        Raises TransportError when it takes longer than `abort_after_s`, or when MPI reports an error.
        """
        started = self._clock()
        pause = FIRST_SLEEP_S
        warnings = 1
        try:
            pending = [request for request in requests if not request.Test()]
            while pending:
                for hook in self.idle:
                    hook()
                waited = self._clock() - started
                if waited < yielding_s:
                    _yield_core()
                else:
                    self._sleep(pause)
                    pause = min(2 * pause, LONGEST_SLEEP_S)
                    if waited >= warnings * self.warn_after_s:
                        warnings += 1
                        self._log(f"{self.subject()} waits for {_text(what)} for {waited:.0f} s")
                    if self.abort_after_s is not None and waited >= self.abort_after_s:
                        raise TransportError(f"{self.subject()} waited for {_text(what)} for {waited:.0f} s")
                pending = [request for request in pending if not request.Test()]
        except RuntimeError as error:  # mpi4py's exceptions are RuntimeErrors
            raise TransportError(f"{self.subject()} waits for {_text(what)}: {error}") from error
        finally:
            self.waited_s[kind] += self._clock() - started

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Waits in this block warn, but never give up: for a disk that may be slow but is not lost."""
        limit, self.abort_after_s = self.abort_after_s, None
        try:
            yield
        finally:
            self.abort_after_s = limit

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


def _text(what: Callable[[], str] | str) -> str:
    return what if isinstance(what, str) else what()


def _yield_core() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _to_stderr(line: str) -> None:
    print(f"hpcpipe: {line}", file=sys.stderr, flush=True)
