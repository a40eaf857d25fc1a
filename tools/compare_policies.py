#!/usr/bin/env python3
"""Compares what staleness costs and what prediction wins back: digits, four tanh layers in four stages.

Every variant trains the same model on the same minibatches with the same learning rate, several seeds each; the
two sequential ones are the controls. One process owns all four stages, which gives the same bits as four ranks.

    python tools/compare_policies.py [--seeds 5] [--epochs 10] [--lr 0.08] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import click

from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.transport.job import run_job
from hpcpipe.transport.world import World

RUN = """
[run]
progress = "off"
log_every = 1
[model]
name = "mlp"
activation = "tanh"
hidden = [64, 64, 64]
[data]
name = "digits"
batch = 32
[pipeline]
stages = 4
[optimizer]
name = "sgd"
momentum = 0.9
[eval]
every = 1000000
"""

SEQUENTIAL = ("pipeline.schedule=gpipe",)
VARIANTS = {
    "sequential": SEQUENTIAL,
    "sequential + Nesterov": (*SEQUENTIAL, "optimizer.nesterov=true"),
    "stash": ("pipeline.policy=stash",),
    "none": ("pipeline.policy=none",),
    "spectrain, round_trip": ("pipeline.policy=spectrain", "pipeline.target=round_trip"),
    "spectrain, local": ("pipeline.policy=spectrain", "pipeline.target=local"),
    "spectrain, damped": ("pipeline.policy=spectrain", "pipeline.target=damped"),
}


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--epochs", default=10, show_default=True)
@click.option("--lr", default=0.08, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(seeds: int, epochs: int, lr: float, as_json: bool) -> None:
    """Print training loss (mean of the last epoch), test loss and test accuracy of each variant."""
    sys.exit(run_job(lambda world: _compare(world, seeds, epochs, lr, as_json)))


def _compare(world: World, seeds: int, epochs: int, lr: float, as_json: bool) -> int:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.toml"
        run_file.write_text(RUN)
        for name, overrides in VARIANTS.items():
            runs = []
            for seed in range(seeds):
                out = Path(folder) / name.replace(" ", "-") / str(seed)
                settings = (
                    *overrides,
                    f"run.seed={seed}",
                    f"run.epochs={epochs}",
                    f"optimizer.lr={lr}",
                    f"run.out={str(out)!r}",
                )
                train(world, TrainOptions(run_file=str(run_file), overrides=settings))
                runs.append(_figures(out, epochs - 1))
            results[name] = {
                key: statistics.mean(run[key] for run in runs) for key in ("train_loss", "test_loss", "accuracy")
            }
            results[name]["spread"] = statistics.pstdev(run["train_loss"] for run in runs)
    recovered = _recovered(results)
    if as_json:
        click.echo(json.dumps({"lr": lr, "seeds": seeds, "epochs": epochs, "recovered": recovered, **results}))
        return 0
    click.echo(f"digits, 4 stages, lr {lr}, momentum 0.9, {epochs} epochs, mean of {seeds} seeds")
    click.echo(f"{'':24s}{'train loss':>12s}{'± over seeds':>14s}{'test loss':>12s}{'test accuracy':>15s}")
    for name, row in results.items():
        click.echo(
            f"{name:24s}{row['train_loss']:12.4f}{row['spread']:14.4f}{row['test_loss']:12.4f}{row['accuracy']:15.4f}"
        )
    click.echo(f"of the gap in training loss from stash to sequential, round_trip recovers {recovered:.0%}")
    return 0


def _figures(out: Path, last_epoch: int) -> dict[str, float]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in entries if "loss" in e and e["epoch"] == last_epoch]
    test = next(e["evaluation"] for e in reversed(entries) if "evaluation" in e)
    return {"train_loss": statistics.mean(losses), "test_loss": test["loss"], "accuracy": test["accuracy"]}


def _recovered(results: dict[str, dict[str, float]]) -> float:
    """Share of the loss gap from stash to sequential that round_trip wins back."""
    stash, sequential = results["stash"]["train_loss"], results["sequential"]["train_loss"]
    return (stash - results["spectrain, round_trip"]["train_loss"]) / (stash - sequential)


if __name__ == "__main__":
    main()
