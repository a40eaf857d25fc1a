"""What a rank does about a wait that lasts: names it, asks the ranks it depends on, warns, and at last gives up.

    0.5 s   the wait has a name, for whoever asks this rank
    2 s     it asks the ranks it depends on, and whom those wait for, again and again
    +1 s    a rank that is gone ends the job
    warn_after_s, abort_after_s: what is known of the others is said with the warning and with the error

It owns no socket and no request: `roll_call` asks, `wait` tests. One rank gives up for all: the others are silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcpipe.errors import TransportError
from hpcpipe.transport.chain import Finding
from hpcpipe.transport.standing import Standing

WARN_AFTER_S = 60.0
ABORT_AFTER_S = 600.0
NAME_AFTER_S = 0.5
ASK_AFTER_S = 2.0
LOOK_EVERY_S = 0.25
GONE_FOR_S = 1.0
"""A process may end properly with its last message under way: by then it would have come."""
BE_SURE_S = 2.0
"""How long the end of a wait is put off to hear the ranks that matter."""
HEAR_AFTER_ERROR_S = 1.5


class Asking(Protocol):
    """The questions of one wait; `roll_call.Vigil` is one."""

    def look(self, peers: Sequence[int]) -> Finding:
        """Ask, and say what is known of a wait for `peers`; never blocks."""


class Watch(Protocol):
    """Whoever can ask other ranks; `roll_call.RollCall` is one."""

    def vigil(self) -> Asking:
        """The questions of a wait that begins."""

    def check_endings(self) -> None:
        """Raises FailedElsewhere when another rank ends the job."""

    def will_speak(self) -> None:
        """Tell the others that this rank is about to say why the job ends."""

    def someone_speaks(self) -> bool:
        """Whether a rank that goes first has just said the same."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a wait may last: see `Waiter`. patient: only the silence of others counts, not the wait itself."""

    warn_after_s: float
    abort_after_s: float | None
    patient: bool

    @property
    def ask_after_s(self) -> float:
        """Soon enough to know something before the end."""
        return ASK_AFTER_S if self.abort_after_s is None else min(ASK_AFTER_S, self.abort_after_s / 2)


class LongWait:
    """One wait from its first look on.

    subject: who waits, as "rank 2 (stage 2)"; what, peers: see `Waiter.wait`.
    """

    def __init__(
        self,
        subject: str,
        what: Callable[[], str] | str,
        peers: Callable[[], Sequence[int]] | Sequence[int],
        *,
        patience: Patience,
        watch: Watch | None,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._subject = subject
        self._what = what
        self._peers = peers
        self._patience = patience
        self._watch = watch
        self._vigil = None if watch is None else watch.vigil()
        self._log = log
        self._clock = clock
        self._named: tuple[str, tuple[int, ...], float] = ("", (), clock())
        self._warnings = 0
        self._spoke_at: float | None = None

    @property
    def standing(self) -> Standing:
        """What the rank does, for others; other threads may ask."""
        what, peers, since = self._named
        return Standing(waits=True, what=what, seconds=self._clock() - since, peers=peers)

    def look(self, waited: float) -> float:
        """The wait has lasted `waited` seconds: do what is due; the seconds at which to look again.

        Raises TransportError when the wait is over for good, FailedElsewhere when another rank ends the job.
        """
        what, peers = self._name(waited)
        finding = self._hear(peers) if waited >= self._patience.ask_after_s else Finding()
        if waited >= (self._warnings + 1) * self._patience.warn_after_s:
            self._warnings += 1
            self._log(f"{self._subject} waits for {what} for {waited:.0f} s{_clause(finding)}")
        if not self._is_over(waited, peers, finding):
            self._spoke_at = None
        elif self._may_speak(waited):
            raise TransportError(f"{self._subject} waited for {what} for {waited:.0f} s{_clause(finding)}")
        return self._next_look(waited)

    def wake(self) -> None:
        """This process was stopped for a while: what it has not heard in that time says nothing of the others."""
        self._spoke_at = None
        if self._watch is not None:
            self._vigil = self._watch.vigil()

    def after_an_error(self, error: BaseException, sleep: Callable[[float], None]) -> TransportError:
        """MPI has failed in this wait, perhaps because a rank is gone: the error to raise, with what others say.

        Raises FailedElsewhere when another rank ends the job, which is then the reason.
        """
        what, peers = self._name(0.0)
        finding = Finding()
        if self._watch is not None:
            self._watch.will_speak()
            heard_s = 0.0
            while heard_s < HEAR_AFTER_ERROR_S or self._watch.someone_speaks():
                finding = self._hear(peers)
                sleep(LOOK_EVERY_S)
                heard_s += LOOK_EVERY_S
        return TransportError(f"{self._subject} waits for {what}: {error}{_clause(finding)}")

    def _name(self, waited: float) -> tuple[str, Sequence[int]]:
        what = self._what if isinstance(self._what, str) else self._what()
        peers = tuple(self._peers() if callable(self._peers) else self._peers)
        self._named = (what, peers, self._clock() - waited)
        return what, peers

    def _hear(self, peers: Sequence[int]) -> Finding:
        if self._watch is None or self._vigil is None:
            return Finding()
        self._watch.check_endings()
        return self._vigil.look(peers) if peers else Finding()

    def _is_over(self, waited: float, peers: Sequence[int], finding: Finding) -> bool:
        if finding.gone_s is not None and finding.gone_s >= GONE_FOR_S:
            return True
        limit = self._patience.abort_after_s
        if limit is None:
            return False
        if self._patience.patient:
            return finding.silent_s >= limit
        sure = self._vigil is None or not peers or finding.sure
        return waited >= limit and (sure or waited >= limit + BE_SURE_S)

    def _may_speak(self, waited: float) -> bool:
        """Whether this rank is the one to end the job: several come to it at the same time."""
        if self._watch is None:
            return True
        if self._spoke_at is None:
            self._watch.will_speak()
            self._spoke_at = waited
            return False
        return waited - self._spoke_at >= LOOK_EVERY_S and not self._watch.someone_speaks()

    def _next_look(self, waited: float) -> float:
        patience = self._patience
        due = [(self._warnings + 1) * patience.warn_after_s]
        if self._watch is not None:
            due.append(max(waited + LOOK_EVERY_S, patience.ask_after_s))
        if patience.abort_after_s is not None and not patience.patient:
            due.append(max(patience.abort_after_s, waited + LOOK_EVERY_S))
        return min(due)


def _clause(finding: Finding) -> str:
    return f"; {finding.words}" if finding.words else ""
