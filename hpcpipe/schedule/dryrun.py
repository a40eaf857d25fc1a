"""Runs complete action lists without computing anything: messages, deadlock, unit time and depths of rings.

Sends never block here unless rings are given; a receive waits for its message, which must be the next one on its
channel. This module knows how actions wait for each other, never which version or minibatch is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcpipe.schedule.actions import COMPUTES, RECEIVES, SENDS, Action, Op

Channel = tuple[int, int, str]
"""(source stage, destination stage, kind of message)"""
Label = tuple[int, int]
"""(minibatch, microbatch)"""
Pass = tuple[Op, int, int, int]
"""(F, B or E, stage, minibatch, microbatch)"""

ACTIVATION, GRADIENT, EVALUATION = "activation", "gradient", "evaluation"
_KINDS = {
    Op.SEND_ACTIVATION: ACTIVATION,
    Op.RECEIVE_ACTIVATION: ACTIVATION,
    Op.SEND_GRADIENT: GRADIENT,
    Op.RECEIVE_GRADIENT: GRADIENT,
    Op.SEND_EVALUATION: EVALUATION,
    Op.RECEIVE_EVALUATION: EVALUATION,
}


class ScheduleError(RuntimeError):
    """A schedule that cannot be executed or does not do what it says; names stage and action.

    A bug of hpcpipe, never of its user, so it is no UserError.
    """

    def __init__(self, what: str, *, stage: int | None = None, action: Action | None = None) -> None:
        self.stage = action.stage if action is not None else stage
        self.action = action
        super().__init__(f"{action}: {what}" if action is not None else what)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a dry run has seen.

    `messages`: number of messages per channel. `held`: the most that the consumer has received and not let go of
    at once; it keeps an activation and a gradient until its B, an evaluation input until its E. `under_way`: the
    most that can be sent and not let go of at once, whatever the timing. `start`: when each pass starts if
    F = B = E = 1 and all else takes no time. `update_ends`: on the same clock, per stage, in order.
    """

    messages: dict[Channel, int]
    held: dict[Channel, int]
    under_way: dict[Channel, int]
    start: dict[Pass, int]
    update_ends: dict[int, list[int]]


def channel_of(action: Action) -> Channel:
    """The channel of a send or a receive."""
    ends = (action.stage, action.peer) if action.op in SENDS else (action.peer, action.stage)
    return (*ends, _KINDS[action.op])


def by_stage(lists: Sequence[Sequence[Action]], stages: int) -> list[list[Action]]:
    """The same actions, one list a stage. Raises ScheduleError for a stage out of range or on two ranks."""
    projected: list[list[Action]] = [[] for _ in range(stages)]
    owner: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if not 0 <= action.stage < stages:
                raise ScheduleError(f"there is no such stage among {stages}", action=action)
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"rank {rank} has an action of rank {owner[action.stage]}'s", action=action)
            projected[action.stage].append(action)
    return projected


def dry_run(lists: Sequence[Sequence[Action]], *, depths: Mapping[Channel, int] | None = None) -> Traffic:
    """Run one list a rank to the end.

    With `depths`, a send waits while that many messages of its channel are not let go of by the consumer; between
    stages of one rank nothing waits, as nothing is sent. Raises ScheduleError for a deadlock, for a message that
    is not received or comes out of order, and for a consumer that lets go of messages out of order.
    """
    run = _Run(lists, depths)
    moving = set(range(len(lists)))
    while moving:
        rank = moving.pop()
        if run.advance(rank):
            moving.update(other for other in range(len(lists)) if other != rank)
    return run.finish()


class _Run:
    """The state of one dry run; knowledge[r][q] is how many actions of rank q have surely happened for rank r."""

    def __init__(self, lists: Sequence[Sequence[Action]], depths: Mapping[Channel, int] | None) -> None:
        self._lists = lists
        self._depths = depths
        self._rank_of = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
        self._position = [0] * len(lists)
        self._now = [0] * len(lists)
        self._knowledge = [[0] * len(lists) for _ in lists]
        self._queues: dict[Channel, deque[tuple[Action, int, list[int]]]] = {}
        self._held: dict[Channel, deque[Label]] = {}
        self._let_go_at: dict[Channel, list[int]] = {}
        self._channels: dict[tuple[Op, int], Channel] = {}
        self._messages: dict[Channel, int] = {}
        self._most_held: dict[Channel, int] = {}
        self._most_under_way: dict[Channel, int] = {}
        self._start: dict[Pass, int] = {}
        self._update_ends: dict[int, list[int]] = {}

    def advance(self, rank: int) -> bool:
        """Execute what `rank` can; whether that was anything."""
        actions, before = self._lists[rank], self._position[rank]
        while self._position[rank] < len(actions) and self._execute(rank, actions[self._position[rank]]):
            self._position[rank] += 1
        return self._position[rank] > before

    def finish(self) -> Traffic:
        stuck = [
            actions[position]
            for actions, position in zip(self._lists, self._position, strict=True)
            if position < len(actions)
        ]
        if stuck:
            waits = "; ".join(f"{action} waits for stage {action.peer}" for action in stuck)
            raise ScheduleError(f"deadlock: {waits}", action=stuck[0])
        for channel, queue in self._queues.items():
            if queue:
                raise ScheduleError(f"stage {channel[1]} never receives what it sends", action=queue[0][0])
        return Traffic(
            messages=self._messages,
            held=self._most_held,
            under_way=self._most_under_way,
            start=self._start,
            update_ends=self._update_ends,
        )

    def _execute(self, rank: int, action: Action) -> bool:
        op = action.op
        if op in SENDS:
            return self._send(rank, action)
        if op in RECEIVES:
            return self._receive(rank, action)
        if op in COMPUTES:
            self._start[op, action.stage, action.minibatch, action.microbatch] = self._now[rank]
            self._now[rank] += 1
            for channel in _lets_go(action):
                self._let_go(rank, channel, action)
        elif op is Op.UPDATE:
            self._update_ends.setdefault(action.stage, []).append(self._now[rank])
        return True

    def _channel(self, action: Action) -> Channel:
        key = action.op, action.stage
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = channel_of(action)
            self._queues.setdefault(channel, deque())
            self._held.setdefault(channel, deque())
            self._let_go_at.setdefault(channel, [])
            self._messages.setdefault(channel, 0)
        return channel

    def _send(self, rank: int, action: Action) -> bool:
        channel = self._channel(action)
        consumer = self._rank_of.get(channel[1])
        if consumer is None:
            raise ScheduleError(f"no rank owns stage {channel[1]}, to which it sends", action=action)
        sent, let_go = self._messages[channel], self._let_go_at[channel]
        if self._depths is not None and consumer != rank and sent - len(let_go) >= self._depths.get(channel, 0):
            return False
        knowledge = self._knowledge[rank]
        knowledge[rank] = self._position[rank] + 1
        surely_free = bisect_left(let_go, knowledge[consumer])
        self._most_under_way[channel] = max(self._most_under_way.get(channel, 0), sent + 1 - surely_free)
        self._messages[channel] = sent + 1
        self._queues[channel].append((action, self._now[rank], knowledge.copy()))
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        channel = self._channel(action)
        queue = self._queues[channel]
        if not queue:
            return False
        sent, when, knowledge = queue.popleft()
        if (sent.minibatch, sent.microbatch) != (action.minibatch, action.microbatch):
            raise ScheduleError(f"the next message of stage {channel[0]} is {sent}", action=action)
        self._now[rank] = max(self._now[rank], when)
        self._knowledge[rank] = list(map(max, self._knowledge[rank], knowledge))
        held = self._held[channel]
        held.append((action.minibatch, action.microbatch))
        self._most_held[channel] = max(self._most_held.get(channel, 0), len(held))
        return True

    def _let_go(self, rank: int, channel: Channel, action: Action) -> None:
        """A pass that reads a message restored from a checkpoint has none to let go of."""
        held = self._held.get(channel)
        label = action.minibatch, action.microbatch
        if not held or label not in held:
            return
        if held.popleft() != label:
            raise ScheduleError(f"it lets go of its {channel[2]} before that of an earlier message", action=action)
        self._let_go_at[channel].append(self._position[rank])


def _lets_go(action: Action) -> Iterator[Channel]:
    """The channels of which a pass lets a message go when it is done."""
    stage = action.stage
    if action.op is Op.BACKWARD:
        yield stage - 1, stage, ACTIVATION
        yield stage + 1, stage, GRADIENT
    elif action.op is Op.EVALUATE:
        yield stage - 1, stage, EVALUATION
