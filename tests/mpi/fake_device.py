"""A device that is host memory with a lazy stream: work is queued and runs only when somebody waits for it.

What reads or sends device memory without having waited for the right event sees the bytes of before. Blocks show
themselves through `__cuda_array_interface__`, as CuPy arrays do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FakeDevice:
    """`buffers.DeviceApi` over host memory. `log` lists record, synchronize and copy in the order of the calls."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self._queue: list[Callable[[], object]] = []
        self._done = 0

    def queue(self, work: Callable[[], object]) -> None:
        """Launch a kernel: `work` runs when the stream gets there."""
        self._queue.append(work)

    def run_one(self) -> None:
        if self._done < len(self._queue):
            self._queue[self._done]()
            self._done += 1

    def run_until(self, count: int) -> None:
        while self._done < count:
            self.run_one()

    def synchronize(self) -> None:
        self.run_until(len(self._queue))

    @property
    def passed(self) -> int:
        return self._done

    def allocate(self, nbytes: int) -> FakeBlock:
        return FakeBlock(nbytes)

    def allocate_plain(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xDD, dtype=torch.uint8)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.log.append("copy")
        self.queue(lambda: destination.copy_(source))

    def record(self) -> FakeEvent:
        self.log.append("record")
        return FakeEvent(self, len(self._queue))


class FakeEvent:
    def __init__(self, device: FakeDevice, position: int) -> None:
        self._device = device
        self._position = position

    def query(self) -> bool:
        # Time passes between two looks: the stream gets one piece of work further.
        passed = self._device.passed >= self._position
        if not passed:
            self._device.run_one()
        return passed

    def synchronize(self) -> None:
        self._device.log.append("synchronize")
        self._device.run_until(self._position)


class FakeBlock:
    """Host memory that claims to be a CUDA array."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.full((nbytes,), 0xCC, dtype=torch.uint8)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.tensor.numel(),),
            "typestr": "|u1",
            "data": (self.tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
