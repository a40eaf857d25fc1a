"""What makes one rank one of several that share a stage: their gradients become one sum before each update.

    B of a replica    hook: gradient -> its place in the flat sum -> bucket full: all-reduce begins
    R (every round)   gather losses, control words, presence; wait for all buckets

It owns the flat buffer that gradients are summed in, and fills it while autograd is still at work, so that the
all-reduce of the last layers overlaps the backward of the first (PipeDream, SOSP'19, section 3.2, with the buckets
of data-parallel training). It never divides by the number of minibatches and never decides when a round ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcpipe.engine.weights import WeightStore
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.transport.group import StageGroup

Row = npt.NDArray[np.float64]
_BITS = 32
"""Bits of presence in each number of a row; a float64 holds integers of up to 53."""


class Buckets:
    """The slots of a layout in parts of about `bucket_bytes`, from the last slot to the first.

    That is about the order in which a backward pass makes gradients. A slot is never split, so a larger one is a
    bucket of its own. `ranges` are (first element, last + 1) of each bucket; together they cover the whole buffer.
    """

    def __init__(self, layout: FlatLayout, bucket_bytes: int) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.of_slot: list[int] = [0] * len(layout.slots)
        wanted = max(1, bucket_bytes // layout.dtype.itemsize)
        end = layout.numel
        for index in reversed(range(len(layout.slots))):
            start = layout.slots[index].offset
            self.of_slot[index] = len(self.ranges)
            if end - start >= wanted or index == 0:
                self.ranges.append((start, end))
                end = start

    def sizes(self) -> list[int]:
        """Number of slots in each bucket."""
        return [self.of_slot.count(bucket) for bucket in range(len(self.ranges))]


class Replicas:
    """One replica of a stage: its part of the round's gradients, and what it exchanges with the others.

    The gradients of every backward pass on the weights of `weights` go through here. `between` is called after
    each of them, for whoever wants to look after messages meanwhile.

    gradients: behind `reduce`, one per slot: the sum over all passes of the round on all replicas, None where no
        pass had one. Views of one buffer, valid until the next backward pass.
    """

    def __init__(
        self,
        group: StageGroup,
        weights: WeightStore,
        *,
        bucket_bytes: int,
        device: torch.device,
        between: Callable[[], None],
    ) -> None:
        layout = weights.layout
        self.gradients: list[Tensor | None] = [None] * len(layout.slots)
        self._group = group
        self._between = between
        self._flat = layout.allocate(device)
        self._views = layout.view_list(self._flat)
        buckets = Buckets(layout, bucket_bytes)
        self._bucket_of = buckets.of_slot
        self._slots_in = buckets.sizes()
        self._sums = group.reducer(self._flat, buckets.ranges)
        self._present = np.zeros(len(layout.slots), bool)
        self._waiting = list(self._slots_in)
        self._begun = False
        # Autograd holds every gradient until the pass is over. It gets these back for those that have been copied.
        zero = torch.zeros((), device=device, dtype=weights.dtype)
        self._stand_ins = [zero.expand(slot.shape) for slot in layout.slots]
        weights.watch_gradients(self._arrived)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around a backward pass; `last`: no other pass of this replica belongs to the round.

        In the last one, a bucket is summed over the replicas as soon as its gradients are complete.
        """
        if last:
            self._begin()
        # MPI is called from the main thread alone, but autograd would run what is on a GPU in a thread of its own.
        with torch.autograd.set_multithreading_enabled(False):
            yield
        if last:
            self._complete()

    def reduce(self, facts: Sequence[float], what: str) -> Row:
        """R: end the round; `facts` of every replica as the rows of an array of shape (replicas, facts).

        A replica without a pass in the round brings zeros. Raises TransportError where the waiter gives up.
        """
        if not self._begun:
            self._begin()
            self._complete()
        mine = np.array([*facts, *_as_numbers(self._present)], np.float64)
        rows = self._group.gather(mine, what)
        anywhere = _from_numbers(rows[:, len(facts) :], len(self._present))
        self._sums.finish(what)
        for slot, present in enumerate(anywhere):
            self.gradients[slot] = self._views[slot] if present else None
        self._present[:] = False
        self._begun = False
        return rows[:, : len(facts)]

    def gather(self, row: Sequence[float], what: str) -> Row:
        """Everybody's `row` as the rows of an array. Raises TransportError where the waiter gives up."""
        return self._group.gather(np.array(row, np.float64), what)

    def average(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """New tensors: means over the replicas of floating-point ones, replica 0's of others."""
        return dict(zip(tensors, self._group.average(list(tensors.values()), what), strict=True))

    def _begin(self) -> None:
        self._sums.begin()
        self._waiting = list(self._slots_in)
        self._begun = True

    def _arrived(self, slot: int, gradient: Tensor | None) -> Tensor | None:
        """A gradient is complete: called by autograd in the middle of a backward pass."""
        if gradient is None:
            return None
        # The sum is as precise as the optimizer will use it, whatever the passes compute in.
        if self._present[slot]:
            self._views[slot].add_(gradient)
        else:
            self._views[slot].copy_(gradient)
            self._present[slot] = True
        if self._begun:
            bucket = self._bucket_of[slot]
            self._waiting[bucket] -= 1
            if self._waiting[bucket] == 0:
                self._sums.ready(bucket)
            self._sums.progress()
        self._between()
        return self._stand_ins[slot]

    def _complete(self) -> None:
        """Behind the last pass: what has no gradient counts as zeros, and every bucket is ready."""
        for slot in np.flatnonzero(~self._present):
            self._views[slot].zero_()
        for bucket, waiting in enumerate(self._waiting):
            if waiting:
                self._sums.ready(bucket)


def _as_numbers(present: npt.NDArray[np.bool_]) -> Row:
    """Bits, 32 in each number."""
    packed = np.packbits(present, bitorder="little")
    padded = np.zeros(-(-len(present) // _BITS) * (_BITS // 8), np.uint8)
    padded[: len(packed)] = packed
    return padded.view("<u4").astype(np.float64)


def _from_numbers(rows: Row, count: int) -> npt.NDArray[np.bool_]:
    """The bits that are set in any row."""
    packed = np.bitwise_or.reduce(rows.astype("<u4"), axis=0).view(np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(bool)
