"""The roll call: ranks that wait for long ask others what they do, outside MPI, which says nothing of the dead.

    waiting rank                                   asked rank
    main thread: question  ------ UDP ------>      a thread that sits in recvfrom
    main thread: answer    <------------------     "waits for activation of minibatch 71 from rank 1 for 58 s"
    ConnectionRefusedError <--- its kernel ---     (no such process: nobody has the port)

Nobody sends anything while no wait is long, so it costs a sleeping thread and a socket. A rank that computes
answers, as its thread is not the one that computes; one that is stopped or cut off does not. Whoever ends the job
says so to the others first, so that none of them takes it for lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpcpipe.errors import FailedElsewhere
from hpcpipe.transport.lines import Entry, Lines
from hpcpipe.transport.standing import Answer, Notice, Question, Standing
from hpcpipe.transport.vigil import Vigil

GREETING_S = 1.0
SPEAKS_FOR_S = 1.0
"""How long a rank that is about to end the job may take before another one does."""


class Gathering(Protocol):
    """The ranks of a job before they can ask each other; `World` is one."""

    rank: int
    size: int
    host: str
    hosts: list[str]

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]: ...

    def gather_json(self, value: Any, *, what: str) -> list[Any] | None: ...

    def barrier(self, what: str) -> None: ...


class RollCall:
    """One rank's part in the roll call: it answers and asks from the moment its `lines` have begun.

    standing: says what this rank does; a thread calls it, so it must neither call MPI nor wait.
    name: names a rank in messages, as "rank 1 (stage 1)".
    """

    def __init__(self, lines: Lines, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.standing: Callable[[], Standing] = Standing
        self.name: Callable[[int], str] = lambda rank: f"rank {rank}"
        self._lines = lines
        self._clock = clock
        self._ending: dict[int, int] = {}
        self._speaking: dict[int, float] = {}
        # A helper process that is forked must not keep the port of a rank that is gone.
        mine = weakref.ref(lines)
        os.register_at_fork(after_in_child=lambda: _forget(mine))
        self._thread = threading.Thread(target=self._serve, name="roll call", daemon=True)
        self._thread.start()

    def will_speak(self) -> None:
        """Tell all others that this rank is about to say why the job has to end."""
        self._lines.tell_all(Notice(rank=self._lines.rank, code=None))

    def farewell(self, code: int) -> None:
        """Tell all others that this rank ends the job with `code`, so that they do not take it for lost."""
        self._lines.tell_all(Notice(rank=self._lines.rank, code=code))

    def check_endings(self) -> None:
        """Raises FailedElsewhere when another rank has said that it ends the job."""
        for rank, code in list(self._ending.items()):
            raise FailedElsewhere(rank, code)

    def someone_speaks(self) -> bool:
        """Whether a lower rank has just said that it is about to speak."""
        now, mine = self._clock(), self._lines.rank
        return any(rank < mine and now - at < SPEAKS_FOR_S for rank, at in list(self._speaking.items()))

    def vigil(self) -> Vigil:
        """The questions of a long wait that begins."""
        return Vigil(self._lines, self.name, self._clock)

    def close(self) -> None:
        """Answer no more; for tests, as the rank of a job answers until its process has ended."""
        self._lines.close()
        self._thread.join()

    def _serve(self) -> None:
        # Signals are for the main thread, whose sleeps they end.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (heard := self._lines.listen()) is not None:
            packet, sender = heard
            if isinstance(packet, Question):
                answer = Answer(rank=self._lines.rank, serial=packet.serial, standing=self._own_standing())
                self._lines.answer(answer, sender)
            elif isinstance(packet, Notice) and packet.rank != self._lines.rank:
                if packet.code is None:
                    self._speaking[packet.rank] = self._clock()
                else:
                    self._ending[packet.rank] = packet.code

    def _own_standing(self) -> Standing:
        try:
            return self.standing()
        except Exception:
            # Names come from elsewhere: a bad one must not make this rank look lost.
            return Standing()


def convene(world: Gathering) -> tuple[RollCall | None, str | None]:
    """Let the ranks of `world` know how to ask each other; every rank calls it.

    The roll call, None where it cannot be had or there is one rank; and a remark for the user, usually None.
    """
    if world.size == 1:
        return None, None
    try:
        lines: Lines | None = Lines(world.rank, world.host)
        fault = None
    except OSError as error:
        lines, fault = None, str(error)
    roll = None if lines is None else RollCall(lines)
    offered = {"fault": fault, "entry": None if lines is None else lines.entry.as_json()}
    found = world.all_gather_json(offered, what="the addresses of all ranks")
    without = [rank for rank, each in enumerate(found) if each["entry"] is None]
    if lines is None or without:
        rank = without[0]
        return None, (
            f"rank {rank} on host {world.hosts[rank]} has no UDP socket ({found[rank]['fault']}): no rank can ask "
            "another what it does, and one that is lost is found after run.stall_abort_s"
        )
    lines.begin([Entry.from_json(each["entry"]) for each in found])
    if len({each["entry"]["host"] for each in found}) == 1:
        return roll, None
    world.barrier("all ranks to know each other's addresses")
    missing = world.gather_json(lines.greet(GREETING_S), what="the hosts that answer")
    return roll, None if missing is None else unheard(missing, world.hosts)


def unheard(missing: Sequence[Sequence[str]], hosts: Sequence[str]) -> str | None:
    """A remark on hosts that did not answer, `missing[rank]` not the rank on `hosts[rank]`; None when all did."""
    pairs = {tuple(sorted((hosts[rank], other))) for rank, others in enumerate(missing) for other in others}
    if not pairs:
        return None
    one, other = min(pairs)
    rest = len(pairs) - 1
    more = f", nor {'does 1 other pair' if rest == 1 else f'do {rest} other pairs'}" if rest else ""
    return (
        f"hosts {one} and {other} do not hear each other by UDP{more}: a rank that is lost there is found after "
        "run.stall_abort_s, not at once"
    )


def _forget(parent: weakref.ref[Lines]) -> None:
    lines = parent()
    if lines is not None:
        lines.forget()
