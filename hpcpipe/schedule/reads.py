"""Which weight version each pass of a stretch reads, how far ahead it predicts, and when a version is over.

Counted in rounds of the stretch: version n holds n rounds of this stage. Section 3.3 of PipeDream (SOSP'19) for
the policies, SpecTrain (arXiv 1809.02839) for the aim of predictions. It never knows an order of passes.
"""

from __future__ import annotations

from hpcpipe.schedule.clock import UnitClock
from hpcpipe.schedule.policies import Policy, Target, keeps_forward_weights
from hpcpipe.schedule.schedule import Schedule, warm_up_of


class Reads:
    """What the passes of one stage read in the stretch of minibatches [first, last).

    `label` turns a number of rounds into the version's label: the first minibatch that it does not hold.
    `consistent`: forwards read the version that their minibatch found at stage 0, and not the newest. `keeps`:
    backwards read what their forwards read, and not the newest.
    """

    def __init__(self, schedule: Schedule, stage: int, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.length = schedule.round_length(stage)
        self.rounds = -((first - last) // self.length)
        self._stage = stage
        self._warm_up = warm_up_of(schedule, stage)
        self.consistent = not schedule.synchronous and schedule.policy is Policy.VERTICAL_SYNC
        self.keeps = not schedule.synchronous and keeps_forward_weights(schedule.policy)
        self._entry_length = schedule.round_length(0)
        self._entry_warm_up = warm_up_of(schedule, 0)
        self._clock: UnitClock | None = None
        # Without predictions nobody asks how far they look, and the clock costs a simulation.
        if schedule.predicts and schedule.target is Target.ROUND_TRIP:
            self._clock = schedule.clock(last - first)

    def label(self, rounds: int) -> int:
        """The version that holds `rounds` rounds of this stretch."""
        return min(self.first + rounds * self.length, self.last)

    def round_of(self, minibatch: int) -> int:
        """The round that `minibatch` belongs to."""
        return (minibatch - self.first) // self.length

    def forward(self, minibatch: int) -> int:
        """Rounds in the version that F(minibatch) reads or predicts from."""
        if not self.consistent:
            held = (minibatch - self.first) // self.length - self._warm_up
            return held if held > 0 else 0
        # The newest version here that holds only minibatches that the one found at stage 0 holds, too.
        found = max(0, (minibatch - self.first) // self._entry_length - self._entry_warm_up)
        return found * self._entry_length // self.length

    def backward(self, minibatch: int) -> int:
        """Rounds in the version that B(minibatch) reads or predicts from."""
        return self.forward(minibatch) if self.keeps else (minibatch - self.first) // self.length

    def aim(self, minibatch: int) -> int:
        """Rounds in the version at which predictions for both passes of `minibatch` aim."""
        if self._clock is None:
            return (minibatch - self.first) // self.length
        return self._clock.updates_before_return(self._stage, minibatch - self.first)


class Releases:
    """The versions that are over at each update of one replica, asked for in the order of its updates.

    No forward reads an older version than the next backward, nor a newer one than the last backward unless it is
    the newest there is, so the replica's own backwards say which versions are still needed. They read no older
    version than the one before, so what is not read by the next is read no more. A version that no backward reads
    is over at the update that follows it.
    """

    def __init__(self, reads: Reads, replica: int) -> None:
        self._reads = reads
        self._own = range(reads.first + replica, reads.last, reads.length)
        self._never = reads.rounds + 1
        # What the backward of the round asked for next reads, and what the first does that may read a new version.
        self._round, self._read = 0, self._read_in(0)
        self._reader, self._wanted = 0, self._read

    def at(self, round_: int) -> tuple[int, ...]:
        """Labels of the versions that nothing reads behind the update that ends `round_`."""
        read = self._read if self._round == round_ else self._read_in(round_)
        behind = round_ + 1
        self._round, self._read = behind, self._read_in(behind)
        if self._reader < behind:
            self._reader, self._wanted = behind, self._read
        while self._wanted < round_:
            self._reader += 1
            self._wanted = self._read_in(self._reader)
        label = self._reads.label
        over = (label(read),) if read < round_ and self._read != read else ()
        return over if self._wanted == round_ else (*over, label(round_))

    def _read_in(self, round_: int) -> int:
        """Rounds in the version that the replica's backward of `round_` reads; more than there are without one."""
        return self._reads.backward(self._own[round_]) if round_ < len(self._own) else self._never
