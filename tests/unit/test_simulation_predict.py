"""From a plan file to a simulation: costs, memory and links are those of its profile and topology."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcpipe.planning.costs import plan_time, stage_costs
from hpcpipe.planning.plan_file import PlanFile, PlannedStage
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.schedule import Schedule
from hpcpipe.simulation.costs import costs_of
from hpcpipe.simulation.predict import predict, schedule_of
from hpcpipe.simulation.simulate import in_flight, steady_span

PROFILE = Profile(
    layers=tuple(
        LayerCost(
            name=f"layer{i}",
            forward_s=0.001 * (i + 1),
            backward_s=0.002 * (i + 1),
            update_s=0.0001,
            output_bytes=1000 * (i + 1),
            parameter_bytes=0 if i == 1 else 4000,
        )
        for i in range(4)
    ),
    edges=((0, 1), (1, 2), (2, 3)),
    rows=32,
    pass_overhead_s=0.0005,
    data_s=0.0002,
    message_s=0.0001,
)
TOPOLOGY = Topology(levels=(Level(name="node", size=2, bandwidth=1e9), Level(name="net", size=8, bandwidth=1e8)))
PLAN = PlanFile(
    stages=(PlannedStage(("layer0", "layer1", "layer2"), (0,)), PlannedStage(("layer3",), (1,))),
    schedule="pipedream",
    policy="stash",
    microbatches=1,
    profile=PROFILE,
    topology=TOPOLOGY,
)
LAYERS = [[0, 1, 2], [3]]


def test_a_plan_is_as_fast_as_its_slowest_stage_says() -> None:
    planned = plan_time(stage_costs(PROFILE, LAYERS), [[0], [1]], TOPOLOGY)

    found = predict(PLAN)

    assert found.minibatches_per_s == pytest.approx(1 / planned.bottleneck_s)
    assert found.samples_per_s == pytest.approx(32 / planned.bottleneck_s)


def test_a_minibatch_of_a_synchronous_plan_has_the_samples_of_all_its_microbatches() -> None:
    found = predict(replace(PLAN, schedule="1f1b", microbatches=4))

    assert found.samples == 4 * 32
    assert found.schedule.microbatches == 4


def test_passes_cost_what_the_planner_charges() -> None:
    schedule = Schedule(name="pipedream", stages=2, minibatches=1)

    for cost, planned in zip(costs_of(PROFILE, LAYERS, schedule), stage_costs(PROFILE, LAYERS), strict=True):
        assert (cost.forward_s, cost.backward_s, cost.update_s) == (
            planned.forward_s,
            planned.backward_s,
            planned.update_s,
        )
        assert (cost.output_bytes, cost.input_gradient_bytes) == (
            planned.output_bytes,
            planned.input_gradient_bytes,
        )


def test_gradients_are_ready_from_the_last_layer_to_the_first_and_with_the_pass() -> None:
    schedule = Schedule(name="pipedream", stages=2, minibatches=1)
    first = costs_of(PROFILE, LAYERS, schedule)[0]

    # Layer 1 has none; what a pass costs beside its layers comes first.
    whens, sizes = zip(*first.ready, strict=True)
    assert whens == pytest.approx((first.backward_s - 0.004 - 0.002, first.backward_s))
    assert sizes == (4000, 4000)


def test_gradients_of_half_precision_are_reduced_in_single() -> None:
    half = replace(PROFILE, about={"dtype": "bfloat16"})
    schedule = Schedule(name="pipedream", stages=2, minibatches=1)

    assert [nbytes for _, nbytes in costs_of(half, LAYERS, schedule)[0].ready] == [8000, 8000]


@pytest.mark.parametrize("replicas", [(1, 1), (60, 4)])
def test_a_run_is_long_enough_to_show_its_steady_state(replicas: tuple[int, int]) -> None:
    first = tuple(range(replicas[0]))
    plan = replace(
        PLAN,
        stages=(
            replace(PLAN.stages[0], ranks=first),
            replace(PLAN.stages[1], ranks=tuple(range(len(first), sum(replicas)))),
        ),
        topology=Topology(levels=(Level(name="net", size=64, bandwidth=1e9),)),
    )

    schedule = schedule_of(plan)

    assert schedule.minibatches >= max(200, 4 * in_flight(schedule))
    assert steady_span(schedule) is not None


def test_the_all_reduce_is_the_one_that_was_planned_with_unless_told() -> None:
    stages = (PlannedStage(("layer0", "layer1", "layer2", "layer3"), (0, 1)),)
    ring = replace(PLAN, stages=stages)
    server = replace(ring, about={"allreduce": "server"})

    sent = [predict(plan, minibatches=2).level_bytes["node"] for plan in (ring, server)]

    assert sent == [2 * 12000, 4 * 12000]
    assert predict(server, minibatches=2, allreduce="ring").level_bytes["node"] == sent[0]
