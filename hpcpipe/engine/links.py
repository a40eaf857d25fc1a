"""Measures how ranks are joined: messages within a host and between hosts, and all-reduces over either.

Pairs exchange through hpcpipe's own channels, groups sum through hpcpipe's own all-reduce, so a topology holds
what training will see. Which ranks share a host is all it looks at; what the figures are for is the planner's
business.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypedDict

import torch

import hpcpipe
from hpcpipe.errors import LauncherError
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.transport.message import ChannelId, Kind
from hpcpipe.transport.transport import Transport
from hpcpipe.transport.world import World

MESSAGE_BYTES = (8, 64 << 10, 1 << 20, 4 << 20)
SUM_BYTES = (64 << 10, 1 << 20, 16 << 20)
DEPTH = 2
WARM_UP = 4
SECONDS_PER_SIZE = 0.2
FEWEST, MOST = 10, 1000


class Reach(NamedTuple):
    """A level of the hierarchy as it lies over the ranks.

    pairs: ranks that talk to each other when all of the level do at the same time.
    alone: the pair that stands for the level when nobody else talks.
    groups: ranks that sum together.
    """

    name: str
    size: int
    pairs: list[tuple[int, int]]
    alone: tuple[int, int]
    groups: list[list[int]]


class MessageResult(TypedDict):
    """Messages of one size between pairs of a level: microseconds one way, and GB/s (10⁹ bytes) of each pair.

    alone: one pair in turns; loaded: all pairs of the level, both ways at the same time.
    """

    level: str
    bytes: int
    alone_us: float
    loaded_us: float
    alone_gb_s: float
    loaded_gb_s: float


class SumResult(TypedDict):
    """All-reduces of one size over each group of a level: milliseconds, and bus bandwidth in GB/s."""

    level: str
    ranks: int
    bytes: int
    ms: float
    bus_gb_s: float


def levels_of(hosts: Sequence[str]) -> list[Reach]:
    """The levels that a job has: `hosts[r]` is the host of rank r.

    Raises LauncherError for fewer than 2 ranks, and where the hosts do not hold equally many consecutive ranks.
    """
    ranks = len(hosts)
    if ranks < 2:
        raise LauncherError(
            "a topology needs 2 ranks or more, there is 1: start them with mpirun -n N hpcpipe bench link "
            "--topology FILE"
        )
    blocks = [len(list(block)) for _, block in groupby(hosts)]
    size = blocks[0]
    if len(blocks) > len(set(hosts)) or any(block != size for block in blocks):
        raise LauncherError(
            f"the hosts hold blocks of {', '.join(map(str, blocks))} ranks: a topology needs equally many "
            "consecutive ranks on each, so start as many on each host, block by block"
        )
    nodes = [list(range(first, first + size)) for first in range(0, ranks, size)]
    found = []
    if size > 1:
        inside = [(node[i], node[i + 1]) for node in nodes for i in range(0, size - 1, 2)]
        found.append(Reach("node", size, inside, (0, 1), nodes))
    if len(nodes) > 1:
        across = [pair for a, b in zip(nodes[::2], nodes[1::2], strict=False) for pair in zip(a, b, strict=True)]
        # In a pipeline the last rank of one host and the first of the next are neighbours.
        found.append(Reach("network", ranks, across, (size - 1, size), [list(range(ranks))]))
    return found


def measure_topology(
    world: World,
    device: torch.device,
    *,
    cuda_aware: bool,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    sum_bytes: Sequence[int] = SUM_BYTES,
    seconds: float = SECONDS_PER_SIZE,
) -> tuple[Topology, list[MessageResult], list[SumResult]]:
    """Measure every level on every rank of the job; every rank gets the same results.

    `message_bytes` and `sum_bytes` ascend: the smallest message gives the latency, the largest ones the
    bandwidths. About `seconds` are spent on each size.

    Raises LauncherError as `levels_of` does.
    """
    messages: list[MessageResult] = []
    sums: list[SumResult] = []
    levels: list[Level] = []
    job = _Job(world, device, cuda_aware, seconds)
    for reach in levels_of(world.hosts):
        mine = [_messages(job, reach, size) for size in message_bytes]
        added = [_sums(job, reach, size) for size in sum_bytes]
        latency_s = mine[0]["alone_us"] / 1e6
        levels.append(
            Level(
                name=reach.name,
                size=reach.size,
                bandwidth=_bandwidth(reach, mine[-1], latency_s),
                latency_s=latency_s,
                allreduce_bandwidth=_bus_bandwidth(added[-1], latency_s),
            )
        )
        messages += mine
        sums += added
    about = {
        "hosts": list(dict.fromkeys(world.hosts)),
        "ranks": world.size,
        "mpi": world.library,
        "device": device.type,
        "cuda_aware": cuda_aware,
        "hpcpipe": hpcpipe.__version__,
        "messages": messages,
        "sums": sums,
    }
    return Topology(levels=tuple(levels), about=about), messages, sums


def table(messages: Sequence[MessageResult], sums: Sequence[SumResult]) -> list[str]:
    """The measurements for people."""
    lines = [f"{'messages':>10} {'bytes':>10} {'alone µs':>10} {'GB/s':>8} {'loaded µs':>10} {'GB/s':>8}"]
    lines += [
        f"{row['level']:>10} {row['bytes']:>10} {row['alone_us']:>10.2f} {row['alone_gb_s']:>8.3f} "
        f"{row['loaded_us']:>10.2f} {row['loaded_gb_s']:>8.3f}"
        for row in messages
    ]
    lines.append(f"{'all-reduce':>10} {'bytes':>10} {'ranks':>10} {'ms':>8} {'bus GB/s':>10}")
    lines += [
        f"{row['level']:>10} {row['bytes']:>10} {row['ranks']:>10} {row['ms']:>8.3f} {row['bus_gb_s']:>10.3f}"
        for row in sums
    ]
    return lines


def _bandwidth(reach: Reach, largest: MessageResult, latency_s: float) -> float:
    """Bytes a second one way of one pair: within a host under load, as there all neighbours talk at once.

    Between hosts it is that of one pair alone: what the link can do, which those who share it divide.
    """
    seconds = largest["loaded_us" if reach.name == "node" else "alone_us"] / 1e6
    return largest["bytes"] / max(seconds - latency_s, seconds / 2)


def _bus_bandwidth(largest: SumResult, latency_s: float) -> float:
    """Bytes a second at which 2(m-1)/m of the bytes move, beside 2(m-1) latencies."""
    seconds, others = largest["ms"] / 1e3, largest["ranks"] - 1
    moved = 2 * others / largest["ranks"] * largest["bytes"]
    return moved / max(seconds - 2 * others * latency_s, seconds / 2)


class _Job(NamedTuple):
    """What all measurements have in common."""

    world: World
    device: torch.device
    cuda_aware: bool
    seconds: float

    def transport(self, ranks_of_stage: Sequence[Sequence[int]]) -> Transport:
        return Transport(
            self.world,
            self.world.waiter,
            ranks_of_stage=ranks_of_stage,
            device=self.device,
            cuda_aware=self.cuda_aware,
        )


def _messages(job: _Job, reach: Reach, size: int) -> MessageResult:
    alone = _between(job, [reach.alone], size, both_ways=False)
    loaded = _between(job, reach.pairs, size, both_ways=True)
    return MessageResult(
        level=reach.name,
        bytes=size,
        alone_us=round(alone * 1e6, 3),
        loaded_us=round(loaded * 1e6, 3),
        alone_gb_s=digits(size / alone / 1e9),
        loaded_gb_s=digits(size / loaded / 1e9),
    )


def _between(job: _Job, pairs: Sequence[tuple[int, int]], size: int, *, both_ways: bool) -> float:
    """Seconds of a message one way: all pairs at the same time, the slowest counts."""
    world = job.world
    transport = job.transport([(rank,) for rank in range(world.size)])
    mine = [pair for pair in pairs if world.rank in pair]
    turn: Callable[[int], None] | None = None
    if mine:
        first = world.rank == mine[0][0]
        peer = mine[0][1] if first else mine[0][0]
        out = ChannelId(source=world.rank, destination=peer, kind=Kind.ACTIVATION)
        back = ChannelId(source=peer, destination=world.rank, kind=Kind.ACTIVATION)
        sender = transport.sender(out, depth=DEPTH, full_rows=None)
        receiver = transport.receiver(back, depth=DEPTH)
        tensor = torch.zeros(size, dtype=torch.uint8, device=job.device)

        def exchange(number: int) -> None:
            if first or both_ways:
                sender.send((tensor,), minibatch=number)
            receiver.release(receiver.receive(minibatch=number))
            if not first and not both_ways:
                sender.send((tensor,), minibatch=number)

        turn = exchange
    seconds = _timed(job, turn)
    transport.finish()
    # In turns, a turn is a message there and another one back.
    return seconds if both_ways else seconds / 2


def _sums(job: _Job, reach: Reach, size: int) -> SumResult:
    transport = job.transport(reach.groups)
    mine = next(index for index, ranks in enumerate(reach.groups) if job.world.rank in ranks)
    flat = torch.zeros(size // 4, device=job.device)
    reducer = transport.group(mine).reducer(flat, [(0, flat.numel())])

    def reduce(number: int) -> None:
        reducer.begin()
        reducer.ready(0)
        reducer.finish(f"sum {number} of the measurement")

    seconds = _timed(job, reduce)
    transport.finish()
    ranks = len(reach.groups[mine])
    return SumResult(
        level=reach.name,
        ranks=ranks,
        bytes=size,
        ms=round(seconds * 1e3, 4),
        bus_gb_s=digits(2 * (ranks - 1) / ranks * size / seconds / 1e9),
    )


def digits(value: float) -> float:
    """Four significant ones: a small message on a busy machine moves kilobytes a second."""
    return float(f"{value:.4g}")


def _timed(job: _Job, turn: Callable[[int], None] | None) -> float:
    """Median seconds of `turn(number)` on the slowest rank; None takes no part, but every rank calls this."""
    world = job.world
    world.barrier("the start of a measurement")
    began = time.perf_counter()
    if turn is not None:
        for number in range(WARM_UP):
            turn(number)
    wanted = job.seconds / max((time.perf_counter() - began) / WARM_UP, 1e-9) if turn is not None else MOST
    turns = min(world.all_gather_json(wanted, what="the number of exchanges"))
    times: list[float] = []
    gc.disable()
    try:
        if turn is not None:
            for number in range(WARM_UP, WARM_UP + int(max(FEWEST, min(MOST, turns)))):
                began = time.perf_counter()
                turn(number)
                times.append(time.perf_counter() - began)
    finally:
        gc.enable()
    medians = world.all_gather_json(statistics.median(times) if times else 0.0, what="the measured times")
    return float(max(medians))
