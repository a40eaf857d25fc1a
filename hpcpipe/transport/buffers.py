"""Where the bytes of messages lie while MPI reads or writes them: a strategy for host and two for device memory.

    host         tensor ------------------------------> MPI          MPI -> ring = tensor (a view)
    cuda-aware   tensor -copy-> ring, event, wait ----> MPI          MPI -> ring = tensor (a view)
    staged       tensor -copy-> pinned ring, event, wait -> MPI      MPI -> pinned ring -copy-> ring = tensor

A tensor that MPI changes in place, as an all-reduce does, is read and written where it lies; the staged strategy
copies it to a pinned twin and back.

MPI knows nothing of streams: before a send the host waits for an event recorded behind the copy, and memory
that is given back is posted again only when an event recorded behind its last reader has passed. The
strategies never call MPI.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.header import SlotLayout

ALIGNMENT = 64


class Event(Protocol):
    """A point in the work queued on a device."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class DeviceBlock(Protocol):
    """Device memory that an MPI library may be given: `tensor` is all of it as uint8, 64-byte aligned."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    @property
    def tensor(self) -> Tensor: ...


class DeviceApi(Protocol):
    """The few things that the transport asks of a device; all work goes to torch's current stream."""

    device: torch.device

    def allocate(self, nbytes: int) -> DeviceBlock:
        """Memory for a CUDA-aware MPI."""

    def allocate_plain(self, nbytes: int) -> Tensor:
        """Device memory that MPI never sees, uint8."""

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory, uint8."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queue a copy between tensors of the same shape and dtype."""

    def record(self) -> Event:
        """An event behind everything queued so far."""


class Landing(Protocol):
    """Fixed memory that receives one tensor slot of one ring position: `nbytes` bytes for MPI at
    `address`."""

    address: int
    nbytes: int

    def tensor(self, described: SlotLayout) -> Tensor:
        """The received bytes as a fresh tensor over memory of this landing; asked once per message."""


class Departure:
    """Tensors on their way out: `addresses` for MPI, and `held`, which must live until it has read them."""

    __slots__ = ("addresses", "held")

    def __init__(self, addresses: list[int], held: list[Any]) -> None:
        self.addresses = addresses
        self.held = held


class InPlace(Protocol):
    """A flat tensor that MPI changes in place: its first element is at `address` for MPI.

    Every method takes a range of elements.
    """

    address: int

    def fetch(self, start: int, stop: int) -> Event | None:
        """Make elements that are final on the device readable for MPI: they are when the event has passed, or
        at once where it is None."""

    def restore(self, start: int, stop: int) -> None:
        """MPI has changed elements: work that is queued from now on sees them in the tensor."""


class Memory(Protocol):
    """A strategy. `line` says in words what it does."""

    line: str

    def depart(self, tensors: Sequence[Tensor]) -> Departure:
        """Make the tensors readable for MPI, each in one piece; their bytes are final when this returns."""

    def departed(self, departure: Departure) -> None:
        """MPI has read them all."""

    def landing(self, nbytes: int) -> Landing:
        """Memory for one slot of one ring position."""

    def fence(self) -> Event | None:
        """An event behind all work queued so far, or None where there is no queue."""

    def in_place(self, flat: Tensor) -> InPlace:
        """Let MPI change a contiguous tensor in one dimension, which must stay where it is."""


class HostMemory:
    """Zero-copy on the CPU: tensors are sent from their own memory and received as views of the ring."""

    line = "host buffers"

    def depart(self, tensors: Sequence[Tensor]) -> Departure:
        addresses, held = [], []
        for tensor in tensors:
            if not tensor.is_cpu:
                raise TransportError(f"a tensor on {tensor.device} given to a transport for the CPU")
            # A lazy conjugate or negation is a flag beside the bytes, and only the bytes travel.
            if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
            held.append(tensor)
            addresses.append(tensor.data_ptr())
        return Departure(addresses, held)

    def departed(self, departure: Departure) -> None:
        departure.held.clear()

    def landing(self, nbytes: int) -> Landing:
        with torch.inference_mode(False):
            # NumPy asks for huge pages for large arrays, torch does not: MPI libraries that copy from process to
            # process page by page are more than twice as fast with them.
            block = _aligned(torch.from_numpy(np.empty(nbytes + ALIGNMENT, np.uint8)), nbytes)
        return _View(block, block.data_ptr())

    def fence(self) -> Event | None:
        return None

    def in_place(self, flat: Tensor) -> InPlace:
        if not flat.is_cpu:
            raise TransportError(f"a tensor on {flat.device} given to a transport for the CPU")
        return _InPlace(flat, lambda: None)


class _DeviceMemory(ABC):
    """What both device strategies do: outgoing tensors are copied to a buffer that MPI can read."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)

    def depart(self, tensors: Sequence[Tensor]) -> Departure:
        blocks = []
        for tensor in tensors:
            free = self._free[tensor.nbytes]
            block = free.pop() if free else self._outgoing(tensor.nbytes)
            self._api.copy(_typed(block.tensor, tensor.dtype, tuple(tensor.shape)), tensor.detach())
            blocks.append(block)
        if blocks:
            self._api.record().synchronize()
        return Departure([block.address for block in blocks], blocks)

    def departed(self, departure: Departure) -> None:
        for block in departure.held:
            self._free[block.tensor.numel()].append(block)
        departure.held.clear()

    def fence(self) -> Event | None:
        return self._api.record()

    def in_place(self, flat: Tensor) -> InPlace:
        if flat.device.type != self._api.device.type:
            raise TransportError(f"a tensor on {flat.device} given to a transport for {self._api.device}")
        return self._in_place(flat)

    @abstractmethod
    def _in_place(self, flat: Tensor) -> InPlace:
        """The same for a tensor on the device."""

    @abstractmethod
    def _outgoing(self, nbytes: int) -> _Block:
        """New memory that MPI can read."""


class AwareMemory(_DeviceMemory):
    """A CUDA-aware MPI reads and writes device memory: rings of blocks that the MPI library can map."""

    line = "device buffers, CUDA-aware"

    def landing(self, nbytes: int) -> Landing:
        block = self._outgoing(nbytes)
        return _View(block.tensor, block.address, keep=block)

    def _in_place(self, flat: Tensor) -> InPlace:
        return _InPlace(flat, self._api.record)

    def _outgoing(self, nbytes: int) -> _Block:
        with torch.inference_mode(False):
            block = self._api.allocate(nbytes)
        return _Block(block.tensor, int(block.__cuda_array_interface__["data"][0]), keep=block)


class StagedMemory(_DeviceMemory):
    """Device tensors pass through pinned host memory: for an MPI that cannot read device memory."""

    line = "device tensors staged through pinned host buffers"

    def landing(self, nbytes: int) -> Landing:
        with torch.inference_mode(False):
            return _StagedLanding(self._api, self._outgoing(nbytes), self._api.allocate_plain(nbytes))

    def _in_place(self, flat: Tensor) -> InPlace:
        with torch.inference_mode(False):
            return _StagedInPlace(self._api, flat, self._api.allocate_pinned(flat.nbytes).view(flat.dtype))

    def _outgoing(self, nbytes: int) -> _Block:
        with torch.inference_mode(False):
            tensor = self._api.allocate_pinned(nbytes)
        return _Block(tensor, tensor.data_ptr())


class _View:
    """A landing whose memory is the tensor."""

    def __init__(self, block: Tensor, address: int, keep: object = None) -> None:
        self.address = address
        self.nbytes = block.numel()
        self._block = block
        self._keep = keep
        self._described: SlotLayout | None = None
        self._typed = block

    def tensor(self, described: SlotLayout) -> Tensor:
        if described is not self._described:
            self._typed = _typed(self._block, described.dtype, described.shape)
            self._described = described
        # A tensor of its own per message: flags, gradient and version counter of an earlier one do not come back.
        return self._typed.data


class _StagedLanding:
    """A landing in pinned memory whose bytes are copied to the device when they are asked for."""

    def __init__(self, api: DeviceApi, pinned: _Block, device: Tensor) -> None:
        self._api = api
        self._pinned = pinned
        self._device = _View(device, 0)
        self.address = pinned.address
        self.nbytes = device.numel()

    def tensor(self, described: SlotLayout) -> Tensor:
        tensor = self._device.tensor(described)
        # Consumers are queued behind this copy on the same stream: nobody has to wait for it here.
        self._api.copy(tensor, _typed(self._pinned.tensor, described.dtype, described.shape))
        return tensor


class _InPlace:
    """MPI changes the tensor itself."""

    def __init__(self, flat: Tensor, fence: Callable[[], Event | None]) -> None:
        self.address = flat.data_ptr()
        self._keep = flat
        self._fence = fence

    def fetch(self, start: int, stop: int) -> Event | None:
        return self._fence()

    def restore(self, start: int, stop: int) -> None:
        return


class _StagedInPlace:
    """MPI changes a pinned twin of the tensor."""

    def __init__(self, api: DeviceApi, flat: Tensor, twin: Tensor) -> None:
        self.address = twin.data_ptr()
        self._api = api
        self._flat = flat
        self._twin = twin

    def fetch(self, start: int, stop: int) -> Event | None:
        # An earlier round's copy up from the same memory is ahead of this one on the same stream.
        self._api.copy(self._twin[start:stop], self._flat[start:stop])
        return self._api.record()

    def restore(self, start: int, stop: int) -> None:
        self._api.copy(self._flat[start:stop], self._twin[start:stop])


class _Block:
    """Memory that MPI may read or write at `address`, and the uint8 tensor over it."""

    __slots__ = ("_keep", "address", "tensor")

    def __init__(self, tensor: Tensor, address: int, keep: object = None) -> None:
        self.tensor = tensor
        self.address = address
        self._keep = keep


def _typed(block: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _aligned(raw: Tensor, nbytes: int) -> Tensor:
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes]
