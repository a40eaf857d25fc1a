"""When to cut, when to stop, and the control words by which all ranks come to the same answer.

A cut is "after U(k) on every stage", for a k at which every stage ends a round. Cuts at a fixed interval are known
to all. Any other cut is decided by the first replica of stage 0 when it is about to run F(j): k is the first such
minibatch from j on, and rides with the activations. A request (a signal, a STOP file) reaches that replica riding
on the gradients, and what one replica of a stage knows the others hear before each update. No collective of all
ranks, no stop: with R ranks a request is obeyed after at most 2R minibatches and one common round of all stages.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcpipe.schedule import Schedule, warm_up_of

_NOTHING = 0
STOP_FILE = 254
TIME_IS_UP = 255
"""Causes of a stop beside signals, whose numbers are below 128."""


@dataclass(frozen=True, kw_only=True)
class CutMark:
    """A decided cut after U(`minibatch`); `stop` ends the run there."""

    minibatch: int
    stop: bool

    def word(self) -> int:
        """The mark as a control word (never 0)."""
        return (self.minibatch + 1) << 1 | self.stop

    @staticmethod
    def from_word(word: int) -> CutMark | None:
        """The mark in a control word, None for 0."""
        return None if word == _NOTHING else CutMark(minibatch=(word >> 1) - 1, stop=bool(word & 1))


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why a run is to end early: `cause` is a signal's number, `STOP_FILE` or `TIME_IS_UP`, seen by `rank`."""

    cause: int
    rank: int

    def word(self) -> int:
        """The request as a control word (never 0)."""
        return self.rank << 8 | self.cause

    @staticmethod
    def from_word(word: int) -> StopRequest | None:
        """The request in a control word, None for 0."""
        return None if word == _NOTHING else StopRequest(cause=word & 255, rank=word >> 8)

    def __str__(self) -> str:
        """The cause in words."""
        if self.cause == STOP_FILE:
            return "the file STOP"
        if self.cause == TIME_IS_UP:
            return "the time limit (run.stop_before)"
        known = {number.value: number.name for number in signal.Signals}
        return f"{known.get(self.cause, f'signal {self.cause}')} at rank {self.rank}"


def longest_stop(schedule: Schedule, *, timed_cuts: bool) -> int:
    """How many minibatches stage 0 begins at most between a request anywhere and the end that it asks for.

    A request goes up the pipeline with gradients, and the cut comes down with activations, each as long as the
    pipeline; then the cut waits for a round that all stages end, or for the pipeline to be drained. Where there
    are cuts by time as well (`timed_cuts`), one may be on its way, and the next is one such round behind it.
    """
    wait = schedule.drain_every or schedule.common_round
    return 2 * schedule.ranks + (2 if timed_cuts else 1) * wait


class Steering:
    """The cuts of one rank's run of `schedule`.

    Every `every` minibatches there is a cut (0: none), and every `seconds` if given (None: never; a function so
    that the interval may follow the measured cost of a write), in each case at the first legal one from there on.
    Where the pipeline is drained for cuts, only the ends of its stretches are legal. `asked` is looked at by the
    first replica of stage 0 before each forward, for requests that come from outside the job (a STOP file). That
    replica also calls `taken_up` with the request that it obeys and the minibatch behind which the run ends.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        every: int,
        asked: Callable[[], StopRequest | None] = lambda: None,
        taken_up: Callable[[StopRequest, int], None] = lambda request, minibatch: None,
        seconds: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requested: StopRequest | None = None
        self.stop_after: int | None = None
        self._schedule = schedule
        self._every = every
        self._last = schedule.minibatches - 1
        # While the pipeline fills, the other replicas of stage 0 go forward without hearing of a decision.
        replicas = schedule.replicas_of(0)
        self._unheard = replicas * warm_up_of(schedule, 0) if replicas > 1 else 0
        self._asked = asked
        self._taken_up = taken_up
        self._seconds = seconds
        self._clock = clock
        self._previous = clock()
        self._marks: dict[int, CutMark] = {}
        self._newest_passed = -1

    def request(self, why: StopRequest) -> None:
        """Ask for a cut and a clean end; the first request counts. Safe to call from a signal handler."""
        self.requested = self.requested or why

    def decide(self, minibatch: int) -> None:
        """At the first replica of stage 0, before F(minibatch): cut behind it if someone asked or time is up."""
        cut = self._first_legal(minibatch)
        decided = next(iter(self._marks.values()), None)
        # A cut that is still heard of in time may become the end; behind it, the next one waits for it to pass.
        if cut >= self._last or (decided and (decided.stop or decided.minibatch != cut)):
            return
        if self.requested is None and (asked := self._asked()):
            self.request(asked)
        # A signal may come at any moment from here on: it waits for the next forward.
        why = self.requested
        interval = self._seconds()
        due = interval is not None and self._clock() - self._previous >= interval
        if why or (due and not decided):
            self._adopt(CutMark(minibatch=cut, stop=why is not None))
        if why:
            self._taken_up(why, cut)

    def activation_word(self) -> int:
        """Control word for activations: the decided cut that lies ahead, if there is one."""
        return max((mark.word() for mark in self._marks.values()), default=_NOTHING)

    def gradient_word(self) -> int:
        """Control word for gradients: the request for a cut and an end, if there is one."""
        return _NOTHING if self.requested is None else self.requested.word()

    def arrived_with_activation(self, word: int) -> None:
        """Take over a mark that came with an activation, or from another replica of the stage."""
        mark = CutMark.from_word(word)
        if mark is not None and mark.minibatch > self._newest_passed:
            self._adopt(mark)

    def arrived_with_gradient(self, word: int) -> None:
        """Take over a request that came with a gradient, or from another replica of the stage."""
        if request := StopRequest.from_word(word):
            self.request(request)

    def cuts_at(self, minibatch: int) -> bool:
        """Whether there is a cut after U(minibatch); the run's end is one."""
        regular = self._every > 0 and self._schedule.due(self._every, minibatch)
        return regular or minibatch in self._marks or minibatch == self._last

    def cut_between(self, oldest: int, minibatch: int) -> bool:
        """Whether a known cut will find `minibatch` in flight at a stage whose newest version is `oldest`."""
        if self._every and self._next_regular(oldest) < minibatch:
            return True
        return any(oldest <= mark < minibatch for mark in self._marks)

    def passed(self, minibatch: int) -> None:
        """Every stage of this rank has made its cut after U(minibatch)."""
        self._previous = self._clock()
        self._newest_passed = minibatch
        self._marks.pop(minibatch, None)

    def _first_legal(self, minibatch: int) -> int:
        """The first cut from F(minibatch) on of which every rank hears in time."""
        first, last = self._schedule.segment(minibatch)
        if self._schedule.drain_every:
            return last - 1
        return self._schedule.next_boundary(min(max(minibatch, first + self._unheard), last - 1))

    def _next_regular(self, oldest: int) -> int:
        """The first cut of the fixed interval that is at or behind U(oldest); beyond the end if there is none."""
        multiple = (oldest // self._every + 1) * self._every - 1
        if multiple >= self._schedule.minibatches:
            multiple = self._schedule.minibatches
        else:
            multiple = self._schedule.next_boundary(multiple)
        # A multiple before `oldest` may have been put off to a boundary behind it.
        put_off = self._schedule.next_boundary(oldest)
        return put_off if self._schedule.due(self._every, put_off) else multiple

    def _adopt(self, mark: CutMark) -> None:
        if mark.stop:
            self.stop_after = mark.minibatch
        # Words from before it was to be the end may come later than the one that says so.
        if mark.stop or mark.minibatch not in self._marks:
            self._marks[mark.minibatch] = mark
