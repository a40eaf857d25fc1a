"""A look at MPI from a process of its own, so that an MPI that is broken or absent takes nobody else down.

`python -m hpcpipe.transport.probe` prints one JSON object about the library. With `exchange` it is started on two
ranks and sends device memory between them: where the library cannot, this process dies and the caller learns it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hpcpipe.transport.cuda import detect
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World

EXCHANGE_BYTES = (1 << 10, 1 << 20)


def describe(world: World) -> dict[str, Any]:
    """What the MPI library of this process is and can."""
    awareness = detect("auto", world.library, memory_kinds=world.memory_kinds)
    return {
        "library": world.library,
        "standard": world.standard,
        "thread_level": world.thread_level,
        "tag_limit": world.tag_limit,
        "cuda_aware": awareness.enabled,
        "cuda_aware_how": awareness.how,
        "notes": [*world.notes, *awareness.warnings],
    }


def exchange(world: World) -> bool:
    """Whether device memory crosses between two ranks unharmed, in small and large messages."""
    import torch

    from hpcpipe.transport.message import ChannelId, Kind
    from hpcpipe.transport.transport import Transport

    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    good = True
    for nbytes in EXCHANGE_BYTES:
        transport = Transport(world, world.waiter, ranks_of_stage=((0,), (1,)), device=device, cuda_aware=True)
        there = ChannelId(source=world.rank, destination=1 - world.rank, kind=Kind.ACTIVATION)
        back = ChannelId(source=1 - world.rank, destination=world.rank, kind=Kind.ACTIVATION)
        receiver = transport.receiver(back, depth=1)
        sender = transport.sender(there, depth=1, full_rows=None)
        sender.send((torch.full((nbytes,), world.rank + 1, dtype=torch.uint8, device=device),), minibatch=0)
        message = receiver.receive(minibatch=0)
        (received,) = message.tensors
        good = good and received is not None and bool((received == 2 - world.rank).all())
        receiver.release(message)
        transport.finish()
    return good


def _main(world: World, wish: str) -> int:
    if wish == "exchange":
        results = world.gather_json(exchange(world), what="the results of the device exchange")
        if results is not None:
            print(json.dumps({"exchanged": all(results)}), flush=True)
    elif world.rank == 0:
        print(json.dumps(describe(world)), flush=True)
    return 0


if __name__ == "__main__":
    wish = sys.argv[1] if len(sys.argv) > 1 else "describe"
    sys.exit(run_job(lambda world: _main(world, wish)))
