"""Runs complete action lists without computing anything: messages, deadlock, unit time and depths of rings.

Sends never block here unless rings are given; a receive waits for its message, which must be the next one on its
channel; what the replicas of a stage do together waits for them all. This module knows how actions wait for each
other, never which version or minibatch is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcpipe.schedule.actions import BARRIERS, COMPUTES, RECEIVES, SENDS, Action, Op, Place


class Channel(NamedTuple):
    """The messages of one kind from one place to another."""

    source: Place
    destination: Place
    kind: str


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
    F = B = E = 1 and all else takes no time. `update_ends`: on the same clock, per place, in order.
    """

    messages: dict[Channel, int]
    held: dict[Channel, int]
    under_way: dict[Channel, int]
    start: dict[Pass, int]
    update_ends: dict[Place, list[int]]


def channel_of(action: Action) -> Channel:
    """The channel of a send or a receive."""
    here, there = action.place, action.peer_place
    return (
        Channel(here, there, _KINDS[action.op]) if action.op in SENDS else Channel(there, here, _KINDS[action.op])
    )


def by_place(lists: Sequence[Sequence[Action]], places: Sequence[Place]) -> dict[Place, list[Action]]:
    """The same actions, one list for each of `places`.

    Raises ScheduleError for an action at another place and for a place on two ranks.
    """
    projected: dict[Place, list[Action]] = {place: [] for place in places}
    owner: dict[tuple[int, int], int] = {}
    at = {(place.stage, place.replica): actions for place, actions in projected.items()}
    for rank, actions in enumerate(lists):
        for action in actions:
            place = action.stage, action.replica
            if place not in at:
                raise ScheduleError(f"the schedule has {len(places)} places, this is none of them", action=action)
            if owner.setdefault(place, rank) != rank:
                raise ScheduleError(f"rank {rank} has an action of rank {owner[place]}'s", action=action)
            at[place].append(action)
    return projected


def dry_run(lists: Sequence[Sequence[Action]], *, depths: Mapping[Channel, int] | None = None) -> Traffic:
    """Run one list a rank to the end.

    With `depths`, a send waits while that many messages of its channel are not let go of by the consumer; between
    stages of one rank nothing waits, as nothing is sent. Raises ScheduleError for a deadlock, for a message that
    is not received or comes out of order, for a consumer that lets go of messages out of order, and for replicas
    that meet for different things.
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
        self._rank_of = {
            Place(*place): rank
            for rank, actions in enumerate(lists)
            for place in {(action.stage, action.replica) for action in actions}
        }
        self._replicas: dict[int, list[int]] = {}
        for place, rank in sorted(self._rank_of.items()):
            self._replicas.setdefault(place.stage, []).append(rank)
        self._position = [0] * len(lists)
        self._now = [0] * len(lists)
        self._knowledge = [[0] * len(lists) for _ in lists]
        self._queues: dict[Channel, deque[tuple[Action, int, list[int]]]] = {}
        self._held: dict[Channel, deque[Label]] = {}
        self._came_on: dict[tuple[str, int, int, Label], Channel] = {}
        self._let_go_at: dict[Channel, list[int]] = {}
        self._channels: dict[tuple[Op, int, int, int], Channel] = {}
        self._messages: dict[Channel, int] = {}
        self._most_held: dict[Channel, int] = {}
        self._most_under_way: dict[Channel, int] = {}
        self._start: dict[Pass, int] = {}
        self._update_ends: dict[Place, list[int]] = {}

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
            waits = "; ".join(f"{action} waits for {self._waits_for(action)}" for action in stuck)
            raise ScheduleError(f"deadlock: {waits}", action=stuck[0])
        for channel, queue in self._queues.items():
            if queue:
                raise ScheduleError(f"{channel.destination} never receives what it sends", action=queue[0][0])
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
            for kind in (
                (EVALUATION,) if op is Op.EVALUATE else (ACTIVATION, GRADIENT) if op is Op.BACKWARD else ()
            ):
                self._let_go(rank, kind, action)
        elif op is Op.UPDATE:
            self._update_ends.setdefault(action.place, []).append(self._now[rank])
        elif op in BARRIERS:
            return self._meet(rank, action)
        return True

    def _meet(self, rank: int, action: Action) -> bool:
        """Whether all replicas of the stage are there; the last one to come takes the others along."""
        ranks = self._replicas[action.stage]
        for other in ranks:
            theirs = self._next(other)
            if theirs is None or theirs.op not in BARRIERS:
                return False
            if theirs[:4] != action[:4]:
                raise ScheduleError(f"it meets {theirs}", action=action)
        for other in ranks:
            self._knowledge[other][other] = self._position[other]
        now = max(self._now[other] for other in ranks)
        known = [max(column) for column in zip(*(self._knowledge[other] for other in ranks), strict=True)]
        for other in ranks:
            self._now[other] = now
            self._knowledge[other] = known.copy()
            if other != rank:
                self._position[other] += 1
        return True

    def _next(self, rank: int) -> Action | None:
        """The action that `rank` is about to execute."""
        actions, position = self._lists[rank], self._position[rank]
        return actions[position] if position < len(actions) else None

    def _waits_for(self, action: Action) -> str:
        if action.op not in BARRIERS:
            return str(action.peer_place)
        absent = [
            str(place)
            for place, rank in sorted(self._rank_of.items())
            if place.stage == action.stage and ((theirs := self._next(rank)) is None or theirs.op not in BARRIERS)
        ]
        return ", ".join(absent)

    def _channel(self, action: Action) -> Channel:
        key = action.op, action.stage, action.replica, action.peer_replica
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
        consumer = self._rank_of.get(channel.destination)
        if consumer is None:
            raise ScheduleError(f"no rank owns {channel.destination}, to which it sends", action=action)
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
            raise ScheduleError(f"the next message of {channel.source} is {sent}", action=action)
        self._now[rank] = max(self._now[rank], when)
        self._knowledge[rank] = list(map(max, self._knowledge[rank], knowledge))
        held = self._held[channel]
        label = action.minibatch, action.microbatch
        held.append(label)
        self._came_on[channel.kind, action.stage, action.replica, label] = channel
        self._most_held[channel] = max(self._most_held.get(channel, 0), len(held))
        return True

    def _let_go(self, rank: int, kind: str, action: Action) -> None:
        """A pass that reads a message restored from a checkpoint has none to let go of."""
        label = action.minibatch, action.microbatch
        channel = self._came_on.pop((kind, action.stage, action.replica, label), None)
        if channel is None:
            return
        if self._held[channel].popleft() != label:
            raise ScheduleError(f"it lets go of its {kind} before that of an earlier message", action=action)
        self._let_go_at[channel].append(self._position[rank])
