"""A communicator of some of the ranks and its collectives on plain memory, which start and never wait.

It owns one mpi4py communicator that it was given; it imports no MPI, pickles nothing, and knows neither stages nor
devices. Collectives on one communicator are matched by their order alone, so that all its ranks must start the
same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcpipe.transport.wait import Request


def memory_of(mpi: Any) -> Callable[[int, int], Any]:
    """What makes a buffer for MPI of an address and a number of bytes; mpi4py before 4.0 calls it otherwise."""
    made: Callable[[int, int], Any] = (mpi.buffer if hasattr(mpi, "buffer") else mpi.memory).fromaddress
    return made


class Members:
    """The ranks of one communicator, as one of them sees them.

    size: how many they are.
    index: the number of this one, from 0 in the order of the communicator.
    """

    def __init__(self, communicator: Any, mpi: Any) -> None:
        self._comm = communicator
        self._mpi = mpi
        self._memory = memory_of(mpi)
        self.size: int = communicator.Get_size()
        self.index: int = communicator.Get_rank()

    def gather(self, row: npt.NDArray[np.float64], everything: npt.NDArray[np.float64]) -> Request:
        """Start to bring everybody's `row`, shape (n,), into `everything`, shape (size, n), on every rank."""
        request: Request = self._comm.Iallgather(row, everything)
        return request

    def broadcast(self, address: int, nbytes: int) -> Request:
        """Start to bring `nbytes` bytes of the first one to everybody's `address`."""
        request: Request = self._comm.Ibcast(self._memory(address, nbytes), 0)
        return request

    def summation(self, address: int, count: int, itemsize: int) -> Callable[[], Request]:
        """A call that starts to replace `count` floating-point numbers at `address` by their sums over all ranks.

        itemsize: 4 for float32, 8 for float64.
        """
        number = {4: self._mpi.FLOAT, 8: self._mpi.DOUBLE}[itemsize]
        memory = [self._memory(address, count * itemsize), count, number]
        all_reduce, in_place, add = self._comm.Iallreduce, self._mpi.IN_PLACE, self._mpi.SUM

        def start() -> Request:
            request: Request = all_reduce(in_place, memory, add)
            return request

        return start

    def duplicate(self, wait: Callable[[Request], None]) -> Members:
        """A communicator of the same ranks; each of them calls it, and `wait` returns when all have."""
        communicator, request = self._comm.Idup()
        wait(request)
        communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        return Members(communicator, self._mpi)

    def free(self) -> None:
        """Give the communicator back; every rank calls it, with nothing outstanding."""
        self._comm.Free()
