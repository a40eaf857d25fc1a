"""The unit clock: when each pass starts if F = B = 1 and updates and transfers take no time.

Prediction distances are counted on this clock, never on measured times, so they are the same on every machine
and in every run. A long run is not simulated whole: between its fill and its drain a schedule repeats, so the
clock is run over just enough minibatches to hold the fill, a stretch of steady state and the drain.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from hpcpipe.schedule.actions import Op
from hpcpipe.schedule.orders import Step, order_named


def start_times(orders: list[list[Step]]) -> list[dict[Step, int]]:
    """Start time of every F and B of every stage; `orders[k]` is the order of stage k.

    F(j) waits for F(j) of the stage before, B(j) for B(j) of the stage after, everything for the stage's own
    previous pass. Raises RuntimeError if the orders wait for each other in a circle.
    """
    stages = len(orders)
    start: list[dict[Step, int]] = [{} for _ in orders]
    free_at = [0] * stages
    position = [0] * stages
    moving = set(range(stages))
    while moving:
        stage = moving.pop()
        order = orders[stage]
        moved = False
        while position[stage] < len(order):
            step = order[position[stage]]
            op = step[0]
            if op is not Op.UPDATE:
                source = stage - 1 if op is Op.FORWARD else stage + 1
                ready = 0
                if 0 <= source < stages:
                    if step not in start[source]:
                        break
                    ready = start[source][step] + 1
                start[stage][step] = max(ready, free_at[stage])
                free_at[stage] = start[stage][step] + 1
                moved = True
            position[stage] += 1
        if moved:
            moving.update(k for k in (stage - 1, stage + 1) if 0 <= k < stages)
    stuck = [k for k in range(stages) if position[k] < len(orders[k])]
    if stuck:
        raise RuntimeError(f"the schedule deadlocks at stages {stuck}")
    return start


class UnitClock:
    """Start times of one fill-to-drain stretch of `minibatches` minibatches, numbered from 0.

    Steady state repeats with one minibatch as its period once the fill is over, so a stretch longer than
    `simulated` minibatches is looked up in a simulation of `simulated` ones.
    """

    def __init__(self, *, schedule: str, stages: int, minibatches: int, microbatches: int = 1) -> None:
        # Fill and drain each touch fewer than N minibatches; look-ahead touches fewer than N/2 more.
        self._margin = 2 * stages + 2
        self.simulated = min(minibatches, 2 * self._margin + 2)
        self._minibatches = minibatches
        order = order_named(schedule)
        self._orders = [list(order(k, stages, 0, self.simulated, microbatches, None)) for k in range(stages)]
        self._start = start_times(self._orders)
        self._updates_end = [self._ends_of_updates(k) for k in range(stages)]
        steady = self._margin
        self._period = (
            self._start[0][Op.BACKWARD, steady + 1, 0] - self._start[0][Op.BACKWARD, steady, 0]
            if self.simulated > steady + 1
            else 0
        )

    def _fold(self, minibatch: int) -> int:
        """The simulated minibatch that stands for `minibatch`."""
        left = self._minibatches - minibatch
        if left <= self._margin:
            return self.simulated - left
        return min(minibatch, self._margin)

    def start(self, stage: int, op: Op, minibatch: int, microbatch: int = 0) -> int:
        """Start of F or B of `minibatch` at `stage`, in passes since the stretch began."""
        folded = self._fold(minibatch)
        return self._start[stage][op, folded, microbatch] + (minibatch - folded) * self._period

    def updates_before_return(self, stage: int, minibatch: int) -> int:
        """Updates of this stretch that `stage` ends strictly before B(minibatch) starts at stage 0."""
        folded = self._fold(minibatch)
        returned = self._start[0][Op.BACKWARD, folded, 0]
        return bisect_left(self._updates_end[stage], returned) + (minibatch - folded)

    def _ends_of_updates(self, stage: int) -> list[int]:
        ends, now = [], 0
        for step in self._orders[stage]:
            if step[0] is Op.UPDATE:
                ends.append(now)
            else:
                now = self._start[stage][step] + 1
        return ends


@lru_cache(maxsize=64)
def unit_clock(schedule: str, stages: int, minibatches: int, microbatches: int) -> UnitClock:
    """The clock of these numbers, simulated once: every stage and every resumed program asks for the same few."""
    return UnitClock(schedule=schedule, stages=stages, minibatches=minibatches, microbatches=microbatches)
