"""The order of forwards, backwards and updates at one stage: the only place that knows what a schedule is.

Each order is a generator of `(op, minibatch, microbatch)` over minibatches first..last-1, which may start after
the update of a given minibatch, as a resumed run does. Sources: PipeDream (SOSP'19, figure 8) for `pipedream`,
GPipe (arXiv 1811.06965) for `gpipe`, PipeDream-Flush / DAPPLE for `1f1b`.

    pipedream, 4 stages           stage 0  F0 F1 F2 F3 B0 F4 B1 F5 B2 ...
    (no flush)                    stage 3           F0 B0 F1 B1 F2 B2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcpipe.errors import ConfigError
from hpcpipe.schedule.actions import Op
from hpcpipe.schedule.policies import warm_up

Step = tuple[Op, int, int]
"""(op, minibatch, microbatch); the microbatch of an update is 0."""
Order = Callable[[int, int, int, int, int, "int | None"], Iterator[Step]]
"""(stage, stages, first, last, microbatches, after) -> steps; `after=k` starts behind U(k)."""


def pipedream(
    stage: int, stages: int, first: int, last: int, microbatches: int, after: int | None
) -> Iterator[Step]:
    """Asynchronous 1F1B: w warm-up forwards, then F and B+U in turn, then the last w backwards."""
    w = warm_up(stage, stages)
    if after is None:
        for j in range(first, min(first + w, last)):
            yield Op.FORWARD, j, 0
    for j in range(first if after is None else after + 1, last):
        if j + w < last:
            yield Op.FORWARD, j + w, 0
        yield Op.BACKWARD, j, 0
        yield Op.UPDATE, j, 0


def gpipe(stage: int, stages: int, first: int, last: int, microbatches: int, after: int | None) -> Iterator[Step]:
    """All forwards of a minibatch, then all its backwards, then one update."""
    for j in range(first if after is None else after + 1, last):
        for i in range(microbatches):
            yield Op.FORWARD, j, i
        for i in range(microbatches):
            yield Op.BACKWARD, j, i
        yield Op.UPDATE, j, 0


def one_f_one_b(
    stage: int, stages: int, first: int, last: int, microbatches: int, after: int | None
) -> Iterator[Step]:
    """Synchronous 1F1B: as `pipedream` within a minibatch's microbatches, with a flush before the update."""
    w = min(warm_up(stage, stages), microbatches)
    for j in range(first if after is None else after + 1, last):
        for i in range(w):
            yield Op.FORWARD, j, i
        for i in range(microbatches):
            if i + w < microbatches:
                yield Op.FORWARD, j, i + w
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
