"""Sums of a flat tensor over the replicas of a stage, bucket by bucket while gradients are still being computed.

    ready(b)      device: fetch bucket b, event  --+
    progress()    event passed, b is next in order +--> start MPI's sum --> done: restore b
    finish()      wait until all are done

It owns the requests of one round at a time and allocates nothing in it. MPI matches sums by the order in which
they start, so that buckets start strictly in the order in which they were given, whatever order they become ready
in. It never divides by the number of replicas, and knows no gradient and no minibatch. It serves the replicated
stages of PipeDream's 1F1B-RR, with the buckets of data-parallel training.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import Event, InPlace
from hpcpipe.transport.wait import PATIENT_YIELDING_S, Condition, Request, Waiter

SUMMED = (torch.float32, torch.float64)


class Adder(Protocol):
    """Starts sums over all replicas; `Members` is one."""

    def summation(self, address: int, count: int, itemsize: int) -> Callable[[], Request]: ...


class BucketReduce:
    """The all-reduce of one flat tensor, round after round; `StageGroup.reducer` makes it.

    A round is `begin`, `ready` once for every bucket, `finish`; `progress` may be called at any time. In between,
    the tensor belongs to it: a bucket that is ready must not be touched until `finish` returns.

    adder: starts the sums; nobody else may start anything on its communicator.
    memory: how MPI reaches the tensor.
    flat: the tensor of shape (n,), float32 or float64.
    buckets: ranges of elements (start, stop) that do not overlap, in the order in which they are summed.
    limit: the most elements in one MPI call.
    peers: the ranks that sum with this one.
    """

    def __init__(
        self,
        adder: Adder,
        memory: InPlace,
        waiter: Waiter,
        flat: Tensor,
        buckets: Sequence[tuple[int, int]],
        *,
        limit: int,
        peers: Sequence[int] = (),
    ) -> None:
        self._peers = peers
        self._memory = memory
        self._waiter = waiter
        self._buckets = list(buckets)
        itemsize = flat.element_size()
        self._pieces = [
            [
                _Piece(at, end, adder.summation(memory.address + at * itemsize, end - at, itemsize))
                for at, end in _cut(start, stop, limit)
            ]
            for start, stop in self._buckets
        ]
        self._thread = threading.get_ident()
        self._open = False
        self._is_ready = bytearray(len(self._buckets))
        self._events: list[Event | None] = [None] * len(self._buckets)
        self._next = 0
        self._flying: deque[_Piece] = deque()

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def begin(self) -> None:
        """Open a round. Raises TransportError while another is open."""
        if self._open:
            raise TransportError(f"{self._waiter.subject()}: a round of sums began before the last one had ended")
        self._open = True
        self._next = 0
        for bucket in range(len(self._buckets)):
            self._is_ready[bucket] = False

    def ready(self, bucket: int) -> None:
        """The contents of a bucket are final: its sum starts as soon as all earlier buckets have started.

        It may be called from a thread of autograd, where it calls no MPI: the next `progress` starts the sum.

        Raises TransportError outside of a round, and for a bucket that was ready before.
        """
        if not self._open:
            raise TransportError(f"{self._waiter.subject()}: {self._name(bucket)} is ready outside of a round")
        if self._is_ready[bucket]:
            raise TransportError(f"{self._waiter.subject()}: {self._name(bucket)} became ready twice in a round")
        self._events[bucket] = self._memory.fetch(*self._buckets[bucket])
        self._is_ready[bucket] = True
        if threading.get_ident() == self._thread:
            self.progress()

    def progress(self) -> None:
        """Start what can start and take what has arrived; never waits."""
        while self._next < len(self._buckets) and self._is_ready[self._next]:
            event = self._events[self._next]
            if event is not None and not event.query():
                break
            self._events[self._next] = None
            for piece in self._pieces[self._next]:
                piece.request = piece.start_sum()
                self._flying.append(piece)
            self._next += 1
        while self._flying:
            piece = self._flying[0]
            if piece.request is not None and not piece.request.Test():
                break
            piece.request = None
            self._flying.popleft()
            self._memory.restore(piece.start, piece.stop)

    def finish(self, what: Callable[[], str] | str) -> None:
        """Wait for the sums of all buckets, and close the round; work queued from now on sees them in the tensor.

        what: names the round in messages, as "the all-reduce of stage 1, minibatch 7".

        Raises TransportError when a bucket never became ready, outside of a round, or when the waiter gives up.
        """
        if not self._open or not all(self._is_ready):
            never = "it" if not self._open else self._name(self._is_ready.index(False))
            said = what if isinstance(what, str) else what()
            wrong = "began" if not self._open else "became ready"
            raise TransportError(f"{self._waiter.subject()} ends {said}: {never} never {wrong}")
        if not self._done():
            self._waiter.wait(
                [Condition(self._done)],
                what,
                kind="all-reduce",
                peers=self._peers,
                yielding_s=PATIENT_YIELDING_S,
            )
        self._open = False

    @property
    def left(self) -> str | None:
        """The first bucket of a round that is open and has buckets ready, in words: its sum may have started."""
        if not self._open or not any(self._is_ready):
            return None
        return self._name(self._is_ready.index(True))

    def _done(self) -> bool:
        self.progress()
        return self._next == len(self._buckets) and not self._flying

    def _name(self, bucket: int) -> str:
        start, stop = self._buckets[bucket]
        return f"bucket {bucket} (elements {start} to {stop})"


class _Piece:
    """The elements of one MPI call; `request` is there while it is on its way."""

    __slots__ = ("request", "start", "start_sum", "stop")

    def __init__(self, start: int, stop: int, start_sum: Callable[[], Request]) -> None:
        self.start = start
        self.stop = stop
        self.start_sum = start_sum
        self.request: Request | None = None


def check(flat: Tensor, buckets: Sequence[tuple[int, int]]) -> None:
    """Raises TransportError for a tensor that cannot be summed in place, and for buckets that do not fit it."""
    if flat.dtype not in SUMMED or flat.dim() != 1 or not flat.is_contiguous():
        raise TransportError(
            f"sums over replicas need a contiguous float32 or float64 tensor of one dimension, not {flat.dtype} "
            f"{tuple(flat.shape)}"
        )
    before = 0
    for start, stop in sorted(buckets):
        if not before <= start <= stop <= flat.numel():
            raise TransportError(
                f"the bucket of elements {start} to {stop} overlaps another one or is not in the {flat.numel()} "
                "elements of the tensor"
            )
        before = stop


def _cut(start: int, stop: int, limit: int) -> list[tuple[int, int]]:
    return [(at, min(at + limit, stop)) for at in range(start, stop, limit)]
