"""Replicas of one stage in one process: threads instead of ranks, sums in the order of the replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Made = TypeVar("Made")
PATIENCE_S = 30.0


class Table:
    """Where the replicas lay down what they bring, and meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.brought: list[object] = [None] * size

    def exchange(self, index: int, mine: object) -> list[object]:
        """What everybody brings, by replica."""
        self.brought[index] = mine
        self.barrier.wait(PATIENCE_S)
        everything = list(self.brought)
        self.barrier.wait(PATIENCE_S)
        return everything


class FakeGroup:
    """As `transport.group.StageGroup`; `log` is where its all-reduce notes what becomes ready."""

    def __init__(self, table: Table, index: int) -> None:
        self.stage = 0
        self.size = table.size
        self.index = index
        self.log: list[str] = []
        self.sums: FakeSums | None = None
        self._table = table

    def gather(self, row: npt.NDArray[np.float64], what: str) -> npt.NDArray[np.float64]:
        assert row.dtype == np.float64
        assert row.ndim == 1
        return np.array(self._table.exchange(self.index, row.copy()))

    def average(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        everything = self._table.exchange(self.index, [tensor.clone() for tensor in tensors])
        return [
            torch.stack([t.double() for t in alike]).mean(0).to(alike[0].dtype)
            if alike[0].is_floating_point()
            else alike[0].clone()
            for alike in zip(*everything, strict=True)
        ]

    def reducer(self, flat: Tensor, buckets: Sequence[tuple[int, int]]) -> FakeSums:
        alike = self._table.exchange(self.index, (flat.shape, flat.dtype, list(buckets)))
        assert all(form == alike[0] for form in alike)
        self.sums = FakeSums(self._table, self.index, flat, buckets, self.log)
        return self.sums


class FakeSums:
    """As `transport.reduce.BucketReduce`; takes a copy of each bucket when it is ready, so a late write shows."""

    def __init__(
        self, table: Table, index: int, flat: Tensor, buckets: Sequence[tuple[int, int]], log: list[str]
    ) -> None:
        self.flat = flat
        self.buckets = list(buckets)
        self.threads: set[int] = set()
        self._table = table
        self._index = index
        self._log = log
        self._taken: dict[int, Tensor] | None = None

    def begin(self) -> None:
        assert self._taken is None
        self._taken = {}

    def ready(self, bucket: int) -> None:
        assert self._taken is not None
        assert bucket not in self._taken
        start, stop = self.buckets[bucket]
        self._taken[bucket] = self.flat[start:stop].clone()
        self._log.append(f"bucket {bucket}")

    def progress(self) -> None:
        assert self._taken is not None
        self.threads.add(threading.get_ident())

    def finish(self, what: str) -> None:
        assert self._taken is not None
        assert sorted(self._taken) == list(range(len(self.buckets)))
        everything = self._table.exchange(self._index, self._taken)
        for bucket, (start, stop) in enumerate(self.buckets):
            total = everything[0][bucket].clone()
            for taken in everything[1:]:
                total += taken[bucket]
            self.flat[start:stop] = total
        self._taken = None


def together(size: int, work: Callable[[FakeGroup], Made]) -> list[Made]:
    """What `work` returns at each of `size` replicas, each in a thread of its own."""
    table = Table(size)

    def alone(index: int) -> Made:
        torch.set_num_threads(1)
        try:
            return work(FakeGroup(table, index))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(alone, index) for index in range(size)]
    failed = [error for run in runs if (error := run.exception()) is not None]
    for error in failed:
        # The others only report that the barrier was broken.
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [run.result() for run in runs]
