#!/usr/bin/env python3
"""Measures how much checkpoints slow training: blocks of minibatches with one checkpoint against blocks without.

Both kinds run in one job, in turns; a block's checkpoint is taken after its first minibatches and written in the
background while the rest of the block trains, as with checkpoint.every = BLOCK.

    mpirun -n 2 python tools/checkpoint_cost.py [--block 50] [--turns 4] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import click

from hpcpipe.bench.pipeline import Side, prepare, side
from hpcpipe.engine.assemble import lay_out
from hpcpipe.engine.checkpoints import Checkpoints
from hpcpipe.engine.committing import Committer
from hpcpipe.engine.steering import Steering
from hpcpipe.schedule import Schedule
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World

RUN = """
[model]
name = "mlp"
in_features = 1280
width = 1280
depth = 15
out_features = 1280
[data]
name = "synthetic"
shape = [1280]
classes = 1280
batch = 192
rows = 9600
[pipeline]
policy = "stash"
[optimizer]
name = "sgd"
lr = 0.01
momentum = 0.9
[eval]
at_end = false
"""


class Cuts(Steering):
    """Cuts where the benchmark asks for them."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, every=0)
        self.at: set[int] = set()

    def cuts_at(self, minibatch: int) -> bool:
        return minibatch in self.at

    def cut_between(self, oldest: int, minibatch: int) -> bool:
        return any(oldest <= cut < minibatch for cut in self.at)


@click.command()
@click.option("--block", default=50, show_default=True, help="Minibatches from one checkpoint to the next.")
@click.option("--turns", default=4, show_default=True, help="Blocks of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(block: int, turns: int, as_json: bool) -> None:
    """Compare the time of blocks with and without a checkpoint."""
    sys.exit(run_job(lambda world: _measure(world, block, turns, as_json)))


def _measure(world: World, block: int, turns: int, as_json: bool) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(world.broadcast_json(scratch, what="the folder for checkpoints"))
        run_file = Path(scratch) / "run.toml"
        run_file.write_text(RUN)
        total = (2 * turns + 1) * block + 4 * world.size
        config, data = prepare(world, str(run_file), (f"run.max_steps={total}", f"run.epochs={total}"))
        _, _, schedule = lay_out(config, data, world.size)
        cuts = Cuts(schedule)
        committer = Committer(
            folder / "checkpoints",
            meta={},
            keep_last=1,
            keep_every=None,
            say=lambda line: click.echo(line, err=True),
        )
        checkpoints = Checkpoints(committer, world=world, waiter=world.waiter, places=1)
        trainer, transport = side(world, config, data, steering=cuts, checkpoints=checkpoints)
        trainer.advance(block)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * turns):
            with_checkpoint = turn % 2 == 1
            if with_checkpoint:
                cuts.at = {trainer.done + 2}
            seconds[with_checkpoint].append(_block_seconds(world, trainer, block))
        transport.finish(discard=True)
        trainer.forget()
        checkpoints.finish()
        sizes = [f.stat().st_size for f in (folder / "checkpoints").rglob("*.h5")] if world.rank == 0 else []
        world.barrier("rank 0 to look at the files")
    if world.rank == 0:
        ratios = [w / o for w, o in zip(seconds[True], seconds[False], strict=True)]
        result = {
            "minibatch_ms": statistics.median(seconds[False]) / block * 1e3,
            "checkpoint_mb_per_rank": min(sizes) / 1e6,
            "write_seconds": checkpoints.write_seconds,
            "without_s": seconds[False],
            "with_s": seconds[True],
            "slowdown": statistics.median(ratios) - 1,
        }
        if as_json:
            click.echo(json.dumps(result))
        else:
            click.echo(
                f"a checkpoint of {result['checkpoint_mb_per_rank']:.0f} MB a rank every {block} minibatches of "
                f"{result['minibatch_ms']:.0f} ms slows training by {result['slowdown']:.1%}"
            )
    return 0


def _block_seconds(world: World, trainer: Side, block: int) -> float:
    """Time of one block at the slowest rank."""
    _, own = trainer.advance(block)
    return float(max(world.all_gather_json(own, what="the block to end on all ranks")))


if __name__ == "__main__":
    main()
