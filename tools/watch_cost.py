#!/usr/bin/env python3
"""Measures what the watch over lost ranks costs a run that loses none: small steps with and without it, in turns.

    python tools/watch_cost.py [--ranks 2] [--minibatches 400] [--turns 5] [--json]

Each turn is one job with the watch (sockets, the thread that answers, what a rank notes for it) and one without,
the one that goes first taking turns, too. Steps are as small as steps get, so that a fixed cost shows most.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import click
from torture_parts.jobs import launch_line, rank_environment

from hpcpipe.bench.pipeline import prepare, side
from hpcpipe.transport.world import World

RUN = """
[model]
name = "mlp"
in_features = 64
width = 64
depth = 8
out_features = 10
[data]
name = "synthetic"
shape = [64]
classes = 10
batch = 32
rows = 3200
[pipeline]
policy = "stash"
[optimizer]
name = "sgd"
lr = 0.01
[eval]
at_end = false
"""
SETTLE = 20
JOB_LIMIT_S = 300


def train(minibatches: int, *, watched: bool) -> None:
    """One rank of one job; rank 0 prints the seconds of a minibatch."""
    world = World.connect(watched=watched)
    total = 2 * (minibatches + SETTLE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(RUN)
        config, data = prepare(world, str(path), (f"run.max_steps={total}", f"run.epochs={total}"))
    pipeline, transport = side(world, config, data)
    pipeline.advance(SETTLE)
    world.barrier("all ranks to begin")
    count, own = pipeline.advance(minibatches)
    seconds = max(world.all_gather_json(own, what="the pipeline to end")) / count
    transport.finish(discard=True)
    pipeline.forget()
    if world.rank == 0:
        print(seconds)
    world.disconnect()


def job(ranks: int, minibatches: int, *, watched: bool) -> float:
    """Run one job; the seconds of a minibatch. Raises click.ClickException where it fails."""
    words = [__file__, "--as-rank", "watched" if watched else "unwatched", "--minibatches", str(minibatches)]
    done = subprocess.run(
        launch_line(ranks, words),
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"a job ended with exit code {done.returncode}:\n{done.stderr}")
    return float(done.stdout)


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2), help="Ranks of each job.")
@click.option(
    "--minibatches", default=400, show_default=True, type=click.IntRange(1), help="Minibatches of a job."
)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Pairs of jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--as-rank", type=click.Choice(["watched", "unwatched"]), hidden=True)
def main(ranks: int, minibatches: int, turns: int, as_json: bool, as_rank: str | None) -> None:
    """Print how long a minibatch takes with the watch, without it, and the ratio."""
    if as_rank is not None:
        train(minibatches, watched=as_rank == "watched")
        return
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for watched in (True, False) if turn % 2 == 0 else (False, True):
            times[watched].append(job(ranks, minibatches, watched=watched))
    ratios = [with_it / without for with_it, without in zip(times[True], times[False], strict=True)]
    result = {
        "ranks": ranks,
        "watched_us": 1e6 * statistics.median(times[True]),
        "unwatched_us": 1e6 * statistics.median(times[False]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(
            f"{ranks} ranks: {result['watched_us']:.0f} us a minibatch with the watch, "
            f"{result['unwatched_us']:.0f} us without, ratio {result['ratio']:.3f} "
            f"(turns: {', '.join(f'{ratio:.3f}' for ratio in ratios)})"
        )


if __name__ == "__main__":
    main()
