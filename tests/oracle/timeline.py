"""Who does what when in asynchronous 1F1B if a pass takes one tick: a simulation, tick by tick, of the whole run.

Written from PipeDream's description alone, as an oracle for hpcpipe.schedule, of which it uses nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """`kind` is "F" or "B"; it takes the tick from `start` to `start` + 1."""

    start: int
    stage: int
    kind: str
    minibatch: int


def passes_of_stage(stage: int, stages: int, minibatches: int) -> list[tuple[str, int]]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(stages - 1 - stage, minibatches)
    order = [("F", j) for j in range(warm_up)]
    for j in range(minibatches - warm_up):
        order += [("F", j + warm_up), ("B", j)]
    return order + [("B", j) for j in range(minibatches - warm_up, minibatches)]


def simulate(stages: int, minibatches: int) -> list[Pass]:
    """All passes in order of time, stages of one tick in order of number."""
    waiting = [passes_of_stage(stage, stages, minibatches) for stage in range(stages)]
    ended: dict[tuple[int, str, int], int] = {}
    done: list[Pass] = []
    tick = 0
    while any(waiting):
        starting = []
        for stage, order in enumerate(waiting):
            if not order:
                continue
            kind, j = order[0]
            source = stage - 1 if kind == "F" else stage + 1
            if not 0 <= source < stages or ended.get((source, kind, j), tick + 1) <= tick:
                starting.append(Pass(tick, stage, kind, j))
        for started in starting:
            waiting[started.stage].pop(0)
            ended[started.stage, started.kind, started.minibatch] = tick + 1
        done += starting
        tick += 1
        assert tick < 10 * (minibatches + stages) + 10, "the simulation does not end"
    return done


def updates_before_return(passes: list[Pass], stage: int, minibatch: int) -> int:
    """Updates that `stage` ends strictly before B(`minibatch`) starts at stage 0; U ends with its B."""
    returned = next(p.start for p in passes if (p.stage, p.kind, p.minibatch) == (0, "B", minibatch))
    return sum(1 for p in passes if p.stage == stage and p.kind == "B" and p.start + 1 < returned)
