"""What the transport costs over raw MPI: the same bytes exchanged by both, in one run, in turn.

Two ranks send to each other at once, as two stages in the steady state do. The raw side uses mpi4py's Isend, Irecv
and Waitall on buffers that are known before; the other side a pair of channels with headers, checks and rings.
Both receive into as many buffers in turn, so that caches serve them alike.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from hpcpipe.errors import LauncherError, UserError

if TYPE_CHECKING:
    import torch

    from hpcpipe.transport.world import World

SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DEPTH = 2
RAW_TAG = 2
WARM_UP = 6
SECONDS_PER_SIZE = 0.4
FEWEST, MOST = 25, 2000


class LinkResult(TypedDict):
    """One size: medians over exchanges, in microseconds, and bandwidth one way in GB/s (10⁹ bytes)."""

    bytes: int
    raw_us: float
    ours_us: float
    overhead_us: float
    raw_gb_s: float
    ours_gb_s: float
    fraction_of_raw: float


def measure(
    world: World, device: torch.device, *, cuda_aware: bool, sizes: Sequence[int] = SIZES
) -> list[LinkResult]:
    """Measure every size on both of two ranks; every rank gets the same results.

    Raises LauncherError for another number of ranks.
    """
    if world.size != 2:
        raise LauncherError(
            f"bench link needs 2 ranks, not {world.size}: start it with mpirun -n 2 hpcpipe bench link, or give "
            "--topology FILE for any number"
        )
    return [_measure_size(world, device, cuda_aware, size) for size in sizes]


def _measure_size(world: World, device: torch.device, cuda_aware: bool, size: int) -> LinkResult:
    import torch

    from hpcpipe.engine.links import digits
    from hpcpipe.transport.message import ChannelId, Kind
    from hpcpipe.transport.transport import Transport

    transport = Transport(world, world.waiter, ranks_of_stage=((0,), (1,)), device=device, cuda_aware=cuda_aware)
    out = ChannelId(source=world.rank, destination=1 - world.rank, kind=Kind.ACTIVATION)
    back = ChannelId(source=1 - world.rank, destination=world.rank, kind=Kind.ACTIVATION)
    sender = transport.sender(out, depth=DEPTH, full_rows=None)
    receiver = transport.receiver(back, depth=DEPTH)
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    raw = _raw_exchange(world, tensor, device if cuda_aware else torch.device("cpu"))
    turn = 0

    def ours() -> None:
        nonlocal turn
        sender.send((tensor,), minibatch=turn)
        receiver.release(receiver.receive(minibatch=turn))
        turn += 1

    world.barrier("the start of a measurement")
    first = time.perf_counter()
    for _ in range(WARM_UP):
        raw()
        ours()
    per_round = (time.perf_counter() - first) / WARM_UP
    wanted = int(SECONDS_PER_SIZE / max(per_round, 1e-9))
    rounds = max(FEWEST, min(MOST, world.broadcast_json(wanted, what="the number of exchanges")))
    gc.disable()
    try:
        raw_us, ours_us = _in_turn(raw, ours, rounds)
    finally:
        gc.enable()
    transport.finish()
    both = world.all_gather_json([raw_us, ours_us], what="the measured times")
    raw_us, ours_us = (max(times[side] for times in both) for side in (0, 1))
    return LinkResult(
        bytes=size,
        raw_us=round(raw_us, 3),
        ours_us=round(ours_us, 3),
        overhead_us=round(ours_us - raw_us, 3),
        raw_gb_s=digits(size / raw_us / 1e3),
        ours_gb_s=digits(size / ours_us / 1e3),
        fraction_of_raw=round(raw_us / ours_us, 4),
    )


def _raw_exchange(world: World, tensor: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """The same exchange by mpi4py alone: of the tensor's own memory, or of device memory if MPI may have it."""
    import numpy as np

    from hpcpipe.transport.device import CudaDevice

    size = tensor.numel()
    source: Any
    targets: list[Any]
    if device.type == "cuda":
        api = CudaDevice(device)
        source, *targets = (api.allocate(size) for _ in range(1 + DEPTH))
    else:
        source, targets = tensor.cpu().numpy(), [np.zeros(size, np.uint8) for _ in range(DEPTH)]
    communicator, peer = world.communicator, 1 - world.rank
    turn = 0

    def exchange() -> None:
        nonlocal turn
        requests = [
            communicator.Irecv(targets[turn % DEPTH], peer, RAW_TAG),
            communicator.Isend(source, peer, RAW_TAG),
        ]
        type(requests[0]).Waitall(requests)
        turn += 1

    return exchange


def _in_turn(raw: Callable[[], None], ours: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median microseconds of each; blocks of a few exchanges, the first of each block left out of the figures."""
    times: tuple[list[float], list[float]] = ([], [])
    block = 5
    for _ in range(rounds // block + 1):
        for exchange, kept in ((raw, times[0]), (ours, times[1])):
            exchange()
            for _ in range(block):
                started = time.perf_counter()
                exchange()
                kept.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


@click.command("link")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the tensors live.",
)
@click.option(
    "--cuda-aware",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Whether MPI may be given device memory.",
)
@click.option(
    "--topology",
    "topology_file",
    metavar="FILE",
    help="Measure how all ranks are joined, within hosts and between them, and write it for `hpcpipe plan`.",
)
def link(as_json: bool, device: str, cuda_aware: str, topology_file: str | None) -> None:
    """Exchange messages between two ranks, or with --topology between all ranks of a job.

    mpirun -n 2 hpcpipe bench link compares hpcpipe's messages with raw MPI. mpirun -n N hpcpipe bench link
    --topology FILE measures messages and all-reduces within a host and between hosts.
    """
    from hpcpipe.transport.job import run_job

    sys.exit(run_job(lambda world: _run(world, as_json, device, cuda_aware, topology_file)))


def _run(world: World, as_json: bool, device_name: str, setting: str, topology_file: str | None) -> int:
    import torch

    from hpcpipe.transport.cuda import detect

    torch.set_num_threads(1)
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if device_name == "cuda":
        with world.together("choosing the device"):
            if not torch.cuda.is_available():
                raise UserError("--device cuda: torch sees no GPU on this host; see `hpcpipe doctor`")
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    awareness = detect(setting, world.library, memory_kinds=world.memory_kinds)
    aware = awareness.enabled and device.type == "cuda"
    if topology_file is not None:
        return _topology(world, device, aware, Path(topology_file), as_json)
    results = measure(world, device, cuda_aware=aware)
    if world.rank == 0:
        _report(world, device, awareness.how, results, as_json)
    return 0


def _topology(world: World, device: torch.device, cuda_aware: bool, output: Path, as_json: bool) -> int:
    from hpcpipe.engine.links import measure_topology, table
    from hpcpipe.planning.topology import save_topology, topology_table

    found, messages, sums = measure_topology(world, device, cuda_aware=cuda_aware)
    with world.together("writing the topology"):
        if world.rank == 0:
            save_topology(found, output)
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps(topology_table(found)))
            return 0
        hosts = len(set(world.hosts))
        click.echo(
            f"{world.library}, {world.size} ranks on {hosts} host{'s' if hosts > 1 else ''}, tensors on {device}"
        )
        for line in [*table(messages, sums), f"written to {output}"]:
            click.echo(line)
    return 0


def _report(world: World, device: torch.device, how: str, results: list[LinkResult], as_json: bool) -> None:
    if as_json:
        header = {"mpi": world.library, "device": str(device), "cuda_aware": how, "hosts": world.hosts}
        click.echo(json.dumps({**header, "sizes": results}))
        return
    click.echo(f"{world.library} between {' and '.join(world.hosts)}, tensors on {device}")
    click.echo(
        f"{'bytes':>10} {'raw µs':>10} {'ours µs':>10} {'overhead':>9} {'raw GB/s':>9} {'ours':>8} {'of raw':>7}"
    )
    for row in results:
        click.echo(
            f"{row['bytes']:>10} {row['raw_us']:>10.2f} {row['ours_us']:>10.2f} {row['overhead_us']:>9.2f} "
            f"{row['raw_gb_s']:>9.3f} {row['ours_gb_s']:>8.3f} {row['fraction_of_raw']:>7.3f}"
        )
