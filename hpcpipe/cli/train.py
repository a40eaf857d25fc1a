"""`hpcpipe train`: the command that every rank of a job runs."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option("--resume", metavar="auto|PATH", help="Go on from the newest valid checkpoint, or from PATH.")
@click.option("--overwrite", is_flag=True, help="Start over where earlier checkpoints are.")
@click.option("--out", metavar="DIR", help="Folder for metrics and checkpoints (run.out).")
@click.option(
    "--plan", metavar="FILE", help="Layers and ranks of each stage, as `hpcpipe plan` wrote it (pipeline.plan)."
)
@click.option(
    "--progress", type=click.Choice(["auto", "bar", "lines", "off"]), help="How to show progress (run.progress)."
)
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
def train(
    run_file: str,
    resume: str | None,
    overwrite: bool,
    out: str | None,
    plan: str | None,
    progress: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Train the model of RUN.toml as a pipeline over the ranks of this job.

    Started under mpirun or srun, one process per rank; each owns a stage or a replica of one. Exit codes: 0 done,
    2 wrong input, 75 stopped by request with a committed checkpoint (run the same command again), 143 ended at
    once by a second SIGTERM, 1 anything else.
    """
    from hpcpipe.engine.signals import DEFAULT_SIGNALS, StopSignals

    # Before the imports that take seconds: whoever asks for a stop meanwhile is heard, and does not kill the job.
    signals = StopSignals()
    signals.listen(DEFAULT_SIGNALS)

    from hpcpipe.engine.train import TrainOptions
    from hpcpipe.engine.train import train as run
    from hpcpipe.transport.job import run_job

    chosen = (("run.out", out), ("pipeline.plan", plan), ("run.progress", progress))
    given = [f"{key}={value!r}" for key, value in chosen if value is not None]
    options = TrainOptions(run_file=run_file, overrides=(*overrides, *given), resume=resume, overwrite=overwrite)
    sys.exit(run_job(lambda world: run(world, options, signals), leaving=signals.release))
