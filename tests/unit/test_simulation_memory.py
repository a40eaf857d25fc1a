"""Simulated memory: peaks are those of the verifier and of the planner's formulas, and simulating needs little."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.planning.costs import stage_costs
from hpcpipe.planning.memory import plan_bytes
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.schedule import Policy, Schedule
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.schedule.verify import StageProof, verify
from hpcpipe.simulation import simulate
from hpcpipe.simulation.costs import costs_of
from tests.unit.schedule_cases import pipedream, schedules
from tests.unit.simulation_cases import EVERYTHING, costs, links, ranks_of_stage, run, topologies, unit


def proofs(schedule: Schedule) -> tuple[StageProof, ...]:
    """What is proved of each place, in the order of ranks."""
    return verify(schedule).stages


@settings(max_examples=30, deadline=None)
@given(schedules(stages=4, minibatches=14, replicas=3), st.data())
def test_peaks_are_the_versions_and_passes_in_flight_that_the_verifier_counts(
    schedule: Schedule, data: st.DataObject
) -> None:
    """However long passes and messages take, the order of actions decides."""
    times = data.draw(costs(schedule.stages))
    topology = data.draw(topologies(schedule.ranks))
    proved = proofs(schedule)

    def peaks(**sizes: int) -> list[int]:
        sized = [unit(**{**vars(each), **sizes}) for each in times]
        return list(run(schedule, sized, topology).peak_bytes)

    assert peaks(version_bytes=1) == [proof.peak_versions for proof in proved]
    assert peaks(saved_bytes=1) == [proof.in_flight for proof in proved]
    assert peaks(static_bytes=7) == [7] * schedule.ranks


def test_memory_over_time_rises_with_forwards_and_falls_with_backwards() -> None:
    found = run(pipedream(stages=2, minibatches=2), unit(saved_bytes=10, static_bytes=1), window=EVERYTHING)

    held = [(event.action.op.value, event.held) for event in found.events if event.rank == 0]
    passes = [(op, nbytes) for op, nbytes in held if op in "FB"]
    assert passes == [("F", 11), ("F", 21), ("B", 11), ("B", 1)]


PROFILE = Profile(
    layers=tuple(
        LayerCost(
            name=f"layer{i}",
            forward_s=0.001,
            backward_s=0.002,
            output_bytes=100 + i,
            parameter_bytes=10_000 + 1000 * i,
            buffer_bytes=7,
            state_bytes=20_000,
            saved_bytes=300 * (i + 1),
        )
        for i in range(8)
    ),
    edges=tuple((i, i + 1) for i in range(7)),
    rows=4,
    input_bytes=55,
)
STAGES = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1, 3, 1)])
@pytest.mark.parametrize("name", list(ORDERS))
def test_peaks_are_what_the_planner_counts(name: str, replicas: tuple[int, ...], policy: Policy) -> None:
    microbatches = 6 if name in SYNCHRONOUS else 1
    schedule = Schedule(
        name=name, stages=4, minibatches=60, microbatches=microbatches, policy=policy, replicas=replicas
    )

    found = simulate(
        schedule,
        costs_of(PROFILE, STAGES, schedule),
        links(16, bandwidth=1e9),
        ranks_of_stage(schedule),
    )

    planned = plan_bytes(
        stage_costs(PROFILE, STAGES), replicas, schedule=name, policy=policy.value, microbatches=microbatches
    )
    for stage, ranks in enumerate(found.ranks_of_stage):
        peak = max(found.peak_bytes[rank] for rank in ranks)
        # Under vertical_sync the planner may count versions that none of the replicas comes to read.
        if policy is Policy.VERTICAL_SYNC and schedule.replicated:
            assert peak <= planned[stage].total
        else:
            assert peak == planned[stage].total


@pytest.mark.parametrize("name", list(ORDERS))
def test_a_longer_run_needs_no_more_memory_to_simulate(name: str) -> None:
    def peak(minibatches: int) -> int:
        # Python keeps numbers below 257 ready, so minibatches are counted from above.
        schedule = Schedule(
            name=name,
            stages=2,
            first=1000,
            minibatches=1000 + minibatches,
            microbatches=2 if name in SYNCHRONOUS else 1,
            replicas=(2, 1),
        )
        tracemalloc.start()
        try:
            run(schedule, unit(output_bytes=1, input_gradient_bytes=1), links(2, 4))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = 30, 530
    peak(short)
    # One number kept of each minibatch would be more.
    assert peak(long) - peak(short) < 16 * (long - short)
