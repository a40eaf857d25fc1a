#!/usr/bin/env python3
"""Measures how fast plans are made: of published profiles, and of a long chain for many ranks in several regimes.

python tools/plan_speed.py [--layers 1000] [--nodes 128] [--json]
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import click

from hpcpipe.planning.problem import Problem
from hpcpipe.planning.profile import LayerCost, Profile, load_profile
from hpcpipe.planning.search import partition
from hpcpipe.planning.topology import Level, Topology

PROFILES = Path(__file__).resolve().parents[1] / "tests" / "data" / "profiles"
NODE = 8
# Seconds of F, bytes of parameters and of an output: what is slowest differs.
REGIMES = {
    "compute-bound": (1e-3, 1e5, 1e4),
    "all-reduce-bound": (1e-5, 1e8, 1e4),
    "cut-bound": (1e-4, 1e6, 1e8),
    "mixed": (1e-3, 4e6, 5e6),
}


def chain(layers: int, seconds: float, parameters: float, output: float) -> Profile:
    """Layers of random times and sizes around these."""
    source = random.Random(layers)
    costs = []
    for index in range(layers):
        nbytes = round(parameters * source.uniform(0, 3))
        costs.append(
            LayerCost(
                name=f"layer{index}",
                forward_s=seconds * source.uniform(0.2, 2),
                backward_s=2 * seconds * source.uniform(0.2, 2),
                output_bytes=round(output * source.uniform(0.1, 3)),
                parameter_bytes=nbytes,
                state_bytes=nbytes,
                saved_bytes=round(2 * output),
            )
        )
    return Profile(layers=tuple(costs), edges=tuple((i, i + 1) for i in range(layers - 1)), rows=1)


def cluster(nodes: int, ranks: int) -> Topology:
    return Topology(
        levels=(
            Level(name="node", size=ranks, bandwidth=1e11, latency_s=5e-6),
            Level(name="network", size=nodes * ranks, bandwidth=1.25e10, latency_s=2e-5),
        )
    )


def cases(layers: int, nodes: int) -> list[tuple[str, Problem]]:
    """Names and problems."""
    found = [
        (
            f"{name}, 4 x 4",
            Problem(
                profile=load_profile(PROFILES / f"{name}.txt"), topology=cluster(4, 4), ranks=16, policy="stash"
            ),
        )
        for name in ("vgg16", "resnet50", "gnmt8")
    ]
    for regime, sizes in REGIMES.items():
        profile = chain(layers, *sizes)
        everything = sum(4 * layer.parameter_bytes + 3 * layer.saved_bytes for layer in profile.layers)
        for limit in (None, everything // 15):
            problem = Problem(
                profile=profile,
                topology=cluster(nodes, NODE),
                ranks=nodes * NODE,
                memory_bytes=limit,
                policy="stash",
            )
            limited = "" if limit is None else ", limited memory"
            found.append((f"{layers} layers, {nodes} x {NODE}, {regime}{limited}", problem))
    return found


@click.command()
@click.option("--layers", metavar="N", type=click.IntRange(2), default=1000, show_default=True)
@click.option("--nodes", metavar="N", type=click.IntRange(1), default=128, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def main(layers: int, nodes: int, as_json: bool) -> None:
    """Time the partitioner; seconds of CPU are what counts on a machine that does other things, too."""
    for name, problem in cases(layers, nodes):
        wall, cpu = time.perf_counter(), time.process_time()
        split = partition(problem)
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        if as_json:
            found = {"case": name, "stages": len(split.stages), "bottleneck_s": split.bottleneck_s}
            click.echo(json.dumps({**found, **spent}))
        else:
            click.echo(
                f"{name}: {spent['wall_s']:.2f} s ({spent['cpu_s']:.2f} s of CPU), {len(split.stages)} stages, "
                f"{split.bottleneck_s:.4g} s a minibatch"
            )


if __name__ == "__main__":
    main()
