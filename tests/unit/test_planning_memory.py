"""The memory model: never less than what the schedule's own books say is held, and bytes in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import StageCost, stage_costs
from hpcpipe.planning.memory import Held, StageBytes, bound_versions, held, held_at, plan_bytes, stage_bytes
from hpcpipe.planning.problem import Problem, bytes_of
from hpcpipe.planning.search import partition
from hpcpipe.planning.topology import flat
from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, Target, warm_up_of
from hpcpipe.schedule.cut import cut_at
from hpcpipe.schedule.verify import Proof, StageProof, prove
from tests.unit.planning_cases import chain
from tests.unit.schedule_cases import lists_of, pipedream

REPLICAS = [counts for stages in (1, 2, 3) for counts in product((1, 2, 3), repeat=stages)]
LARGER = [(1, 4), (4, 1), (2, 5), (5, 2), (2, 4), (1, 1, 1, 1, 1), (2, 1, 3, 1), (4, 1, 1, 2), (1, 5, 1)]

COST = StageCost(
    layers=(0,),
    forward_s=0,
    backward_s=0,
    update_s=0,
    parameter_bytes=10**12,
    reduced_bytes=2 * 10**12,
    state_bytes=7,
    buffer_bytes=10**3,
    saved_bytes=10**6,
    input_bytes=10**5,
    output_bytes=10**4,
    gradient_bytes=10**2,
    input_gradient_bytes=10,
)


@cache
def proof(schedule: Schedule) -> Proof:
    return prove(schedule, lists_of(schedule))


def proved(schedule: Schedule) -> list[list[StageProof]]:
    """The verified figures of each replica of each stage."""
    stages = proof(schedule).stages
    return [[found for found in stages if found.stage == stage] for stage in range(schedule.stages)]


def most_received(schedule: Schedule, stage: int, kind: str) -> int:
    """Places in the receive rings of one kind at the rank of `stage` that has the most."""
    places: Counter[Place] = Counter()
    for channel, depth in proof(schedule).ring_depths.items():
        if channel.destination.stage == stage and channel.kind == kind:
            places[channel.destination] += depth
    return max(places.values(), default=0)


def steady(policy: Policy, replicas: tuple[int, ...], target: Target = Target.LOCAL) -> Schedule:
    """Long enough for every stage to be as full as it ever is."""
    return replace(pipedream(policy, replicas=replicas, minibatches=5 * sum(replicas)), target=target)


def peak_versions(schedule: Schedule) -> list[int]:
    return [max(found.peak_versions for found in replicas) for replicas in proved(schedule)]


def planned(schedule: Schedule, *, cut_in_flight: bool = False) -> list[Held]:
    return [
        held(
            schedule.name,
            schedule.policy.value,
            stage=stage,
            replicas=schedule.replica_counts,
            microbatches=schedule.microbatches,
            cut_in_flight=cut_in_flight,
        )
        for stage in range(schedule.stages)
    ]


def predictions_alive(actions: Sequence[Action]) -> int:
    """The most predicted weights between the action that makes them and the pass that uses them."""
    most, fresh = 0, set()
    for action in actions:
        fresh |= {(p.role.value, p.minibatch, p.distance) for p in action.predictions}
        # Both passes of a minibatch share a prediction of one distance.
        most = max(most, len({made[1:] for made in fresh}))
        if action.op in (Op.FORWARD, Op.BACKWARD):
            fresh -= {made for made in fresh if made[:2] == (action.op.name.lower(), action.minibatch)}
    return most


# -- versions and passes in flight -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy.STASH, Policy.NONE])
@pytest.mark.parametrize("replicas", REPLICAS + LARGER, ids=str)
def test_every_version_alive_and_the_one_being_written_are_planned(
    policy: Policy, replicas: tuple[int, ...]
) -> None:
    schedule = steady(policy, replicas)

    assert [one.weights for one in planned(schedule)] == [peak + 1 for peak in peak_versions(schedule)]


@pytest.mark.parametrize("replicas", REPLICAS + LARGER, ids=str)
def test_vertical_sync_plans_at_most_one_version_too_many(replicas: tuple[int, ...]) -> None:
    schedule = steady(Policy.VERTICAL_SYNC, replicas)

    extra = [
        one.weights - (peak + 1) for one, peak in zip(planned(schedule), peak_versions(schedule), strict=True)
    ]

    assert set(extra) <= {0, 1}
    assert extra[0] == 0


def test_vertical_sync_keeps_only_versions_that_the_first_stage_saw() -> None:
    schedule = steady(Policy.VERTICAL_SYNC, (2, 1, 3, 1))

    assert peak_versions(schedule)[1] == bound_versions(ranks=1, first_ranks=2, total=7, is_first=False) == 5


def test_a_stage_of_more_ranks_never_holds_more_bound_versions() -> None:
    for total, first in product(range(1, 25), range(1, 25)):
        held_by = [bound_versions(ranks, first, total, is_first=False) for ranks in range(1, 25)]

        assert held_by == sorted(held_by, reverse=True)


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("replicas", [*REPLICAS[:12], (3, 2, 2), (1, 2, 3), (1, 1, 1, 1)], ids=str)
def test_predictions_are_planned_with_at_most_one_too_many(replicas: tuple[int, ...], target: Target) -> None:
    schedule = steady(Policy.SPECTRAIN, replicas, target)
    lists = lists_of(schedule)
    peaks = peak_versions(schedule)

    for stage, one in enumerate(planned(schedule)):
        alive = max(predictions_alive(actions) for actions in lists if actions[0].stage == stage)
        assert one.weights - (peaks[stage] + 1) - alive in (0, 1)


@pytest.mark.parametrize("policy", Policy)
def test_the_passes_in_flight_are_those_of_the_schedule(policy: Policy) -> None:
    for replicas in REPLICAS[::2] + LARGER:
        schedule = steady(policy, replicas)

        for one, found in zip(planned(schedule), proved(schedule), strict=True):
            assert one.in_flight == max(replica.in_flight for replica in found), replicas


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_a_synchronous_stage_holds_its_own_microbatches_and_one_version(name: str, microbatches: int) -> None:
    for replicas in REPLICAS:
        schedule = Schedule(
            name=name, stages=len(replicas), minibatches=2, microbatches=microbatches, replicas=replicas
        )

        for one, found in zip(planned(schedule), proved(schedule), strict=True):
            assert one.in_flight == max(replica.in_flight for replica in found)
            assert one.weights == max(replica.peak_versions for replica in found) + 1


@pytest.mark.parametrize("policy", [Policy.NONE, Policy.SPECTRAIN])
@pytest.mark.parametrize("replicas", [(1,), (1, 1, 1), (2, 1), (1, 3), (3, 2, 1)], ids=str)
def test_a_cut_in_flight_keeps_weights_and_buffers_of_all_that_it_finds(
    policy: Policy, replicas: tuple[int, ...]
) -> None:
    schedule = steady(policy, replicas)
    boundaries = [k for k in range(schedule.minibatches) if schedule.is_boundary(k)]

    drained, flying = planned(schedule), planned(schedule, cut_in_flight=True)

    for place in schedule.places:
        found = max(len(cut_at(schedule, place.stage, k, place.replica).in_flight) for k in boundaries)
        assert flying[place.stage].weights - drained[place.stage].weights >= found
        assert flying[place.stage].buffers >= found + 1


@pytest.mark.parametrize("policy", [Policy.STASH, Policy.VERTICAL_SYNC])
def test_kept_weights_need_no_other_copy_for_a_cut_in_flight(policy: Policy) -> None:
    schedule = steady(policy, (2, 1, 1))

    drained, flying = planned(schedule), planned(schedule, cut_in_flight=True)

    assert [one.weights for one in flying] == [one.weights for one in drained]


@pytest.mark.parametrize("replicas", REPLICAS + LARGER, ids=str)
def test_every_receive_ring_is_planned(replicas: tuple[int, ...]) -> None:
    for schedule in (
        steady(Policy.NONE, replicas),
        Schedule(name="gpipe", stages=len(replicas), minibatches=2, microbatches=7, replicas=replicas),
        Schedule(name="1f1b", stages=len(replicas), minibatches=2, microbatches=7, replicas=replicas),
    ):
        for stage, one in enumerate(planned(schedule)):
            assert stage == 0 or one.in_flight + one.arriving >= most_received(schedule, stage, "activation")
            assert one.returning >= most_received(schedule, stage, "gradient")


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_receive_rings_of_a_straight_pipeline_are_planned_to_the_last_place(stages: int) -> None:
    schedule = steady(Policy.NONE, (1,) * stages)

    for stage, one in enumerate(planned(schedule)[1:], 1):
        assert one.in_flight + one.arriving == most_received(schedule, stage, "activation")
        assert (one.arriving, one.returning) == (1, 2)


def test_the_first_stage_has_no_arrivals() -> None:
    for name in ("pipedream", "gpipe", "1f1b"):
        assert held(name, "stash", stage=0, replicas=(1, 2, 1)).arriving == 0


def test_a_stage_is_known_by_its_warm_up_alone() -> None:
    schedule = steady(Policy.SPECTRAIN, (2, 2, 2))

    found = [
        held_at(
            "pipedream",
            "spectrain",
            warm_up=warm_up_of(schedule, stage),
            ranks=ranks,
            first_ranks=2,
            total=6,
            is_first=stage == 0,
        )
        for stage, ranks in enumerate((2, 2, 2))
    ]

    assert found == planned(schedule)


# -- bytes -------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_stage_are_what_they_are_for() -> None:
    found = stage_bytes(COST, Held(weights=5, in_flight=3, arriving=4, returning=3, buffers=4), ranks=1)

    assert found == StageBytes(
        weights=5 * 10**12,
        gradients=10**12,
        state=7,
        activations=3 * (10**6 + 10**5),
        messages=4 * 10**5 + 3 * 10**2 + 10**4 + 10,
        buffers=4 * 10**3,
    )
    assert found.total == 6 * 10**12 + 3_714_317


def test_a_replicated_stage_holds_its_gradients_once_more_for_the_all_reduce() -> None:
    one, two = (stage_bytes(COST, Held(weights=2, in_flight=1), ranks) for ranks in (1, 2))

    assert two == replace(one, gradients=one.gradients + COST.reduced_bytes)


def test_a_straight_pipeline_needs_less_and_less_memory_along_it() -> None:
    costs = stage_costs(chain(1, 1, 1, 1, parameter_bytes=100), [[0], [1], [2], [3]])

    found = plan_bytes(costs, (1, 1, 1, 1), schedule="pipedream", policy="stash")

    # w + 2 versions and the gradients.
    assert [stage.total for stage in found] == [600, 500, 400, 300]


def test_one_replicated_stage_needs_as_much_on_every_number_of_ranks() -> None:
    costs = stage_costs(chain(1, 1, parameter_bytes=100), [[0, 1]])

    totals = [plan_bytes(costs, (m,), schedule="pipedream", policy="stash")[0].total for m in (1, 2, 8)]

    assert totals == [600, 800, 800]


def test_activations_of_gpipe_grow_with_the_microbatches_and_those_of_1f1b_do_not() -> None:
    costs = stage_costs(chain(1, 1, saved_bytes=100), [[0], [1]])

    def activations(schedule: str) -> list[list[int]]:
        return [
            [s.activations for s in plan_bytes(costs, (1, 1), schedule=schedule, policy="none", microbatches=m)]
            for m in (1, 4, 9)
        ]

    assert activations("gpipe") == [[100, 100], [400, 400], [900, 900]]
    assert activations("1f1b") == [[100, 100], [200, 100], [200, 100]]


# -- limits ------------------------------------------------------------------------------------------------


def test_a_plan_fits_exactly_into_what_it_needs() -> None:
    problem = Problem(
        profile=chain(1, 1, 1, 1, parameter_bytes=100), topology=flat(2, 1e9), ranks=2, policy="stash"
    )
    need = max(stage.total for stage in bytes_of(problem, partition(problem)))

    partition(replace(problem, memory_bytes=need))


def test_a_limit_moves_layers_to_where_fewer_versions_are_held() -> None:
    problem = Problem(
        profile=chain(1, 1, 1, 2, 2, parameter_bytes=100),
        topology=flat(2, 1e9),
        ranks=2,
        policy="stash",
        straight=True,
    )

    free, tight = partition(problem), partition(replace(problem, memory_bytes=900))

    # The first stage holds 4 times the parameters (2 versions, one being written, gradients), the last 3 times.
    assert [len(stage.layers) for stage in free.stages] == [3, 2]
    assert [stage.total for stage in bytes_of(problem, free)] == [1200, 600]
    assert [len(stage.layers) for stage in tight.stages] == [2, 3]
    assert [stage.total for stage in bytes_of(problem, tight)] == [800, 900]


def test_a_limit_below_every_plan_is_one_line() -> None:
    problem = Problem(profile=chain(1, 1, parameter_bytes=100), topology=flat(2, 1e9), ranks=2, memory_bytes=299)

    with pytest.raises(PlanError, match=r"^no plan fits into 299 B a rank: ") as caught:
        partition(problem)
    assert "\n" not in str(caught.value)
