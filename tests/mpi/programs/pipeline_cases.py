"""Trains each run of a list, one after the other, on the ranks of one job: `pipeline_cases.py LIST.json`.

The list holds pairs of a run file and what to resume from (or null). Rank 0 names each on stderr before its lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World


def main(world: World) -> int:
    for run_file, resume in json.loads(Path(sys.argv[1]).read_text()):
        if world.rank == 0:
            print(f"run {run_file}", file=sys.stderr, flush=True)
        code = train(world, TrainOptions(run_file=run_file, resume=resume))
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
