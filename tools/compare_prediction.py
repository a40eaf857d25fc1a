#!/usr/bin/env python3
"""How well the predicted throughput of a plan meets the measured one: both in one job, in turns, medians compared.

    mpirun -n 2 python tools/compare_prediction.py jobs/fashion-vgg.toml [--max-stages K] [--set a.b=VALUE]

Each turn profiles the model on all ranks at the same time and simulates the plan with that profile, then trains by
the plan for some minibatches in the steady state. The plan is made from the first profile and the measured links.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import torch

from hpcpipe.bench.pipeline import prepare, side
from hpcpipe.config import RunConfig
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.engine.autoplan import new_plan
from hpcpipe.engine.measure import DEFAULT_REPEATS, measure
from hpcpipe.planning.plan_file import PlanFile, save_plan
from hpcpipe.planning.report import show_split
from hpcpipe.simulation.predict import predict
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World

CPU = torch.device("cpu")
CHUNK = 3


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option("--minibatches", default=30, show_default=True, help="Minibatches trained in each turn.")
@click.option("--turns", default=7, show_default=True, help="Turns of each side.")
@click.option("--sweeps", default=6, show_default=True, help="Sweeps over all layers in each turn.")
@click.option("--max-stages", type=click.IntRange(1), help="[default: any number]")
@click.option("--straight", is_flag=True, help="One rank a stage.")
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    run_file: str,
    minibatches: int,
    turns: int,
    sweeps: int,
    max_stages: int | None,
    straight: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the predicted with the measured throughput of RUN.toml's plan on the ranks of this job."""

    def run(world: World) -> int:
        total = f"{8 * minibatches + 20 * world.size}"
        unsplit = ("pipeline.balance=parameters", f"run.max_steps={total}", f"run.epochs={total}")
        config, data = prepare(world, run_file, (*unsplit, *overrides))
        plan = new_plan(
            config,
            world,
            data,
            device=CPU,
            say=lambda line: None,
            sweeps=DEFAULT_REPEATS,
            straight=straight,
            max_stages=max_stages,
        )
        predicted, measured = [], []
        for _ in range(turns):
            profile = measure(config, data, world, device=CPU, repeats=sweeps, concurrent=True)
            predicted.append(predict(replace(plan, profile=profile)).samples_per_s)
            measured.append(trained(world, config, data, plan, minibatches))
        if world.rank == 0:
            report(plan, predicted, measured, as_json)
        return 0

    sys.exit(run_job(run))


def trained(world: World, config: RunConfig, data: Dataset, plan: PlanFile, minibatches: int) -> float:
    """Samples a second of the steady state under a plan, at its slowest rank.

    The median over a few minibatches each, as the profile's times are medians: what disturbs the machine now and
    then counts on neither side.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        pipeline = config.pipeline.model_copy(update={"plan": str(path)})
        one, transport = side(world, config.model_copy(update={"pipeline": pipeline}), data)
        world.barrier("all ranks to have read the plan")
    one.advance(4 * world.size)
    world.barrier("all ranks to begin")
    rates = [one.samples_per_s(*one.advance(CHUNK)) for _ in range(minibatches // CHUNK)]
    everyone = world.all_gather_json(statistics.median(rates), what="the turn to end")
    transport.finish(discard=True)
    one.forget()
    return min(everyone)


def report(plan: PlanFile, predicted: list[float], measured: list[float], as_json: bool) -> None:
    """Both sides and their ratio, turn by turn."""
    ratios = [ours / real for ours, real in zip(predicted, measured, strict=True)]
    found = {
        "ranks_of_the_stages": show_split(plan.replicas),
        "layers": [len(stage.layers) for stage in plan.stages],
        "predicted_samples_per_s": statistics.median(predicted),
        "measured_samples_per_s": statistics.median(measured),
        "predicted_over_measured": statistics.median(predicted) / statistics.median(measured),
        "turns": ratios,
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"plan: {found['ranks_of_the_stages']} ranks, {found['layers']} layers")
    click.echo(f"predicted {found['predicted_samples_per_s']:.1f} samples/s, median of {len(ratios)} turns")
    click.echo(f"measured  {found['measured_samples_per_s']:.1f} samples/s")
    click.echo(
        f"predicted / measured {found['predicted_over_measured']:.3f} "
        f"(single turns {min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
