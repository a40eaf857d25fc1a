"""The replicas of one stage as a group: what they tell each other, average, and sum together.

It owns the communicators of these ranks, made once and freed at the end of the transport. Every wait is
nonblocking and has a name; nothing is pickled, and nothing here knows what a row means or when an action is due.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import Memory
from hpcpipe.transport.deadline import limited
from hpcpipe.transport.members import Members
from hpcpipe.transport.reduce import BucketReduce, check
from hpcpipe.transport.standing import listed
from hpcpipe.transport.wait import Condition, Request, Waiter
from hpcpipe.transport.world import World

JOIN_TAG = 3
AVERAGED_AT_ONCE = 1 << 16
"""Numbers of each replica that an average gathers in one call: its memory does not grow with the tensors."""

Name = Callable[[], str] | str


def join(world: World, waiter: Waiter, ranks: Sequence[int], stage: int) -> Members:
    """The communicator of the ranks that hold the replicas of a stage; each of them calls it, in the same order
    where there are several stages.

    Raises TransportError naming the ranks that do not come, or one that joins another group.
    """
    # MPI makes a communicator in a call that blocks until the last member is in it, where nobody could say who is
    # missing: so they greet each other first, and call it when it is certain that all of them do.
    mine = np.array([stage, len(ranks), zlib.crc32(repr(list(ranks)).encode())], np.int64)
    greetings = {rank: np.zeros_like(mine) for rank in ranks if rank != world.rank}
    receives = {
        rank: world.irecv(greeting.ctypes.data, greeting.nbytes, rank, JOIN_TAG)
        for rank, greeting in greetings.items()
    }
    sends = [world.isend(mine.ctypes.data, mine.nbytes, rank, JOIN_TAG) for rank in greetings]

    def absent() -> list[int]:
        return [rank for rank, request in receives.items() if not request.Test()] or list(receives)

    def missing() -> str:
        ranks = absent()
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)} to join the replicas of stage {stage}"

    waiter.wait([*receives.values(), *sends], missing, kind="collective", peers=absent)
    for rank, greeting in greetings.items():
        if not np.array_equal(greeting, mine):
            raise TransportError(
                f"rank {world.rank} joins the {len(ranks)} replicas of stage {stage}, but rank {rank} the "
                f"{greeting[1]} of stage {greeting[0]}: all ranks need the same plan, and the same order of stages"
            )
    with limited(waiter.abort_after_s):
        return world.members(ranks, tag=JOIN_TAG)


class StageGroup:
    """The replicas of one stage, as one of them sees them; `Transport.group` makes it.

    All replicas call the same methods in the same order, except that a `BucketReduce` goes its own way.

    memory: how MPI reaches the tensors that it sums.
    ranks: theirs, in the order of the replicas.
    limit: the most bytes in one MPI call.

    stage: whose replicas they are.
    size: how many.
    index: the number of this one.
    """

    def __init__(
        self,
        members: Members,
        waiter: Waiter,
        memory: Memory,
        *,
        stage: int,
        ranks: Sequence[int],
        limit: int,
    ) -> None:
        self.stage = stage
        self.size = members.size
        self.index = members.index
        self._members = members
        self._waiter = waiter
        self._memory = memory
        self._limit = limit
        self._peers = [rank for rank in ranks if rank != waiter.rank]
        self._rows: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}
        self._reducers: list[tuple[BucketReduce, Members]] = []

    def gather(self, row: npt.NDArray[np.float64], what: Name) -> npt.NDArray[np.float64]:
        """Everybody's `row`, shape (n,), as the rows of a new array of shape (size, n).

        what: names the wait in messages, as "the losses of stage 1, minibatch 7".

        Raises TransportError for an array of another dtype or number of dimensions, and when the waiter gives up.
        """
        if row.dtype != np.float64 or row.ndim != 1:
            raise TransportError(f"replicas gather rows of float64, not {row.dtype} {row.shape}")
        return np.array(self._gathered(row, what))

    def average(self, tensors: Sequence[Tensor], what: Name) -> list[Tensor]:
        """New tensors like `tensors`: means over the replicas of floating and complex ones, replica 0's of others.

        Means are computed in float64 in the order of the replicas and rounded once: every replica gets the same
        bits.

        what: names the wait in messages, as "the buffers of stage 1".

        Raises TransportError when the replicas bring different shapes or dtypes, and when the waiter gives up.
        """
        self._settle(what)
        with torch.no_grad(), torch.inference_mode(False):
            own = [tensor.detach().cpu() for tensor in tensors]
            numbers = [_as_doubles(tensor) for tensor in own if _has_mean(tensor)]
            others = [_as_bytes(tensor) for tensor in own if not _has_mean(tensor)]
            forms = repr([(str(tensor.dtype), tuple(tensor.shape)) for tensor in own])
            self._agree([len(own), zlib.crc32(forms.encode())], what, "tensors of other shapes or dtypes")
            means = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.float64)
            firsts = torch.cat(others) if others else torch.empty(0, dtype=torch.uint8)
            self._average(means, what)
            self._broadcast(firsts, what)
            parts = iter(torch.split(means, [part.numel() for part in numbers]))
            copies = iter(torch.split(firsts, [part.numel() for part in others]))
            return [
                (_from_doubles(next(parts), like) if _has_mean(like) else _from_bytes(next(copies), like)).to(
                    tensor.device
                )
                for tensor, like in zip(tensors, own, strict=True)
            ]

    def reducer(self, flat: Tensor, buckets: Sequence[tuple[int, int]]) -> BucketReduce:
        """The all-reduce of `flat` in place, bucket by bucket; every replica makes it with the same buckets.

        flat: shape (n,), float32 or float64, contiguous; must stay where it is.
        buckets: ranges of elements (start, stop), in the order in which they are summed.

        Raises TransportError for another tensor, for buckets that overlap, and when the replicas bring others.
        """
        check(flat, buckets)
        what = f"the replicas of stage {self.stage} to make their all-reduce"
        spans = zlib.crc32(repr([tuple(bucket) for bucket in buckets]).encode())
        self._agree([flat.numel(), flat.element_size(), spans], what, "another tensor or other buckets to sum")
        # Its sums start when gradients are ready, on one replica before and on another behind the next `gather`.
        # MPI matches by order within a communicator: on one of their own nothing can come between them.
        members = self._members.duplicate(lambda request: self._wait(request, what))
        reducer = BucketReduce(
            members,
            self._memory.in_place(flat),
            self._waiter,
            flat,
            buckets,
            limit=max(1, self._limit // flat.element_size()),
            peers=self._peers,
        )
        self._reducers.append((reducer, members))
        return reducer

    def progress(self) -> None:
        """Let the sums get on; never waits."""
        for reducer, _ in self._reducers:
            reducer.progress()

    def check_settled(self) -> None:
        """Raises TransportError when a sum may have started and nobody has waited for it."""
        for reducer, _ in self._reducers:
            if reducer.left is not None:
                raise TransportError(
                    f"{self._waiter.subject()}: an all-reduce of stage {self.stage} is left in the middle: "
                    f"{reducer.left} may have started"
                )

    def close(self) -> None:
        """Free the communicators; every replica calls it, with nothing outstanding."""
        for _, members in self._reducers:
            members.free()
        self._reducers.clear()
        self._members.free()

    def _agree(self, values: Sequence[float], what: Name, other: str) -> None:
        rows = self._gathered(np.array(values, np.float64), what)
        for replica, row in enumerate(rows):
            if not np.array_equal(row, rows[self.index]):
                raise TransportError(
                    f"{_text(what)}: replica {replica} of stage {self.stage} brings {other} than replica "
                    f"{self.index}"
                )

    def _gathered(self, row: npt.NDArray[np.float64], what: Name) -> npt.NDArray[np.float64]:
        """The same as `gather`, in memory that the next row of this length overwrites."""
        if row.size not in self._rows:
            self._rows[row.size] = (np.empty(row.size), np.empty((self.size, row.size)))
        mine, everything = self._rows[row.size]
        mine[:] = row
        self._wait(self._members.gather(mine, everything), what)
        return everything

    def _average(self, numbers: Tensor, what: Name) -> None:
        for part in torch.split(numbers, AVERAGED_AT_ONCE):
            if part.numel():
                first, *rest = torch.from_numpy(self._gathered(part.numpy(), what))
                part.copy_(first)
                for row in rest:
                    part.add_(row)
                part.div_(self.size)

    def _broadcast(self, data: Tensor, what: Name) -> None:
        for part in torch.split(data, self._limit):
            if part.numel():
                self._wait(self._members.broadcast(part.data_ptr(), part.numel()), what)

    def _settle(self, what: Name) -> None:
        """Wait until the device has computed what is queued."""
        event = self._memory.fence()
        if event is not None:
            self._waiter.wait([Condition(event.query)], what, kind="collective")

    def _wait(self, request: Request, what: Name) -> None:
        self._waiter.wait([request], what, kind="collective", peers=self._peers)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_doubles(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.to(torch.float64).flatten()


def _from_doubles(numbers: Tensor, like: Tensor) -> Tensor:
    # A copy lies at an even address, as complex numbers need it, wherever it was among the others.
    numbers = numbers.clone()
    if like.is_complex():
        numbers = torch.view_as_complex(numbers.view(like.numel(), 2))
    return numbers.to(like.dtype).view(like.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    # The same for the address of other dtypes.
    return data.clone().view(like.dtype).view(like.shape)


def _text(what: Name) -> str:
    return what if isinstance(what, str) else what()
