"""Small simulations for tests: costs in whole seconds, links of one byte a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from hpcpipe.planning.topology import Level, Topology
from hpcpipe.schedule import Place, Schedule
from hpcpipe.simulation import Simulated, StageCosts, simulate

EVERYTHING = (0, 10**9)
"""A window that holds all minibatches."""


def unit(**changes: Any) -> StageCosts:
    """F = B = 1 and all else free, but for `changes`."""
    return StageCosts(**{"forward_s": 1.0, "backward_s": 1.0, **changes})


def links(*sizes: int, bandwidth: float = 1.0, latency_s: float = 0.0) -> Topology:
    """Nested levels of these sizes, all of one bandwidth."""
    return Topology(
        levels=tuple(
            Level(name=f"level{i}", size=size, bandwidth=bandwidth, latency_s=latency_s)
            for i, size in enumerate(sizes)
        )
    )


def ranks_of_stage(schedule: Schedule, groups: Sequence[Sequence[Place]] | None = None) -> list[list[int]]:
    """One rank per place in the schedule's own order, or the ranks that hold the places of `groups`."""
    held = [[place] for place in schedule.places] if groups is None else groups
    found = {place: rank for rank, places in enumerate(held) for place in places}
    return [
        [found[Place(stage, replica)] for replica in range(schedule.replicas_of(stage))]
        for stage in range(schedule.stages)
    ]


def run(
    schedule: Schedule,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    topology: Topology | None = None,
    groups: Sequence[Sequence[Place]] | None = None,
    **options: Any,
) -> Simulated:
    """Simulate with the same costs at every stage unless a list is given, on one level unless told."""
    each = unit() if costs is None else costs
    return simulate(
        schedule,
        [each] * schedule.stages if isinstance(each, StageCosts) else each,
        links(max(2, schedule.ranks)) if topology is None else topology,
        ranks_of_stage(schedule, groups),
        **options,
    )


@st.composite
def costs(draw: st.DrawFn, stages: int) -> list[StageCosts]:
    """Any costs of `stages` stages: also of no time, and messages that take longer than passes."""
    seconds = st.floats(0, 4)
    nbytes = st.integers(0, 6)
    return [
        StageCosts(
            forward_s=draw(seconds),
            backward_s=draw(st.floats(2, 4)),
            update_s=draw(seconds),
            output_bytes=draw(nbytes),
            input_gradient_bytes=draw(nbytes),
            ready=((1.0, draw(nbytes)), (2.0, draw(nbytes))),
        )
        for _ in range(stages)
    ]


@st.composite
def topologies(draw: st.DrawFn, ranks: int) -> Topology:
    """One to three levels that join at least `ranks` ranks, each with its own bandwidth and latency."""
    inner = draw(st.integers(1, 3))
    sizes = [inner]
    while sizes[-1] < ranks:
        sizes.append(sizes[-1] * draw(st.integers(2, 4)))
    return Topology(
        levels=tuple(
            Level(
                name=f"level{i}",
                size=size,
                bandwidth=draw(st.sampled_from([0.5, 1.0, 3.0, 1e6])),
                latency_s=draw(st.sampled_from([0.0, 0.25, 2.0])),
            )
            for i, size in enumerate(sizes)
        )
    )
