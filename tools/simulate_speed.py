#!/usr/bin/env python3
"""Measures how fast runs on many ranks are simulated, and that memory does not grow with their length.

Each simulation runs in a process of its own, whose peak memory is told.

    python tools/simulate_speed.py [--ranks 1024] [--minibatches 200 --minibatches 1000] [--policy spectrain]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import click

from hpcpipe.planning.topology import Level, Topology
from hpcpipe.schedule import Policy, Schedule
from hpcpipe.simulation import StageCosts, simulate

NODE = 8
COSTS = StageCosts(
    forward_s=1e-3,
    backward_s=2e-3,
    update_s=1e-4,
    output_bytes=2_000_000,
    input_gradient_bytes=2_000_000,
    ready=((1e-3, 10_000_000), (2e-3, 10_000_000)),
    version_bytes=20_000_000,
    saved_bytes=5_000_000,
)


def measure(stages: int, ranks: int, minibatches: int, policy: str) -> dict[str, float]:
    """Simulate one run in this process."""
    replicas = ranks // stages
    schedule = Schedule(
        name="pipedream",
        stages=stages,
        minibatches=minibatches,
        policy=Policy(policy),
        replicas=(replicas,) * stages if replicas > 1 else (),
    )
    topology = Topology(
        levels=(
            Level(name="node", size=NODE, bandwidth=1e11, latency_s=2e-6),
            Level(name="cluster", size=-(-ranks // NODE) * NODE, bandwidth=2e10, latency_s=5e-6),
        )
    )
    owners = [range(stage * replicas, (stage + 1) * replicas) for stage in range(stages)]
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate(schedule, [COSTS] * stages, topology, owners)
    return {
        "stages": stages,
        "replicas": replicas,
        "minibatches": minibatches,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "minibatches_per_s": found.minibatches_per_s,
        "bubble": found.bubble,
    }


@click.command()
@click.option("--ranks", metavar="N", type=click.IntRange(16), default=1024, show_default=True)
@click.option("--minibatches", metavar="N", type=click.IntRange(1), multiple=True, default=(200, 1000))
@click.option(
    "--policy", type=click.Choice([policy.value for policy in Policy]), default="spectrain", show_default=True
)
@click.option(
    "--stages", metavar="N", type=click.IntRange(1), multiple=True, help="[default: 16, and one per rank]"
)
@click.option("--one", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def main(
    ranks: int, minibatches: tuple[int, ...], policy: str, stages: tuple[int, ...], one: bool, as_json: bool
) -> None:
    """Time simulations of a straight pipeline and of one with replicated stages."""
    if one:
        click.echo(json.dumps(measure(stages[0], ranks, minibatches[0], policy)))
        return
    for count in stages or (16, ranks):
        for length in minibatches:
            case = ["--ranks", ranks, "--minibatches", length, "--policy", policy, "--stages", count, "--one"]
            child = subprocess.run(
                [sys.executable, __file__, *map(str, case)], capture_output=True, text=True, check=True
            )
            found = json.loads(child.stdout)
            if as_json:
                click.echo(json.dumps(found))
            else:
                click.echo(
                    f"{count:5d} stages x {found['replicas']:4d}, {length:6d} minibatches: "
                    f"{found['wall_s']:6.1f} s ({found['cpu_s']:.1f} s of CPU), {found['peak_mib']:.0f} MiB"
                )


if __name__ == "__main__":
    main()
