"""What a message costs the CPU of the rank that sends or receives it.

Measured with small messages that have arrived before they are asked for, so that neither the wire nor waiting is
in it: those are the topology's business.
"""

from __future__ import annotations

import statistics
import time

import torch

from hpcpipe.transport.message import ChannelId, Kind
from hpcpipe.transport.transport import Transport
from hpcpipe.transport.world import World

DEFAULT_MESSAGE_S = 10e-6
"""For a profile that is taken on one rank: a send or a receive of a small message between two CPU ranks, measured
with MPICH."""

NUMBERS = 64
AT_ONCE = 8
ROUNDS = 11


def message_seconds(world: World, device: torch.device, *, cuda_aware: bool = False) -> float:
    """Seconds of a send or a receive, the mean of both; every rank of two or more calls it and gets the same.

    Ranks 0 and 1, 2 and 3, and so on measure at the same time; the median over the pairs counts.
    """
    ranks = [(rank,) for rank in range(world.size)]
    transport = Transport(world, world.waiter, ranks_of_stage=ranks, device=device, cuda_aware=cuda_aware)
    sends = world.rank % 2 == 0
    first = world.rank if sends else world.rank - 1
    channel = ChannelId(source=first, destination=first + 1, kind=Kind.ACTIVATION)
    paired = first + 1 < world.size
    sender = transport.sender(channel, depth=AT_ONCE, full_rows=None) if sends and paired else None
    receiver = transport.receiver(channel, depth=AT_ONCE) if not sends else None
    tensor = torch.zeros(NUMBERS, device=device)
    times: list[float] = []
    for turn in range(ROUNDS):
        minibatches = range(turn * AT_ONCE, (turn + 1) * AT_ONCE)
        world.barrier("all ranks to begin sending")
        began = time.perf_counter()
        if sender is not None:
            for minibatch in minibatches:
                sender.send((tensor,), minibatch=minibatch, requires_grad=(True,))
            times.append((time.perf_counter() - began) / AT_ONCE)
        world.barrier("all messages to be sent")
        began = time.perf_counter()
        if receiver is not None:
            for minibatch in minibatches:
                message = receiver.receive(minibatch=minibatch)
                _ = [None if found is None else found.detach().requires_grad_() for found in message.tensors]
                receiver.release(message)
            times.append((time.perf_counter() - began) / AT_ONCE)
    transport.finish()
    mine = statistics.median(times) if times else None
    everyone = world.all_gather_json(mine, what="what a message costs on each rank")
    pairs = [(everyone[rank] + everyone[rank + 1]) / 2 for rank in range(0, world.size - 1, 2)]
    return float(statistics.median(pairs))
