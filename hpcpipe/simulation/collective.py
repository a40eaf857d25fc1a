"""What the replicas of a stage do together, in time: all-reduces in buckets, and plain meetings.

A bucket of gradients is ready at a replica in the course of its last backward pass before the all-reduce. Buckets
go one after the other, each when all replicas have it and its ports are free, as in PyTorch's DDP
(arXiv 2006.15704). It computes times that its caller asks for and moves no rank itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcpipe.simulation.network import Port


class Meeting:
    """A barrier of `size` ranks that ends `seconds` after the last has come."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._come = 0
        self._latest = 0.0

    def come(self, now: float) -> float | None:
        """One more is there at `now`: when the meeting ends, if it was the last."""
        self._come += 1
        self._latest = max(self._latest, now)
        if self._come < self._size:
            return None
        ends = self._latest + self._seconds
        self._come, self._latest = 0, 0.0
        return ends


class Reduction:
    """The all-reduces of one stage, a round at a time.

    `ready_s[b]`: seconds from the start of a backward pass until bucket b is ready. `bucket_s[b]`: seconds of its
    all-reduce, during which it occupies `ports` of the topology's level `level`. `nbytes`: of all buckets.
    `busy` counts the seconds, `rounds` the rounds that are done; `latest` is when the bucket that was started last
    starts and ends, `minibatch` one of its round.
    """

    def __init__(
        self,
        *,
        size: int,
        ready_s: Sequence[float],
        bucket_s: Sequence[float],
        ports: Sequence[Port],
        level: int,
        nbytes: int,
    ) -> None:
        self.busy = 0.0
        self.rounds = 0
        self.latest = 0.0, 0.0
        self.minibatch = 0
        self.size = size
        self.level = level
        self.nbytes = nbytes
        self._ready_s = ready_s
        self._bucket_s = bucket_s
        self._ports = ports
        self._known = 0
        self._begun = 0.0
        self._floor = 0.0
        self._bucket = 0

    def begun(self, when: float) -> float | None:
        """A replica starts its last backward pass: when the first bucket is ready, once all replicas are known."""
        self._begun = max(self._begun, when)
        return self._one_more()

    def idle(self, when: float) -> float | None:
        """A replica has come to the all-reduce without a backward pass in this round; returns as `begun` does."""
        self._floor = max(self._floor, when)
        return self._one_more()

    def go(self, now: float) -> tuple[float, bool]:
        """Start the next bucket at `now` or when the ports are free.

        Returns when the bucket after it can start, and False; or the end of the last one, and True.
        """
        start = max(now, max((port.free for port in self._ports), default=0.0))
        seconds = self._bucket_s[self._bucket]
        ends = start + seconds
        for port in self._ports:
            port.free = ends
            port.busy += seconds
        self.busy += seconds
        self.latest = start, ends
        self._bucket += 1
        if self._bucket < len(self._bucket_s):
            return max(ends, self._ready()), False
        self.rounds += 1
        self._known, self._bucket = 0, 0
        self._begun = self._floor = 0.0
        return ends, True

    def _one_more(self) -> float | None:
        self._known += 1
        return self._ready() if self._known == self.size else None

    def _ready(self) -> float:
        return max(self._floor, self._begun + self._ready_s[self._bucket])
