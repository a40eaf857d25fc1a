"""What a checkpoint at the cut "after U(k) on every stage" must hold, read off the stages' programs.

Every stage passes the cut at its own time; nobody drains. What is in flight there, which versions coming passes
will still read, and which activations have been sent but not yet consumed all follow from the actions behind
U(k), so nothing here knows which schedule it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcpipe.schedule.actions import Action, Op
from hpcpipe.schedule.program import Schedule, StageProgram


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The state of one stage at the cut after U(`minibatch`).

    `in_flight`: minibatches that have gone forward but not yet backward, in order.
    `versions`: live weight versions, the newest (minibatch+1) last.
    `resend`: minibatches whose activations the next stage has not consumed at its own cut.
    """

    stage: int
    minibatch: int
    in_flight: tuple[int, ...]
    versions: tuple[int, ...]
    resend: tuple[int, ...]


def _first_forward(schedule: Schedule, stage: int, minibatch: int) -> int:
    """The first minibatch that goes forward behind U(minibatch); the end of the run if none does."""
    _, last = schedule.segment(minibatch)
    for action in StageProgram(schedule, stage).actions(after=minibatch):
        if action.op is Op.FORWARD:
            return min(action.minibatch, last)
        if action.minibatch >= last:
            break
    return last


def _readers(schedule: Schedule, stage: int, minibatch: int) -> Iterator[Action]:
    """Passes behind the cut, until both kinds read versions that do not exist yet."""
    beyond: set[Op] = set()
    for action in StageProgram(schedule, stage).actions(after=minibatch):
        if action.op in (Op.FORWARD, Op.BACKWARD):
            yield action
            if action.version > minibatch:
                beyond.add(action.op)
            if len(beyond) == 2:
                return


def cut_at(schedule: Schedule, stage: int, minibatch: int) -> StageCut:
    """The state of `stage` at the cut after U(`minibatch`)."""
    mine = _first_forward(schedule, stage, minibatch)
    following = _first_forward(schedule, stage + 1, minibatch) if stage + 1 < schedule.stages else mine
    read = {action.version for action in _readers(schedule, stage, minibatch)}
    newest = minibatch + 1
    return StageCut(
        stage=stage,
        minibatch=minibatch,
        in_flight=tuple(range(newest, mine)),
        versions=(*sorted(v for v in read if v < newest), newest),
        resend=tuple(range(following, mine)),
    )
