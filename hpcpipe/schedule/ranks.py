"""One rank's program where it owns several stages: their programs merged into one list that cannot deadlock.

The merge follows the unit clock of the whole pipeline, which sets every action behind all that it waits for, so
the lists of all ranks are parts of one order that could be executed as it is. A rank that owns one stage runs
that stage's program unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import pairwise

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Action, Op
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


def rank_actions(schedule: Schedule, stages: Sequence[int], *, after: int | None = None) -> Iterator[Action]:
    """The actions of the rank that owns `stages`, in the order it executes them.

    With `after=k` only those behind U(k) of every stage; activations that the cut says to resend go before.
    """
    if len(stages) == 1:
        return StageProgram(schedule, stages[0]).actions(after=after)
    timed = [_timed(schedule, stage, after) for stage in sorted(stages)]
    return (action for _, action in merge(*timed, key=_moment))


def _moment(timed: tuple[Moment, Action]) -> Moment:
    return timed[0]


def _timed(schedule: Schedule, stage: int, after: int | None) -> Iterator[tuple[Moment, Action]]:
    """The program of `stage`, each action with its moment; what takes no time happens when it can.

    An evaluation waits for the update of stage 0, of which the clock knows nothing, so whatever a stage does
    behind its n-th evaluation is set behind that of all stages. Messages stay in order: a minibatch goes forward
    behind as many evaluations as at the stage before or more, and backward behind the same number everywhere.
    """
    first, evaluations, evaluating, time = schedule.first, 0, False, 0
    for action in StageProgram(schedule, stage).actions(after=after):
        if action.op in _EVALUATION_SIDE:
            evaluating, time = True, stage + action.microbatch
        elif action.op in _FORWARD_SIDE or action.op in _BACKWARD_SIDE:
            if evaluating:
                evaluating, evaluations = False, evaluations + 1
            first, last = schedule.segment(action.minibatch)
            op = Op.FORWARD if action.op in _FORWARD_SIDE else Op.BACKWARD
            time = schedule.clock(last - first).start(stage, op, action.minibatch - first, action.microbatch)
        yield (first, evaluations, evaluating, time), action
