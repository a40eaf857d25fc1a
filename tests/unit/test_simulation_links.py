"""Messages and all-reduces in simulated time: links are shared, go both ways at once, and serve one at a time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import PlanError
from hpcpipe.schedule import Op, Place, Schedule, rank_actions
from hpcpipe.schedule.actions import RECEIVES, SENDS
from hpcpipe.simulation import Event, Simulated, simulate
from hpcpipe.simulation.collective import Reduction
from tests.unit.schedule_cases import pipedream, schedules
from tests.unit.simulation_cases import EVERYTHING, costs, links, ranks_of_stage, run, topologies, unit

# Passes that take next to no time, so that only links count.
QUICK = {"forward_s": 0.001, "backward_s": 0.001}


def of_op(found: Simulated, op: Op, stage: int = 0) -> list[Event]:
    return [event for event in found.events if event.action.op is op and event.action.stage == stage]


# -- messages ----------------------------------------------------------------------------------------------


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    costs = unit(output_bytes=6)
    topology = links(2, bandwidth=3.0, latency_s=0.5)

    found = run(pipedream(stages=2, minibatches=1), costs, topology, window=EVERYTHING)

    assert of_op(found, Op.FORWARD, stage=1)[0].start == 1.0 + 2.0 + 0.5
    # Stage 0 waits for the gradient before it is sent.
    assert of_op(found, Op.BACKWARD)[0].start == 3.5 + 2.0 + 0.5


def test_a_send_takes_no_time_of_its_rank() -> None:
    found = run(pipedream(stages=2, minibatches=2), unit(output_bytes=50), window=EVERYTHING)

    assert [event.start for event in of_op(found, Op.FORWARD)] == [0.0, 1.0]


def test_a_slow_link_bounds_the_throughput_and_is_named() -> None:
    found = run(pipedream(stages=2, minibatches=100), unit(output_bytes=5))

    assert found.minibatches_per_s == pytest.approx(1 / 5)
    assert found.slowest.name == "the level0 link out of rank 0"


def test_activations_and_gradients_pass_each_other() -> None:
    costs = unit(**QUICK, output_bytes=4, input_gradient_bytes=4)
    ahead = pipedream(stages=2, minibatches=200)

    # With two in flight the link is never idle either way: one goes up while another comes down.
    assert run(ahead, costs).minibatches_per_s == pytest.approx(1 / 4, rel=0.01)


def test_a_rank_between_two_others_sends_both_ways_through_one_port() -> None:
    sent = [unit(**QUICK), unit(**QUICK, output_bytes=4, input_gradient_bytes=4), unit(**QUICK)]

    found = run(pipedream(stages=3, minibatches=200), sent)

    assert found.minibatches_per_s == pytest.approx(1 / 8, rel=0.01)
    assert found.slowest.name == "the level0 link out of rank 1"


def test_ranks_of_a_node_share_its_way_out() -> None:
    schedule = pipedream(replicas=(2, 2), minibatches=200)
    costs = unit(**QUICK, output_bytes=4)

    shared = run(schedule, costs, links(2, 4))
    apart = run(schedule, costs, links(4))

    assert shared.minibatches_per_s == pytest.approx(1 / 4, rel=0.01)
    assert shared.slowest.name == "the level1 link out of ranks 0 to 1"
    assert apart.minibatches_per_s == pytest.approx(2 / 4, rel=0.01)


def test_two_nodes_share_the_way_into_a_third() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=200)
    costs = unit(**QUICK, output_bytes=4)

    found = run(schedule, costs, links(1, 3))

    assert found.minibatches_per_s == pytest.approx(1 / 4, rel=0.01)
    assert found.slowest.name == "the level1 link into rank 2"


def test_bytes_are_counted_at_the_level_where_ranks_meet() -> None:
    costs = unit(output_bytes=3, input_gradient_bytes=2)

    found = run(pipedream(stages=4, minibatches=10), costs, links(2, 4))

    # Two of three cuts lie within a node.
    assert found.level_bytes == {"level0": 2 * 10 * 5, "level1": 10 * 5}


def test_the_ranks_of_a_plan_need_not_follow_the_stages() -> None:
    schedule, costs = pipedream(stages=2, minibatches=10), unit(output_bytes=3, input_gradient_bytes=3)

    found = simulate(schedule, [costs] * 2, links(2), [[1], [0]], window=EVERYTHING)

    assert {event.rank for event in found.events if event.action.stage == 0} == {1}


# -- all-reduces -------------------------------------------------------------------------------------------


def spans(found: Simulated) -> list[tuple[float, float]]:
    """When each bucket of an all-reduce is on the links."""
    return [(transfer.start, transfer.end) for transfer in found.transfers if transfer.action.op is Op.REDUCE]


def data_parallel(ranks: int, minibatches: int) -> Schedule:
    return pipedream(replicas=(ranks,), minibatches=minibatches)


def test_an_all_reduce_begins_while_the_backward_pass_goes_on() -> None:
    # Two layers: the gradients of each are ready after one second and take one second among two ranks.
    costs = unit(backward_s=2.0, ready=((1.0, 1), (2.0, 1)))
    schedule = data_parallel(2, minibatches=40)

    overlapped = run(schedule, costs, bucket_bytes=1, window=EVERYTHING)
    at_the_end = run(schedule, costs, bucket_bytes=100)

    assert overlapped.minibatches_per_s == pytest.approx(2 / 4)
    assert at_the_end.minibatches_per_s == pytest.approx(2 / 5)
    first = of_op(overlapped, Op.REDUCE)[0]
    assert (first.start, first.end) == (3.0, 4.0)


def test_the_gradients_of_all_microbatches_wait_for_the_last_backward_pass() -> None:
    costs = unit(backward_s=2.0, ready=((1.0, 1), (2.0, 1)))
    schedule = Schedule(name="gpipe", stages=1, minibatches=10, microbatches=6, replicas=(2,))

    # Three microbatches each; the second bucket is one second behind the last pass.
    assert run(schedule, costs, bucket_bytes=1).minibatches_per_s == pytest.approx(1 / (3 * 3 + 1))


def test_buckets_go_one_after_the_other() -> None:
    costs = unit(ready=((0.2, 4), (0.4, 4), (1.0, 4)))

    found = run(data_parallel(2, minibatches=2), costs, bucket_bytes=1, window=EVERYTHING)

    assert spans(found) == [(1.2, 5.2), (5.2, 9.2), (9.2, 13.2)]


def test_a_bucket_waits_until_it_is_ready() -> None:
    costs = unit(ready=((0.25, 1), (1.0, 1)))

    found = run(data_parallel(2, 2), costs, links(2, bandwidth=4.0), bucket_bytes=1, window=EVERYTHING)

    assert spans(found) == [(1.25, 1.5), (2.0, 2.25)]


def test_a_replica_that_comes_late_without_a_minibatch_is_waited_for() -> None:
    reduction = Reduction(size=2, ready_s=[0.5], bucket_s=[2.0], ports=[], level=0, nbytes=8)

    assert reduction.begun(1.0) is None
    assert reduction.idle(5.0) == 5.0
    assert reduction.go(5.0) == (7.0, True)


def test_a_bucket_that_is_ready_earlier_leaves_before_a_later_message_of_its_rank() -> None:
    costs = [unit(), unit(input_gradient_bytes=1, ready=((0.5, 4),))]

    found = run(pipedream(replicas=(1, 2), minibatches=2), costs, links(3, bandwidth=4.0), window=EVERYTHING)

    # B(1) takes replica 1 from 3 to 4, the all-reduce its port from 3.5 to 4.5.
    assert spans(found) == [(3.5, 4.5)]
    (gradient,) = [t for t in found.transfers if t.action.op is Op.SEND_GRADIENT and t.action.minibatch == 1]
    assert (gradient.start, gradient.end) == (4.5, 4.75)


@pytest.mark.parametrize(("kind", "seconds"), [("ring", 6.0), ("server", 12.0)])
def test_an_all_reduce_takes_what_the_planner_says(kind: str, seconds: float) -> None:
    costs = unit(ready=((1.0, 4),))

    found = run(data_parallel(4, minibatches=4), costs, allreduce=kind)

    assert found.seconds == 2.0 + seconds
    assert found.level_bytes == {"level0": 4 * seconds}


def test_a_replica_without_a_minibatch_in_the_last_round_still_takes_part() -> None:
    costs = unit(ready=((1.0, 2),))

    found = run(data_parallel(2, minibatches=3), costs, window=EVERYTHING)

    assert found.seconds == 2 * (2.0 + 2.0)
    last = [event for event in of_op(found, Op.REDUCE) if event.action.minibatch == 2]
    assert [(event.start, event.end) for event in sorted(last)] == [(6.0, 8.0), (4.0, 8.0)]


def test_the_slowest_of_the_replicas_is_waited_for() -> None:
    # The first stage sends to the replicas in turn, so the second is later.
    schedule = pipedream(replicas=(1, 2), minibatches=2)
    costs = [unit(), unit(ready=((1.0, 0),))]

    found = run(schedule, costs, window=EVERYTHING)

    assert [event.end for event in of_op(found, Op.REDUCE, stage=1)] == [4.0, 4.0]


def test_an_all_reduce_across_nodes_keeps_messages_waiting() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=100)
    alone = [unit(**QUICK, output_bytes=4), unit(**QUICK)]
    reducing = [unit(**QUICK, output_bytes=4, ready=((0.001, 6),)), unit(**QUICK)]

    free, shared = (run(schedule, each, links(1, 3)) for each in (alone, reducing))

    assert free.minibatches_per_s == pytest.approx(1 / 4, rel=0.01)
    assert shared.minibatches_per_s < 0.8 * free.minibatches_per_s


def test_evaluations_of_replicas_cost_the_latency_of_their_meetings() -> None:
    plain = data_parallel(2, minibatches=4)
    evaluated = pipedream(replicas=(2,), minibatches=4, evaluate_every=4, evaluation_batches=4)
    topology = links(2, latency_s=0.25)

    more = run(evaluated, topology=topology).seconds - run(plain, topology=topology).seconds

    # Two batches each, and a round trip before and behind them.
    assert more == 2.0 + 2 * 0.5


# -- what holds for any plan on any links ------------------------------------------------------------------


@st.composite
def simulations(draw: st.DrawFn) -> tuple[Schedule, Simulated]:
    schedule = draw(schedules(stages=4, minibatches=16, replicas=3))
    found = run(
        schedule,
        draw(costs(schedule.stages)),
        draw(topologies(schedule.ranks)),
        window=EVERYTHING,
        bucket_bytes=draw(st.sampled_from([1, 5, 100])),
    )
    return schedule, found


def by_rank(found: Simulated) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = defaultdict(list)
    for event in found.events:
        events[event.rank].append(event)
    return events


@settings(max_examples=60, deadline=None)
@given(simulations())
def test_each_rank_executes_its_list_in_order_and_one_action_at_a_time(case: tuple[Schedule, Simulated]) -> None:
    schedule, found = case
    events = by_rank(found)

    for rank, place in enumerate(schedule.places):
        assert [event.action for event in events[rank]] == list(rank_actions(schedule, [place]))
        assert all(event.start <= event.end for event in events[rank])
        assert all(before.end == after.start for before, after in pairwise(events[rank]))


@settings(max_examples=60, deadline=None)
@given(simulations())
def test_a_link_carries_one_message_at_a_time_in_the_order_of_the_requests(
    case: tuple[Schedule, Simulated],
) -> None:
    _, found = case
    sent = {event.action: event.start for event in found.events if event.action.op in SENDS}
    on_link = defaultdict(list)
    for transfer in found.transfers:
        if transfer.action.op is not Op.REDUCE:
            on_link[transfer.link].append(transfer)

    for transfers in on_link.values():
        assert all(before.end <= after.start for before, after in pairwise(transfers))
        asked = [sent[transfer.action] for transfer in transfers]
        assert asked == sorted(asked)


@settings(max_examples=60, deadline=None)
@given(simulations())
def test_nothing_is_received_before_it_has_been_sent(case: tuple[Schedule, Simulated]) -> None:
    _, found = case
    gone = {transfer.action: transfer.end for transfer in found.transfers if transfer.action.op in SENDS}
    receives = [event for event in found.events if event.action.op in RECEIVES]
    wanted = {
        (
            RECEIVES[e.action.op],
            e.action.peer_place,
            e.action.place,
            e.action.minibatch,
            e.action.microbatch,
        ): e.end
        for e in receives
    }

    for action, ends in gone.items():
        key = (action.op, action.place, action.peer_place, action.minibatch, action.microbatch)
        assert ends <= wanted.pop(key)
    assert wanted == {}


# -- mistakes ----------------------------------------------------------------------------------------------


def test_ranks_and_costs_must_fit_the_schedule() -> None:
    schedule = pipedream(replicas=(2, 1))

    with pytest.raises(PlanError, match="2 stages needs the costs and ranks of each, got 1 and 2"):
        simulate(schedule, [unit()], links(3), ranks_of_stage(schedule))
    with pytest.raises(PlanError, match=r"\[2, 1\] replicas of its stages, got \[1, 1\] ranks"):
        simulate(schedule, [unit()] * 2, links(3), [[0], [1]])
    with pytest.raises(PlanError, match="from 0 without gaps"):
        simulate(schedule, [unit()] * 2, links(9), [[0, 1], [4]])
    with pytest.raises(PlanError, match="one rank for each replica"):
        simulate(schedule, [unit()] * 2, links(3), [[0, 1], [1]])
    with pytest.raises(PlanError, match="fewer than the 3"):
        simulate(schedule, [unit()] * 2, links(2), [[0, 1], [2]])


def test_several_places_of_a_rank_are_those_of_different_stages() -> None:
    schedule = pipedream(stages=2)

    found = run(schedule, groups=[[Place(0), Place(1)]], topology=links(1), window=EVERYTHING)

    assert found.places == {0: (Place(0), Place(1))}
