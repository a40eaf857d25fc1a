"""Short integer messages from every rank to rank 0 outside the pipeline, as "my checkpoint file is written".

A report never blocks its sender and never waits for rank 0 to look; rank 0 polls. It carries integers of a
length fixed at the start, in order per rank, on a tag of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpipe.errors import TransportError
from hpcpipe.transport.standing import listed
from hpcpipe.transport.wait import Condition, Request, Waiter
from hpcpipe.transport.world import PersistentRequest, World

TAG = 1
_REPORT = 0
_END = 1


class Reports:
    """One end of the reports of all ranks; every rank makes one, with the same `length`.

    length: int64 values in each report.
    """

    def __init__(self, world: World, waiter: Waiter, *, length: int) -> None:
        self._world = world
        self._waiter = waiter
        self._length = length
        self._sends: list[tuple[Request, object]] = []
        self._own: list[tuple[int, list[int]]] = []
        self._buffers: dict[int, tuple[PersistentRequest, object, memoryview]] = {}
        if world.rank == 0:
            for rank in range(1, world.size):
                buffer = np.zeros(1 + length, np.int64)
                request = world.recv_init(buffer.ctypes.data, buffer.nbytes, rank, TAG)
                request.Start()
                self._buffers[rank] = (request, buffer, memoryview(buffer.data))

    def send(self, values: Sequence[int]) -> None:
        """Report `length` integers to rank 0. Raises TransportError for another number of them."""
        if len(values) != self._length:
            raise TransportError(f"a report has {self._length} integers, not {len(values)}")
        if self._world.rank == 0:
            self._own.append((0, [int(value) for value in values]))
        else:
            self._post([_REPORT, *values])

    def poll(self) -> list[tuple[int, list[int]]]:
        """On rank 0 what has come since the last call, as (rank, integers); elsewhere nothing. Never
        waits."""
        self._sends = [(request, buffer) for request, buffer in self._sends if not request.Test()]
        found, self._own = self._own, []
        for rank in list(self._buffers):
            request, _, words = self._buffers[rank]
            while request.Test():
                if words[0] == _END:
                    request.Free()
                    del self._buffers[rank]
                    break
                found.append((rank, words[1:].tolist()))
                request.Start()
        return found

    def finish(self) -> list[tuple[int, list[int]]]:
        """Wait until all reports of all ranks have come, and return on rank 0 those that `poll` has not."""
        if self._world.rank != 0:
            self._post([_END] + [0] * self._length)
            self._waiter.wait(
                [request for request, _ in self._sends],
                "its reports to reach rank 0",
                kind="reports",
                peers=(0,),
            )
            self._sends = []
        found = self.poll()

        def all_ended() -> bool:
            found.extend(self.poll())
            return not self._buffers

        self._waiter.wait(
            [Condition(all_ended)],
            lambda: f"the last reports of ranks {listed(list(self._buffers))}",
            kind="reports",
            peers=lambda: list(self._buffers),
        )
        return found

    def _post(self, words: list[int]) -> None:
        self._sends = [(request, buffer) for request, buffer in self._sends if not request.Test()]
        buffer = np.array(words, np.int64)
        self._sends.append((self._world.isend(buffer.ctypes.data, buffer.nbytes, 0, TAG), buffer))
