"""One rank's program where it owns several stages: their programs merged into one list that cannot deadlock.

The merge follows the unit clock of the whole pipeline, which sets every action behind all that it waits for, so
the lists of all ranks are parts of one order that could be executed as it is. A rank that owns one replica of one
stage runs that replica's program unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import pairwise

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Action, Op, Place
from hpcpipe.schedule.program import Schedule, StageProgram

Moment = tuple[int, int, bool, int]
"""(first minibatch of the stretch, evaluations so far, in an evaluation?, time)"""
_FORWARD_SIDE = frozenset({Op.FORWARD, Op.RECEIVE_ACTIVATION})
_BACKWARD_SIDE = frozenset({Op.BACKWARD, Op.RECEIVE_GRADIENT})
_EVALUATION_SIDE = frozenset({Op.EVALUATE, Op.RECEIVE_EVALUATION})


def spread(stages: int, ranks: int) -> list[list[int]]:
    """Deal `stages` out to `ranks` in contiguous runs, as evenly as can be, longer ones first.

    Raises ConfigError if a rank would own no stage.
    """
    if not 1 <= ranks <= stages:
        raise ConfigError(f"{stages} stages can be spread over 1 to {stages} ranks, got {ranks}")
    size, longer = divmod(stages, ranks)
    starts = [rank * size + min(rank, longer) for rank in range(ranks + 1)]
    return [list(range(start, end)) for start, end in pairwise(starts)]


def checked_groups(schedule: Schedule, groups: Sequence[Sequence[Place]] | None) -> tuple[tuple[Place, ...], ...]:
    """The places of each rank, one each in the schedule's own order if `groups` is None.

    Raises ConfigError unless every place is on one rank and every rank has one, and only one where any stage has
    several replicas.
    """
    if groups is None:
        return tuple((place,) for place in schedule.places)
    found = tuple(tuple(Place(*place) for place in places) for places in groups)
    if sorted(place for places in found for place in places) != list(schedule.places) or not all(found):
        raise ConfigError(
            f"ranks must own each of the {schedule.ranks} replicas of stages 0 to {schedule.stages - 1} once, "
            f"got {[[tuple(place) for place in places] for places in found]}"
        )
    if schedule.replicated and len(found) != schedule.ranks:
        raise ConfigError(f"replicated stages need a rank for each of {schedule.ranks} replicas, got {len(found)}")
    return found


def rank_actions(schedule: Schedule, places: Sequence[Place], *, after: int | None = None) -> Iterator[Action]:
    """The actions of the rank that owns `places`, in the order it executes them.

    With `after=k` only those behind U(k) of every stage; activations that the cut says to resend go before. A rank
    owns several places only where no stage is replicated.
    """
    if len(places) == 1:
        return StageProgram(schedule, *places[0]).actions(after=after)
    timed = [_timed(schedule, place, after) for place in sorted(places)]
    return (action for _, action in merge(*timed, key=_moment))


def _moment(timed: tuple[Moment, Action]) -> Moment:
    return timed[0]


def _timed(schedule: Schedule, place: Place, after: int | None) -> Iterator[tuple[Moment, Action]]:
    """The program of `place`, each action with its moment; what takes no time happens when it can.

    An evaluation waits for the update of stage 0, of which the clock knows nothing, so whatever a stage does
    behind its n-th evaluation is set behind that of all stages. Messages stay in order: a minibatch goes forward
    behind as many evaluations as at the stage before or more, and backward behind the same number everywhere.
    """
    first, evaluations, evaluating, time = schedule.first, 0, False, 0
    for action in StageProgram(schedule, *place).actions(after=after):
        if action.op in _EVALUATION_SIDE:
            evaluating, time = True, place.stage + action.microbatch
        elif action.op in _FORWARD_SIDE or action.op in _BACKWARD_SIDE:
            if evaluating:
                evaluating, evaluations = False, evaluations + 1
            first, last = schedule.segment(action.minibatch)
            op = Op.FORWARD if action.op in _FORWARD_SIDE else Op.BACKWARD
            time = schedule.clock(last - first).start(place.stage, op, action.minibatch - first, action.microbatch)
        yield (first, evaluations, evaluating, time), action
