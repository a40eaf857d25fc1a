"""The order of forwards, backwards and updates at one replica of a stage: the only place that knows a schedule.

Each order is a generator of `(op, minibatch, microbatch)` over one stretch of minibatches, which may start after
the update of a given minibatch, as a resumed run does. Sources: PipeDream (SOSP'19, figure 8, and 1F1B-RR in
section 3.2) for `pipedream`, GPipe (arXiv 1811.06965) for `gpipe`, PipeDream-Flush / DAPPLE for `1f1b`.

    pipedream, 4 stages           stage 0  F0 F1 F2 F3 B0 F4 B1 F5 B2 ...
    (no flush)                    stage 3           F0 B0 F1 B1 F2 B2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Op
from hpcpipe.schedule.policies import warm_up

Step = tuple[Op, int, int]
"""(op, minibatch, microbatch); an update is labelled by the last minibatch of its round, microbatch 0."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What decides the steps of one replica of one stage in the stretch of minibatches [first, last).

    `replicas` are the numbers of replicas of all stages. `after=k` starts behind U(k), which ends a round.
    """

    stage: int
    replica: int
    replicas: tuple[int, ...]
    first: int
    last: int
    microbatches: int = 1
    after: int | None = None


Order = Callable[[Share], Iterator[Step]]


def pipedream(share: Share) -> Iterator[Step]:
    """Asynchronous 1F1B: w warm-up forwards, then F and B+U in turn, then the last w backwards.

    The minibatches are dealt out to the replicas in turn; every round of one minibatch each ends in one update by
    all replicas, also by one for which the last round has no minibatch left.
    """
    first, last, r = share.first, share.last, share.replicas[share.stage]
    own = range(first + share.replica, last, r)
    w = warm_up(share.stage, share.replicas)
    begun = 0 if share.after is None else (share.after - first) // r + 1
    if share.after is None:
        for j in own[:w]:
            yield Op.FORWARD, j, 0
    for m in range(begun, -((first - last) // r)):
        if m + w < len(own):
            yield Op.FORWARD, own[m + w], 0
        if m < len(own):
            yield Op.BACKWARD, own[m], 0
        yield Op.UPDATE, min(first + (m + 1) * r, last) - 1, 0


def gpipe(share: Share) -> Iterator[Step]:
    """All forwards of a minibatch, then all its backwards, then one update.

    The microbatches of each minibatch are dealt out to the replicas in turn.
    """
    own = range(share.replica, share.microbatches, share.replicas[share.stage])
    for j in range(share.first if share.after is None else share.after + 1, share.last):
        for i in own:
            yield Op.FORWARD, j, i
        for i in own:
            yield Op.BACKWARD, j, i
        yield Op.UPDATE, j, 0


def one_f_one_b(share: Share) -> Iterator[Step]:
    """Synchronous 1F1B: as `pipedream` within a minibatch's microbatches, with a flush before the update."""
    own = range(share.replica, share.microbatches, share.replicas[share.stage])
    w = min(warm_up(share.stage, share.replicas), len(own))
    for j in range(share.first if share.after is None else share.after + 1, share.last):
        for i in own[:w]:
            yield Op.FORWARD, j, i
        for m, i in enumerate(own):
            if m + w < len(own):
                yield Op.FORWARD, j, own[m + w]
            yield Op.BACKWARD, j, i
        yield Op.UPDATE, j, 0


ORDERS: dict[str, Order] = {"pipedream": pipedream, "gpipe": gpipe, "1f1b": one_f_one_b}
SYNCHRONOUS = frozenset({"gpipe", "1f1b"})
"""Schedules that flush before every update: exact SGD, no staleness."""


def order_named(name: str) -> Order:
    """The order called `name`. Raises ConfigError naming the known ones."""
    try:
        return ORDERS[name]
    except KeyError:
        raise ConfigError(f"unknown schedule {name!r}: choose one of {', '.join(ORDERS)}") from None
