"""The unit clock: when each pass starts if F = B = 1 and updates and transfers take no time.

Prediction distances are counted on this clock, never on measured times, so they are the same on every machine
and in every run. A long run is not simulated whole: between its fill and its drain a schedule repeats, so the
clock is run over just enough minibatches to hold the fill, a stretch of steady state and the drain.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import lcm

from hpcpipe.schedule.actions import Op
from hpcpipe.schedule.orders import SYNCHRONOUS, Share, Step, order_named

# An attribute of an Enum takes longer than the rest of what is done for a pass.
FORWARD, UPDATE = Op.FORWARD, Op.UPDATE
_NOT_YET = -1


class Times:
    """When the passes of all stages end, each 1 after its start, and when their updates have been made.

    `forward[k][j * microbatches + i]` is the end of F of microbatch i of minibatch j at stage k, `backward` of B;
    `updated[k][n]` the end of update n of stage k.
    """

    def __init__(self, stages: int, minibatches: int, microbatches: int) -> None:
        blank = array("i", [_NOT_YET]) * (minibatches * microbatches)
        self.forward = [blank[:] for _ in range(stages)]
        self.backward = [blank[:] for _ in range(stages)]
        self.updated = [array("i") for _ in range(stages)]
        self.microbatches = microbatches

    def start(self, stage: int, op: Op, minibatch: int, microbatch: int = 0) -> int:
        """Start of F or B of a microbatch at `stage`."""
        ends = self.forward if op is FORWARD else self.backward
        return ends[stage][minibatch * self.microbatches + microbatch] - 1


def timed(orders: Sequence[Sequence[Iterable[Step]]], minibatches: int, microbatches: int) -> Times:
    """Times of all stages; `orders[k][q]` is the order of replica q of stage k.

    F(j) waits for F(j) of the stage before, B(j) for B(j) of the stage after, an update for all replicas of its
    stage, everything for the replica's own previous pass. Raises RuntimeError if the orders wait for each other in
    a circle.
    """
    times = Times(len(orders), minibatches, microbatches)
    stage_of: dict[Iterator[bool], int] = {}
    for stage, replicas in enumerate(orders):
        come: list[int] = []
        for order in replicas:
            stage_of[_replica(order, times, stage, come, len(replicas))] = stage
    # Forwards go on from stage to stage in a sweep towards the loss, backwards in the one that comes back.
    running = list(stage_of)
    while running:
        moved = [next(replica, None) for replica in running]
        if not any(moved) and None not in moved:
            raise RuntimeError(f"the schedule deadlocks at stages {sorted({stage_of[r] for r in running})}")
        if None in moved:
            running = [replica for replica, state in zip(running, moved, strict=True) if state is not None]
        running.reverse()
    return times


def _replica(order: Iterable[Step], times: Times, stage: int, come: list[int], replicas: int) -> Iterator[bool]:
    """Do the steps of one replica; whenever it must wait, tell whether it has moved since the last time.

    `come` are the times at which the stage's `replicas` replicas have come to the update that is next.
    """
    forward, backward, updated = times.forward[stage], times.backward[stage], times.updated[stage]
    last = stage == len(times.forward) - 1
    # The inputs are there from the beginning, and the last stage makes its gradients of its own outputs.
    activations: Sequence[int] = times.forward[stage - 1] if stage else bytes(len(forward))
    gradients = forward if last else times.backward[stage + 1]
    width = times.microbatches
    free, rounds, moved = 0, 0, False
    for op, j, i in order:
        if op is UPDATE:
            come.append(free)
            if len(come) == replicas:
                updated.append(max(come))
                come.clear()
            while len(updated) == rounds:
                yield moved
                moved = False
            free = updated[rounds]
            rounds += 1
        else:
            at = j * width + i
            source, ends = (activations, forward) if op is FORWARD else (gradients, backward)
            while (there := source[at]) == _NOT_YET:
                yield moved
                moved = False
            free = ends[at] = (there if there > free else free) + 1
        moved = True


def simulate(schedule: str, replicas: tuple[int, ...], minibatches: int, microbatches: int) -> Times:
    """Times of a whole stretch of `minibatches`, numbered from 0."""
    order = order_named(schedule)
    orders = [
        [
            order(
                Share(
                    stage=stage,
                    replica=replica,
                    replicas=replicas,
                    first=0,
                    last=minibatches,
                    microbatches=microbatches,
                )
            )
            for replica in range(count)
        ]
        for stage, count in enumerate(replicas)
    ]
    return timed(orders, minibatches, microbatches)


class UnitClock:
    """Start times of one fill-to-drain stretch of `minibatches` minibatches, numbered from 0.

    `replicas` are the numbers of replicas of all stages. Once the fill is over, all times repeat with a period of
    some common multiple of the stages' rounds, so a stretch longer than `simulated` minibatches is looked up in a
    simulation of `simulated` ones.
    """

    def __init__(
        self, *, schedule: str, replicas: tuple[int, ...], minibatches: int, microbatches: int = 1
    ) -> None:
        self._minibatches = minibatches
        self._rounds = (1,) * len(replicas) if schedule in SYNCHRONOUS else replicas
        # In flight are fewer minibatches than ranks and a round, so no pass waits for one, nor looks ahead to one,
        # that is further away than this.
        self._reach = 2 * sum(self._rounds) + 4 * max(self._rounds)
        common = lcm(*self._rounds)
        self._steady, self._period, self._passed = minibatches, 1, 0
        self._counts: dict[int, Sequence[int]] = {}
        for multiple in range(1, minibatches + 2):
            self._period = multiple * common
            self._steady = self._reach + self._period - common
            length = self._steady + self._period + 2 * self._reach
            length += (minibatches - length) % self._period
            self.simulated = min(minibatches, length)
            self._times = simulate(schedule, replicas, self.simulated, microbatches)
            if self.simulated == minibatches or self._repeats():
                break

    def start(self, stage: int, op: Op, minibatch: int, microbatch: int = 0) -> int:
        """Start of F or B of `minibatch` at `stage`, in passes since the stretch began."""
        folded = self._fold(minibatch)
        passed = (minibatch - folded) // self._period * self._passed
        return self._times.start(stage, op, folded, microbatch) + passed

    def updates_before_return(self, stage: int, minibatch: int) -> int:
        """Updates of this stretch that `stage` ends strictly before B(minibatch) starts at stage 0.

        But at least those that come before the pass itself: where replicas behind stage 0 send it gradients at
        once, B(minibatch) starts there in the very moment in which the update before it ends.
        """
        counts = self._counts.get(stage) or self._count(stage)
        if self.simulated == self._minibatches:
            return counts[minibatch]
        folded = self._fold(minibatch)
        return counts[folded] + (minibatch - folded) // self._rounds[stage]

    def _count(self, stage: int) -> Sequence[int]:
        """`updates_before_return` of all simulated minibatches; only of a stage that is asked for."""
        times, length, updated = self._times, self._rounds[stage], self._times.updated[stage].tolist()
        returned = times.backward[0][:: times.microbatches]
        counts = array("i", [bisect_left(updated, end - 1, j // length) for j, end in enumerate(returned)])
        self._counts[stage] = counts
        return counts

    def _fold(self, minibatch: int) -> int:
        """The simulated minibatch that stands for `minibatch`."""
        if self.simulated == self._minibatches:
            return minibatch
        left = self._minibatches - minibatch
        if left <= self._reach:
            return self.simulated - left
        if minibatch < self._steady:
            return minibatch
        return self._steady + (minibatch - self._steady) % self._period

    def _repeats(self) -> bool:
        """Whether all times are later by the same after one period, for long enough that they always will be."""
        width = self._times.microbatches
        begin, period, span = self._steady * width, self._period * width, self._reach * width
        later = {
            after - before
            for ends in (*self._times.forward, *self._times.backward)
            for before, after in zip(
                ends[begin : begin + span], ends[begin + period : begin + period + span], strict=True
            )
        }
        self._passed = min(later)
        return len(later) == 1


@lru_cache(maxsize=64)
def unit_clock(schedule: str, replicas: tuple[int, ...], minibatches: int, microbatches: int) -> UnitClock:
    """The clock of these numbers, simulated once: every stage and every resumed program asks for the same few."""
    return UnitClock(schedule=schedule, replicas=replicas, minibatches=minibatches, microbatches=microbatches)
