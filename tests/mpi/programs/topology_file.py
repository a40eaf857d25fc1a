"""`bench link --topology` on small sizes. usage: topology_file.py FILE [HOST,HOST,...]: as if ranks were there"""

from __future__ import annotations

import sys

import torch

from hpcpipe.engine.links import measure_topology
from hpcpipe.planning.topology import save_topology
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World


def main(world: World) -> int:
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        world.hosts = sys.argv[2].split(",")
    found, _, _ = measure_topology(
        world,
        torch.device("cpu"),
        cuda_aware=False,
        message_bytes=(8, 1 << 12),
        sum_bytes=(1 << 10, 1 << 14),
        seconds=0.01,
    )
    if world.rank == 0:
        save_topology(found, sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
