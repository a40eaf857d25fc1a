"""Where each rank of a simulation is: its clock, its memory, its messages, what it waits for.

A rank holds a lane for each stage that it executes. Nothing here moves by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcpipe.schedule import Action, Op
from hpcpipe.simulation.collective import Meeting, Reduction
from hpcpipe.simulation.costs import StageCosts
from hpcpipe.simulation.network import Port

Inbox = dict[int, float]
"""Arrival of each message that is under way or not yet received, by its number."""


class Rank:
    """One rank in the course of its actions. `now` is its own time, `held` the bytes it holds, `peak` their most.

    `waits_in` and `waits_for` name the message it is blocked on, `blocked` the action that it has not ended;
    `pending` is a send that lets others go first. `marks` are (time, busy seconds) at two updates.
    """

    __slots__ = (
        "actions",
        "blocked",
        "busy",
        "held",
        "index",
        "lanes",
        "marks",
        "now",
        "peak",
        "pending",
        "waits_for",
        "waits_in",
    )

    def __init__(self, index: int, lanes: dict[int, Lane]) -> None:
        self.index = index
        self.lanes = lanes
        self.actions: Iterator[Action] = iter(())
        self.now = 0.0
        self.busy = 0.0
        self.held = self.peak = sum(lane.costs.static_bytes + lane.costs.version_bytes for lane in lanes.values())
        self.waits_in: Inbox | None = None
        self.waits_for = 0
        self.blocked: Action | None = None
        self.pending: tuple[Action, Route] | None = None
        self.marks: dict[int, tuple[float, float]] = {}


class Lane:
    """One replica of one stage at its rank: its costs, what has arrived for it, and the routes to its neighbours.

    `closing`: the backward pass that comes next is the last before an all-reduce. `known`: the all-reduce knows
    when that pass began. `reduced_at`: when the all-reduce was done, if before the replica came to it.
    """

    __slots__ = (
        "activations",
        "average",
        "backward_s",
        "closing",
        "collect",
        "costs",
        "evaluations",
        "forward_s",
        "gradients",
        "known",
        "rank",
        "reduced_at",
        "reduction",
        "replica",
        "saved_bytes",
        "stage",
        "to_activations",
        "to_evaluations",
        "to_gradients",
        "update_s",
        "version_bytes",
        "waits_for_reduction",
    )

    rank: Rank

    def __init__(self, stage: int, replica: int, costs: StageCosts) -> None:
        self.stage = stage
        self.replica = replica
        self.costs = costs
        self.forward_s = costs.forward_s
        self.backward_s = costs.backward_s
        self.update_s = costs.update_s
        self.saved_bytes = costs.saved_bytes
        self.version_bytes = costs.version_bytes
        self.activations: Inbox = {}
        self.gradients: Inbox = {}
        self.evaluations: Inbox = {}
        self.to_activations: dict[int, Route] = {}
        self.to_gradients: dict[int, Route] = {}
        self.to_evaluations: dict[int, Route] = {}
        self.reduction: Reduction | None = None
        self.average: Meeting | None = None
        self.collect: Meeting | None = None
        self.closing = False
        self.known = False
        self.waits_for_reduction = False
        self.reduced_at: float | None = None


@dataclass(slots=True)
class Route:
    """The way of one kind of message from one lane to another, and how many have gone."""

    to: Rank
    inbox: Inbox
    level: int
    nbytes: int
    seconds: float
    latency_s: float
    egress: Port
    ingress: Port | None
    shared: bool
    messages: int = field(default=0)


def foreseen(actions: Iterator[Action], lane: Lane) -> Iterator[Action]:
    """The same actions; `lane.closing` is set when a backward pass comes out that no other follows before R.

    Its gradients are on their way before the pass is over, so it must be known as the last when it begins.
    """
    held: deque[Action] = deque()
    for action in actions:
        op = action.op
        if op is Op.BACKWARD:
            yield from held
            held.clear()
            held.append(action)
        elif not held:
            yield action
        elif op is Op.SEND_GRADIENT:
            held.append(action)
        else:
            lane.closing = op is Op.REDUCE
            yield from held
            held.clear()
            yield action
    yield from held
