"""Sums over two replicas that bring the same numbers, within one process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt


class FakeAdder:
    """`reduce.Adder` that doubles what lies at an address, when somebody tests and it may be done.

    `started` lists the sums as (address, count), `prepared` counts them; `may_end` holds back what has started.
    """

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.prepared = 0
        self.may_end = True

    def summation(self, address: int, count: int, itemsize: int) -> Callable[[], FakeSum]:
        self.prepared += 1
        number = {4: ctypes.c_float, 8: ctypes.c_double}[itemsize]

        def start() -> FakeSum:
            self.started.append((address, count))
            return FakeSum(self, np.ctypeslib.as_array((number * count).from_address(address)))

        return start


class FakeSum:
    def __init__(self, adder: FakeAdder, numbers: npt.NDArray[np.floating]) -> None:
        self._adder = adder
        self._numbers = numbers
        self._done = False

    def Test(self) -> bool:
        if self._adder.may_end and not self._done:
            self._done = True
            self._numbers *= 2
        return self._done
