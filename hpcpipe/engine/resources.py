"""What a rank computes on: its device and its threads, from the run file and from its place on its host.

Also whether MPI may be given that device's memory."""

from __future__ import annotations

import os
import resource

import torch

from hpcpipe.config import RunConfig
from hpcpipe.errors import ConfigError
from hpcpipe.transport.cuda import detect
from hpcpipe.transport.world import World


def choose_device(config: RunConfig, world: World) -> torch.device:
    """The GPU of this rank by its place on its host, or the CPU. Raises ConfigError without the wanted GPU."""
    available = torch.cuda.is_available()
    if config.run.device == "cpu" or (config.run.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError('run.device = "cuda", but torch sees no GPU on this host: see `hpcpipe doctor`')
    # With --gpus-per-task a rank sees its own device only, as device 0.
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    # torch makes its random generators, one a device, only when CUDA is first used.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_device(device)
    return device


def cuda_aware(config: RunConfig, world: World, device: torch.device) -> bool:
    """Whether MPI may be given the memory of `device`."""
    if device.type != "cuda":
        return False
    return detect(config.transport.cuda_aware, world.library, memory_kinds=world.memory_kinds).enabled


def set_threads(config: RunConfig, world: World) -> int:
    """Set and return this rank's compute threads: as asked, as OMP_NUM_THREADS says, or its share of the cores."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        neighbours = world.hosts.count(world.host)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    return torch.get_num_threads()


def peak_memory_bytes(device: torch.device) -> int:
    """The device's peak on a GPU, else the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
