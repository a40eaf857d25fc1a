"""Who does what when in asynchronous 1F1B if a pass takes one tick: a simulation, tick by tick, of the whole run.

Written from PipeDream's description alone, as an oracle for hpcpipe.schedule, of which it uses nothing. A stage
may have several replicas, which take the minibatches in turn and update together, once per round (1F1B-RR).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """`kind` is "F" or "B"; it takes the tick from `start` to `start` + 1."""

    start: int
    stage: int
    kind: str
    minibatch: int
    replica: int = 0


Step = tuple[str, int]
"""("F" or "B", minibatch), or ("U", round)."""


def warm_up(stage: int, replicas: Sequence[int]) -> int:
    """Forwards that each replica of `stage` runs before its first backward."""
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def steps_of(stage: int, replica: int, replicas: Sequence[int], minibatches: int) -> list[Step]:
    """Warm-up forwards, then a forward and a backward in turn, an update behind each backward; then the rest."""
    own = list(range(replica, minibatches, replicas[stage]))
    ahead = warm_up(stage, replicas)
    order: list[Step] = [("F", j) for j in own[:ahead]]
    for turn in range(-(-minibatches // replicas[stage])):
        order += [("F", j) for j in own[turn + ahead : turn + ahead + 1]]
        order += [("B", j) for j in own[turn : turn + 1]]
        order.append(("U", turn))
    return order


class _Simulation:
    def __init__(self, replicas: Sequence[int], minibatches: int) -> None:
        self.replicas = replicas
        self.minibatches = minibatches
        self.waiting = {
            (stage, replica): steps_of(stage, replica, replicas, minibatches)
            for stage, count in enumerate(replicas)
            for replica in range(count)
        }
        self.ended: dict[tuple[int, str, int], int] = {}

    def updated(self, stage: int, turn: int, tick: int) -> bool:
        """Whether all backwards of a round have ended by `tick`."""
        first = turn * self.replicas[stage]
        whole = range(first, min(first + self.replicas[stage], self.minibatches))
        return all(self.ended.get((stage, "B", j), tick + 1) <= tick for j in whole)

    def ready(self, stage: int, kind: str, j: int, tick: int) -> bool:
        source = stage - 1 if kind == "F" else stage + 1
        return not 0 <= source < len(self.replicas) or self.ended.get((source, kind, j), tick + 1) <= tick

    def tick(self, now: int) -> list[Pass]:
        starting = []
        for (stage, replica), order in self.waiting.items():
            while order and order[0][0] == "U" and self.updated(stage, order[0][1], now):
                order.pop(0)
            if order and order[0][0] != "U" and self.ready(stage, *order[0], now):
                kind, j = order.pop(0)
                starting.append(Pass(now, stage, kind, j, replica))
        for started in starting:
            self.ended[started.stage, started.kind, started.minibatch] = now + 1
        return starting


def simulate(replicas: Sequence[int], minibatches: int) -> list[Pass]:
    """All passes in order of time, stages of one tick in order of number; `replicas` of each stage."""
    simulation = _Simulation(replicas, minibatches)
    done: list[Pass] = []
    tick = 0
    while any(simulation.waiting.values()):
        done += simulation.tick(tick)
        tick += 1
        assert tick < 10 * (minibatches + sum(replicas)) + 10, "the simulation does not end"
    return done


def updates_before_return(passes: list[Pass], stage: int, minibatch: int, replicas: Sequence[int]) -> int:
    """Updates that `stage` ends strictly before B(`minibatch`) starts at stage 0.

    U ends with the last B of its round, which is whole but at the end of the run.
    """
    returned = next(p.start for p in passes if (p.stage, p.kind, p.minibatch) == (0, "B", minibatch))
    ends: dict[int, int] = {}
    for p in passes:
        if p.stage == stage and p.kind == "B":
            turn = p.minibatch // replicas[stage]
            ends[turn] = max(ends.get(turn, 0), p.start + 1)
    return sum(1 for end in ends.values() if end < returned)
