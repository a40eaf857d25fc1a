"""One rank's program where it owns several stages: their programs merged into one list that cannot deadlock.

The merge follows the unit clock, and never puts a receive before the send of another stage of the same rank
that it waits for. A rank that owns one stage runs that stage's program as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hpcpipe.schedule.actions import COMPUTES, RECEIVES, SENDS, Action, Op
from hpcpipe.schedule.clock import UnitClock
from hpcpipe.schedule.program import Schedule, StageProgram

Moment = tuple[int, int]
"""(first minibatch of the stretch, time on its unit clock)"""


def rank_actions(
    schedule: Schedule, stages: Sequence[int], *, after: int | None = None, sent: Sequence[Action] = ()
) -> Iterator[Action]:
    """The actions of the rank that owns `stages`, in the order it executes them.

    `sent` are sends of an earlier run that are repeated before the list begins.
    """
    if len(stages) == 1:
        return StageProgram(schedule, stages[0]).actions(after=after)
    return _merged(schedule, stages, after, sent)


def _merged(
    schedule: Schedule, stages: Sequence[int], after: int | None, sent: Sequence[Action]
) -> Iterator[Action]:
    clocks = _Clocks(schedule)
    lists = {k: StageProgram(schedule, k).actions(after=after) for k in stages}
    heads = {k: head for k in stages if (head := next(lists[k], None)) is not None}
    moments: dict[int, Moment] = {k: clocks.moment(head) or (schedule.first, 0) for k, head in heads.items()}
    arrived = {_message(action) for action in sent}
    while heads:
        ready = [k for k, head in heads.items() if not _waits(head, lists.keys(), arrived)]
        stage = min(ready, key=lambda k: (moments[k], k))
        action = heads[stage]
        if action.op in SENDS:
            arrived.add(_message(action))
        elif action.op in RECEIVES:
            arrived.discard(_awaited(action))
        yield action
        head = next(lists[stage], None)
        if head is None:
            del heads[stage]
        else:
            heads[stage] = head
            moments[stage] = max(moments[stage], clocks.moment(head) or moments[stage])


def _message(send: Action) -> tuple[Op, int, int, int]:
    return send.op, send.stage, send.minibatch, send.microbatch


def _awaited(receive: Action) -> tuple[Op, int, int, int]:
    return RECEIVES[receive.op], receive.peer, receive.minibatch, receive.microbatch


def _waits(head: Action, local: Collection[int], arrived: set[tuple[Op, int, int, int]]) -> bool:
    return head.op in RECEIVES and head.peer in local and _awaited(head) not in arrived


class _Clocks:
    """When an action happens on the unit clock of its stretch; evaluations wait for stage 0's update."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._by_length: dict[int, UnitClock] = {}

    def moment(self, action: Action) -> Moment | None:
        """None for an action that takes its time from the one before it."""
        if action.op not in COMPUTES and action.op not in RECEIVES:
            return None
        first, last = self._schedule.segment(action.minibatch)
        clock = self._by_length.get(last - first)
        if clock is None:
            clock = self._by_length[last - first] = self._schedule.clock(last - first)
        j, i = action.minibatch - first, action.microbatch
        if action.op in (Op.EVALUATE, Op.RECEIVE_EVALUATION):
            return first, clock.start(0, Op.BACKWARD, j, self._schedule.microbatches - 1) + 1
        forward = action.op in (Op.FORWARD, Op.RECEIVE_ACTIVATION)
        return first, clock.start(action.stage, Op.FORWARD if forward else Op.BACKWARD, j, i)
