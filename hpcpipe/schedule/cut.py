"""What a checkpoint at the cut "after U(k) on every stage" must hold, read off the replicas' programs.

Every replica passes the cut at its own time; nobody drains, and a schedule that flushes anyway has nothing in
flight. What is in flight in others, which versions coming passes will still read, and which activations have been
sent but not yet consumed all follow from the actions behind U(k), so nothing here knows an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcpipe.schedule.actions import Action, Op, Place
from hpcpipe.schedule.program import Schedule, StageProgram


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """The state of one replica of one stage at the cut after U(`minibatch`).

    `in_flight`: minibatches that have gone forward but not yet backward at this replica, in order.
    `versions`: live weight versions, the newest (minibatch+1) last.
    `resend`: minibatches whose activations the next stage has not consumed at its own cut.
    """

    stage: int
    replica: int = 0
    minibatch: int
    in_flight: tuple[int, ...]
    versions: tuple[int, ...]
    resend: tuple[int, ...]


def _first_forward(schedule: Schedule, place: Place, minibatch: int) -> int:
    """The first minibatch of the stretch that goes forward behind U(minibatch); the stretch's end if none does."""
    _, last = schedule.segment(minibatch)
    for action in StageProgram(schedule, *place).actions(after=minibatch):
        if action.op is Op.FORWARD:
            return min(action.minibatch, last)
        if action.minibatch >= last:
            break
    return last


def _readers(schedule: Schedule, place: Place, minibatch: int) -> Iterator[Action]:
    """Passes behind the cut, until both kinds read versions that do not exist yet."""
    beyond: set[Op] = set()
    for action in StageProgram(schedule, *place).actions(after=minibatch):
        if action.op in (Op.FORWARD, Op.BACKWARD):
            yield action
            if action.version > minibatch:
                beyond.add(action.op)
            if len(beyond) == 2:
                return


def cut_at(schedule: Schedule, stage: int, minibatch: int, replica: int = 0) -> StageCut:
    """The state of replica `replica` of `stage` at the cut after U(`minibatch`).

    Raises ValueError if `minibatch` is no boundary of the schedule.
    """
    if not schedule.is_boundary(minibatch):
        raise ValueError(f"a run cannot be cut after U({minibatch}), where some stage is amid a round")
    newest = minibatch + 1
    in_flight: list[int] = []
    resend: list[int] = []
    read: set[int] = set()
    if not schedule.synchronous:
        mine = _first_forward(schedule, Place(stage, replica), minibatch)
        in_flight = [j for j in range(newest, mine) if schedule.owner(stage, j) == replica]
        read = {action.version for action in _readers(schedule, Place(stage, replica), minibatch)}
    if in_flight and stage + 1 < schedule.stages:
        owners = {j: Place(stage + 1, schedule.owner(stage + 1, j)) for j in in_flight}
        consumed = {place: _first_forward(schedule, place, minibatch) for place in set(owners.values())}
        resend = [j for j in in_flight if j >= consumed[owners[j]]]
    return StageCut(
        stage=stage,
        replica=replica,
        minibatch=minibatch,
        in_flight=tuple(in_flight),
        versions=(*sorted(version for version in read if version < newest), newest),
        resend=tuple(resend),
    )
