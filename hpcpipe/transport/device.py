"""The CUDA device as the transport needs it: torch for streams, events and copies, CuPy for memory for MPI.

CuPy is only the allocator, with a pool of plain cudaMalloc memory, because memory of torch's expandable
segments or of cudaMallocAsync loses CUDA IPC. All work goes to torch's current stream, so that the two never
disagree about it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import DeviceBlock, Event


class CudaDevice:
    """`buffers.DeviceApi` for one CUDA device. CuPy is imported when memory for a CUDA-aware MPI is first
    asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def allocate(self, nbytes: int) -> DeviceBlock:
        cupy = _cupy()
        with cupy.cuda.Device(self.device.index or 0):
            if self._pool is None:
                self._pool = cupy.cuda.MemoryPool()
            pointer = self._pool.malloc(max(nbytes, 1))
            return _CupyBlock(cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=pointer), self.device)

    def allocate_plain(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def record(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        recorded: Event = event
        return recorded


class _CupyBlock:
    """A CuPy array and the torch tensor over the same memory."""

    def __init__(self, array: Any, device: torch.device) -> None:
        self._array = array
        self.tensor = torch.as_tensor(array, device=device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__cuda_array_interface__
        return interface


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TransportError(
            f"a CUDA-aware MPI needs CuPy ({error}): pip install hpcpipe[cuda13], or say cuda_aware = 'off'"
        ) from error
    return cupy
