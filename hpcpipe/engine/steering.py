"""When to cut, when to stop, and the control words by which all ranks come to the same answer.

A cut is "after U(k) on every stage". Cuts at a fixed interval are known to all. Any other cut is decided by the
rank of stage 0 when it is about to run F(k), and k then rides with the activations; a request (a signal, a STOP
file) reaches stage 0 riding on the gradients. No collective, no stop: with N stages a request is obeyed after at
most 2N minibatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_NOTHING = 0


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


class Steering:
    """The cuts of one rank's run.

    `every` minibatches there is a cut (0: none), and every `seconds` if given (None: never; a function so that
    the interval may follow the measured cost of a write). `last` is the run's last minibatch. Where the pipeline
    is drained for a cut, only the ends of the stretches of `drain_every` minibatches are legal cuts. `asked` is
    looked at by stage 0 before each forward, for requests that come from outside the job (a STOP file).
    """

    def __init__(
        self,
        *,
        every: int,
        last: int,
        drain_every: int = 0,
        asked: Callable[[], bool] = lambda: False,
        seconds: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requested = False
        self.stop_after: int | None = None
        self._every = every
        self._last = last
        self._drain_every = drain_every
        self._asked = asked
        self._seconds = seconds
        self._clock = clock
        self._previous = clock()
        self._marks: dict[int, CutMark] = {}
        self._newest_passed = -1

    def request(self) -> None:
        """Ask for a cut and a clean end; safe to call from a signal handler."""
        self.requested = True

    def decide(self, minibatch: int) -> None:
        """At stage 0, before F(minibatch): cut behind it if someone asked or time is up."""
        cut = minibatch
        if self._drain_every:
            cut += self._drain_every - 1 - minibatch % self._drain_every
        if self._marks or cut >= self._last:
            return
        self.requested = self.requested or self._asked()
        interval = self._seconds()
        due = interval is not None and self._clock() - self._previous >= interval
        if self.requested or due:
            self._adopt(CutMark(minibatch=cut, stop=self.requested))

    def activation_word(self) -> int:
        """Control word for activations: the decided cut that lies ahead, if there is one."""
        return max((mark.word() for mark in self._marks.values()), default=_NOTHING)

    def gradient_word(self) -> int:
        """Control word for gradients: whether a cut and an end are asked for."""
        return int(self.requested)

    def arrived_with_activation(self, word: int) -> None:
        """Take over a mark that came with an activation."""
        mark = CutMark.from_word(word)
        if mark is not None and mark.minibatch > self._newest_passed:
            self._adopt(mark)

    def arrived_with_gradient(self, word: int) -> None:
        """Take over a request that came with a gradient."""
        if word:
            self.requested = True

    def cuts_at(self, minibatch: int) -> bool:
        """Whether there is a cut after U(minibatch); the run's end is one."""
        regular = self._every > 0 and (minibatch + 1) % self._every == 0
        return regular or minibatch in self._marks or minibatch == self._last

    def cut_between(self, oldest: int, minibatch: int) -> bool:
        """Whether a known cut will find `minibatch` in flight at a stage whose next update is U(oldest)."""
        if self._every and oldest // self._every < minibatch // self._every:
            return True
        return any(oldest <= mark < minibatch for mark in self._marks)

    def passed(self, minibatch: int) -> None:
        """Every stage of this rank has made its cut after U(minibatch)."""
        self._previous = self._clock()
        self._newest_passed = minibatch
        self._marks.pop(minibatch, None)

    def _adopt(self, mark: CutMark) -> None:
        self._marks[mark.minibatch] = mark
        if mark.stop:
            self.stop_after = mark.minibatch
