"""What a rank computes on: its device and its threads, from the run file and from its place on its host.

Also whether MPI may be given that device's memory."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hpcpipe.config import RunConfig
from hpcpipe.engine.placement import Placement
from hpcpipe.errors import ConfigError
from hpcpipe.transport.cuda import detect
from hpcpipe.transport.launcher import cpus_per_task
from hpcpipe.transport.world import World


@dataclass(frozen=True, kw_only=True)
class Threads:
    """How many threads a rank computes with, and what says so."""

    count: int
    source: str

    @property
    def line(self) -> str:
        """For the first lines of a run."""
        return f"threads: {self.count} a rank ({self.source})"


def choose_device(config: RunConfig, placement: Placement) -> torch.device:
    """The GPU of this rank by its number on its host, or the CPU. Raises ConfigError without the wanted GPU."""
    available = torch.cuda.is_available()
    if config.run.device == "cpu" or (config.run.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError('run.device = "cuda", but torch sees no GPU on this host: see `hpcpipe doctor`')
    # CUDA_VISIBLE_DEVICES may leave fewer than there are: with --gpus-per-task only the rank's own, as device 0.
    device = torch.device("cuda", placement.local_rank % torch.cuda.device_count())
    # torch makes its random generators, one a device, only when CUDA is first used.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_device(device)
    return device


def shared_devices(world: World, device: torch.device) -> list[str]:
    """A line if this rank's GPU is another rank's, too; every rank calls it."""
    mine = None if device.type != "cuda" else _identity(device)
    everyone = world.all_gather_json([world.host, mine], what="the GPUs of all ranks")
    return sharing_of(world.rank, [(host, identity) for host, identity in everyone])


def sharing_of(rank: int, devices: Sequence[tuple[str, str | None]]) -> list[str]:
    """The line of `rank`, the same for all that share a GPU. `devices`: each rank's host, and its GPU or None."""
    host, identity = devices[rank]
    sharing = [str(other) for other, device in enumerate(devices) if device == (host, identity)]
    if identity is None or len(sharing) == 1:
        return []
    return [
        f"ranks {', '.join(sharing[:-1])} and {sharing[-1]} share a GPU ({identity} of {host}): they wait for "
        "each other; start one rank a GPU if that is not meant"
    ]


def _identity(device: torch.device) -> str:
    """What names a GPU of a host whichever of them a rank sees."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        return f"GPU {uuid}"
    index = device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"GPU {visible[index].strip()}" if index < len(visible) and visible[index] else f"GPU {index}"


def cuda_aware(config: RunConfig, world: World, device: torch.device) -> bool:
    """Whether MPI may be given the memory of `device`."""
    if device.type != "cuda":
        return False
    return detect(config.transport.cuda_aware, world.library, memory_kinds=world.memory_kinds).enabled


def set_threads(config: RunConfig, placement: Placement) -> Threads:
    """Set and return this rank's threads, by the first of: the run file, OMP_NUM_THREADS, its allocation."""
    threads = choose_threads(config.run.threads, os.environ, placement)
    if threads is not None:
        torch.set_num_threads(threads.count)
        return threads
    # OpenMP has read it before torch was imported, with all that its syntax allows.
    return Threads(count=torch.get_num_threads(), source="OMP_NUM_THREADS")


def choose_threads(asked: int | None, environment: Mapping[str, str], placement: Placement) -> Threads | None:
    """The threads of a rank for which the run file asks for `asked`; None where OMP_NUM_THREADS decides.

    Never the number of cores of the host: CPUs that the rank may not run on, or that it shares with other ranks,
    do not count, nor does time that its cgroup does not leave to it.
    """
    if asked is not None:
        return Threads(count=asked, source="run.threads")
    if environment.get("OMP_NUM_THREADS"):
        return None
    found, source = placement.share, _cpus_in_words(placement)
    if placement.quota is not None and placement.quota < found:
        found, source = placement.quota, _quota_in_words(placement)
    # A little more than a whole number stays one: shares are sums of fractions.
    count = max(1, math.floor(found + 1e-6))
    task = cpus_per_task(environment)
    if task is None:
        return Threads(count=count, source=source)
    if task <= count:
        return Threads(count=task, source="SLURM_CPUS_PER_TASK")
    hint = ", but srun does not take --cpus-per-task over from sbatch" if placement.sharing == 1 else ""
    return Threads(count=count, source=f"{source}; SLURM_CPUS_PER_TASK says {task}{hint}")


def _cpus_in_words(placement: Placement) -> str:
    cpus = f"{placement.cpus} CPU{'s' if placement.cpus > 1 else ''}"
    if placement.sharing == 1:
        return f"the {cpus} that it may run on alone"
    return f"the {cpus} that {placement.sharing} ranks of a host share"


def _quota_in_words(placement: Placement) -> str:
    assert placement.quota is not None
    whole = f"{placement.quota * placement.quota_sharing:g}"
    return f"its cgroup's limit of {whole} CPUs for {placement.quota_sharing} ranks of a host"


def peak_memory_bytes(device: torch.device) -> int:
    """The device's peak on a GPU, else the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
