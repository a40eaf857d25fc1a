"""`hpcpipe plan`: which layers on which ranks, and why: from a profile alone, without model, MPI or GPU.

Thin: it turns options into a problem and the answer into text, JSON and a plan file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpipe.errors import PlanError
from hpcpipe.planning.topology import Level, Topology, load_topology
from hpcpipe.planning.units import parse_bandwidth, parse_size, parse_time
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.policies import Policy

if TYPE_CHECKING:
    # NumPy comes with these; --help and a wrong option need none of it.
    from hpcpipe.planning.figures import Report
    from hpcpipe.planning.profile import Profile

_ASSUMED = (("node", 10e9, 5e-6), ("network", 1.25e9, 20e-6))
"""Name, bytes a second and latency where nothing is said: shared memory or PCIe, and 10 Gbit/s Ethernet."""
_MOST_RANKS = 2**17
"""More than any job has had; planning for these takes some GB and half a minute."""


@click.command()
@click.argument("profile", metavar="PROFILE", type=click.Path())
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(1, _MOST_RANKS),
    required=True,
    help="Ranks to plan for, all of them.",
)
@click.option(
    "--ranks-per-node", metavar="G", type=click.IntRange(1), help="Ranks 0..G-1 share a node, and so on."
)
@click.option(
    "--bandwidth",
    "bandwidths",
    metavar="SPEED",
    multiple=True,
    help="Of a link, one way, as 10GB/s or 1Gbit/s; with --ranks-per-node twice: inside a node, between nodes.",
)
@click.option(
    "--latency", "latencies", metavar="TIME", multiple=True, help="Of a message, as 20us; as often as --bandwidth."
)
@click.option(
    "--topology", metavar="FILE", type=click.Path(), help="Levels as `hpcpipe bench link` measured them."
)
@click.option("--memory", metavar="SIZE", help="Limit of each rank, as 40GiB.  [default: no limit]")
@click.option("--schedule", type=click.Choice(list(ORDERS)), help="[default: the profiled run's, or pipedream]")
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in Policy]),
    help="Which weights the passes of pipedream use.  [default: the profiled run's, or spectrain]",
)
@click.option(
    "--microbatches",
    metavar="M",
    type=click.IntRange(1),
    help=f"Parts of a minibatch ({', '.join(sorted(SYNCHRONOUS))}); a pass of the profile is one of them.  "
    "[default: the profiled run's, or as many as ranks]",
)
@click.option("--straight", is_flag=True, help="One rank a stage.")
@click.option("--max-stages", metavar="K", type=click.IntRange(1), help="[default: any number]")
@click.option(
    "--all-reduce",
    "--allreduce",
    "allreduce",
    type=click.Choice(["ring", "server"]),
    default="ring",
    show_default=True,
    help="How gradients are summed; server is PipeDream's count, twice a ring's bytes.",
)
@click.option(
    "--choose-by",
    type=click.Choice(["simulation", "cost"]),
    default="simulation",
    show_default=True,
    help="cost: the plan of the lowest modelled cost, even if the simulation finds an alternative faster.",
)
@click.option(
    "--rows", metavar="N", type=click.IntRange(1), help="Samples of a minibatch, if PROFILE is PipeDream's."
)
@click.option("-o", "--output", metavar="PLAN.json", type=click.Path(), help="Write the plan for `train --plan`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    profile: str,
    ranks: int,
    ranks_per_node: int | None,
    bandwidths: tuple[str, ...],
    latencies: tuple[str, ...],
    topology: str | None,
    memory: str | None,
    schedule: str | None,
    policy: str | None,
    microbatches: int | None,
    straight: bool,
    max_stages: int | None,
    allreduce: str,
    choose_by: str,
    rows: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Partition the model of PROFILE over ranks so that the slowest stage or link is as fast as can be.

    PROFILE is the file of `hpcpipe profile`, or a graph of PipeDream's profiler (graph.txt). Shows each stage, the
    predicted throughput and what the plan was chosen over.
    """
    from hpcpipe.planning.problem import Problem
    from hpcpipe.planning.profile import load_profile
    from hpcpipe.simulation.choice import best_plan

    if output is not None and not Path(output).absolute().parent.is_dir():
        raise PlanError(f"{output}: there is no folder {Path(output).absolute().parent}; make it first")
    joined, notes = _topology(ranks, ranks_per_node, bandwidths, latencies, topology)
    costs = load_profile(profile, rows=rows)
    schedule, policy, microbatches = _way(costs, schedule, policy, microbatches, ranks)
    problem = Problem(
        profile=costs,
        topology=joined,
        ranks=ranks,
        memory_bytes=None if memory is None else parse_size(memory),
        schedule=schedule,
        policy=policy,
        microbatches=microbatches,
        straight=straight,
        max_stages=max_stages,
        allreduce=allreduce,
    )
    if costs.unit != "samples":
        notes.append(
            f"{profile} does not say how many samples a minibatch has (--rows): throughput in minibatches/s"
        )
    _show(best_plan(problem, notes, by_cost=choose_by == "cost"), as_json, output)


def _topology(
    ranks: int,
    ranks_per_node: int | None,
    bandwidths: Sequence[str],
    latencies: Sequence[str],
    file: str | None,
) -> tuple[Topology, list[str]]:
    """The topology that the options describe, and a line for each thing that they leave open."""
    if file is not None:
        if ranks_per_node is not None or bandwidths or latencies:
            raise PlanError(
                "--topology: has levels of its own; leave out --ranks-per-node, --bandwidth and --latency"
            )
        return load_topology(file), []
    sizes = [ranks]
    if ranks_per_node is not None:
        # Whole nodes: the last one may be used in part.
        sizes = [ranks_per_node, -(-ranks // ranks_per_node) * ranks_per_node]
    if sizes[0] >= ranks:
        sizes = sizes[:1]
    given = {"--bandwidth": bandwidths, "--latency": latencies}
    for option, values in given.items():
        if values and len(values) != len(sizes) and not (ranks_per_node is not None and len(values) == 2):
            how = "inside a node and between nodes" if len(sizes) == 2 else "one level"
            raise PlanError(
                f"{option}: is needed {len(sizes)} time{'s' * (len(sizes) > 1)} ({how}), got {len(values)}; a "
                "topology of more levels needs --ranks-per-node or --topology"
            )
    levels = tuple(
        Level(
            name=name,
            size=size,
            bandwidth=parse_bandwidth(bandwidths[index]) if bandwidths else bandwidth,
            latency_s=parse_time(latencies[index]) if latencies else latency_s,
        )
        for index, (size, (name, bandwidth, latency_s)) in enumerate(zip(sizes, _ASSUMED, strict=False))
    )
    assumed = [option.removeprefix("--") for option, values in given.items() if not values]
    note = f"assumed: {' and '.join(assumed)} of the links; measure them with `hpcpipe bench link`"
    return Topology(levels=levels), [note] if assumed else []


def _way(
    profile: Profile, schedule: str | None, policy: str | None, microbatches: int | None, ranks: int
) -> tuple[str, str, int]:
    """Schedule, policy and microbatches: as asked, or as the run that was profiled, or the defaults."""
    about = profile.about
    if schedule is None:
        schedule = str(about["schedule"]) if about.get("schedule") in ORDERS else "pipedream"
    if policy is None:
        known = [each.value for each in Policy]
        policy = str(about["policy"]) if about.get("policy") in known else Policy.SPECTRAIN.value
    if microbatches is None:
        profiled = about.get("microbatches")
        microbatches = 1
        if schedule in SYNCHRONOUS:
            microbatches = profiled if isinstance(profiled, int) and profiled > 1 else ranks
    return schedule, policy, microbatches


def _show(report: Report, as_json: bool, output: str | None) -> None:
    from hpcpipe.planning.figures import report_table
    from hpcpipe.planning.plan_file import plan_of, save_plan
    from hpcpipe.planning.report import report_text

    table = report_table(report)
    if output is not None:
        save_plan(plan_of(report.problem, report.split, predicted=table), output)
    if as_json:
        click.echo(json.dumps(table))
        return
    click.echo(report_text(report))
    if output is not None:
        click.echo(f"\nwritten to {output}; train by it: hpcpipe train RUN.toml --plan {output}")
