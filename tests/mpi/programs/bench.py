"""What programs of many cases have in common: transports over kinds of memory, and running one case after another.

Rank 0 prints `case NAME ok` when all ranks are through a case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import DeviceApi
from hpcpipe.transport.transport import DEFAULT_CHUNK_BYTES, Transport
from hpcpipe.transport.world import World
from tests.mpi.fake_device import FakeDevice


class Bench:
    """Makes transports over one kind of memory."""

    def __init__(self, world: World, memory: str) -> None:
        self.world = world
        self.memory = memory
        self.fake = FakeDevice() if memory in ("aware", "staged") else None
        self.device = torch.device("cuda", 0) if memory.startswith("cuda") else torch.device("cpu")

    def transport(
        self, *, ranks_of_stage: list[list[int]] | None = None, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Transport:
        api: DeviceApi | None = self.fake
        return Transport(
            self.world,
            self.world.waiter,
            ranks_of_stage=ranks_of_stage or [[rank] for rank in range(self.world.size)],
            device=self.device,
            cuda_aware=self.memory in ("aware", "cuda-aware"),
            chunk_bytes=chunk_bytes,
            device_api=api,
        )

    def settle(self) -> None:
        """Let the device finish what is queued, as reading a value on the host does."""
        if self.fake is not None:
            self.fake.synchronize()

    def random(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random bytes as a tensor: every bit pattern, NaNs too; only bool must be 0 or 1."""
        count = int(np.prod(shape)) * dtype.itemsize
        data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
        if dtype is torch.bool:
            data = data % 2
        return (
            data.view(dtype).view(shape).to(self.device)
            if count
            else torch.empty(shape, dtype=dtype, device=self.device)
        )


class Cases:
    """Functions that take a bench: `once` in the first kind of memory that is asked for, `per_memory` in each."""

    def __init__(
        self, once: Sequence[Callable[[Bench], None]], per_memory: Sequence[Callable[[Bench], None]]
    ) -> None:
        self._once = once
        self._per_memory = per_memory

    def names(self, memories: list[str]) -> list[str]:
        """The names of all cases, as they are printed."""
        return [name for name, _, _ in self._selected(memories)]

    def run(self, world: World, memories: list[str]) -> int:
        """Run them in these kinds of memory; the exit code."""
        torch.set_num_threads(1)
        for name, memory, case in self._selected(memories):
            if world.rank == 0:
                print(f"begin {name}", flush=True)
            case(Bench(world, memory))
            world.barrier(f"the end of case {name}")
            if world.rank == 0:
                print(f"case {name} ok", flush=True)
        return 0

    def _selected(self, memories: list[str]) -> list[tuple[str, str, Callable[[Bench], None]]]:
        return [(case.__name__, memories[0], case) for case in self._once] + [
            (f"{case.__name__}[{memory}]", memory, case) for memory in memories for case in self._per_memory
        ]


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except TransportError as error:
        return str(error)
    raise AssertionError("no TransportError was raised")


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
