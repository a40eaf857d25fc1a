"""`bench link` on a few sizes only. usage: transport_link.py"""

from __future__ import annotations

import json
import sys

import torch

from hpcpipe.bench.link import measure
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World


def main(world: World) -> int:
    torch.set_num_threads(1)
    results = measure(world, torch.device("cpu"), cuda_aware=False, sizes=(8, 1 << 16))
    if world.rank == 0:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
