"""Ring depths: enough for every run, and no more than it can use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Policy, Schedule
from hpcpipe.schedule.dryrun import Channel, ScheduleError, dry_run
from hpcpipe.schedule.rings import ring_depths
from hpcpipe.schedule.verify import prove
from tests.unit.schedule_cases import groupings, lists_of, pipedream, schedules


def kinds(depths: dict[Channel, int], kind: str) -> list[int]:
    return [depth for channel, depth in sorted(depths.items()) if channel.kind == kind]


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_an_activation_needs_one_place_more_than_the_consumer_has_in_flight(stages: int) -> None:
    depths = ring_depths(pipedream(stages=stages, minibatches=1000))

    assert kinds(depths, "activation") == [stages - k for k in range(stages - 1)]
    assert kinds(depths, "gradient") == [2] * (stages - 1)


@pytest.mark.parametrize(("name", "expected"), [("gpipe", [6, 6, 6]), ("1f1b", [4, 3, 2])])
def test_synchronous_schedules_need_places_for_their_microbatches(name: str, expected: list[int]) -> None:
    depths = ring_depths(Schedule(name=name, stages=4, minibatches=1000, microbatches=6))

    assert kinds(depths, "activation") == expected
    assert set(kinds(depths, "gradient")) <= {1, 2}


def test_no_place_is_made_for_more_messages_than_there_are() -> None:
    assert set(ring_depths(pipedream(stages=8, minibatches=1)).values()) == {1}
    assert ring_depths(pipedream(stages=8, minibatches=0)) == {}
    assert ring_depths(pipedream(stages=1)) == {}


def test_an_evaluation_of_many_batches_needs_two_places() -> None:
    schedule = pipedream(stages=3, minibatches=1000, evaluate_every=200, evaluation_batches=500)

    assert kinds(ring_depths(schedule), "evaluation") == [2, 2]


def test_there_is_no_ring_for_an_evaluation_that_never_comes() -> None:
    schedule = pipedream(stages=3, minibatches=1000, evaluate_every=2000, evaluation_batches=5)

    assert kinds(ring_depths(schedule), "evaluation") == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_depths_read_off_a_short_run_are_those_of_the_whole_one(data: st.DataObject) -> None:
    schedule = data.draw(schedules(stages=5, minibatches=60))
    ranks = data.draw(groupings(schedule.stages))

    assert ring_depths(schedule, ranks) == prove(schedule, lists_of(schedule, ranks)).ring_depths


@settings(max_examples=40, deadline=None)
@given(schedules(stages=4, minibatches=80, replicas=4))
def test_depths_of_replicated_stages_are_those_of_the_whole_run(schedule: Schedule) -> None:
    assert ring_depths(schedule) == prove(schedule, lists_of(schedule)).ring_depths


def test_each_pair_of_replicas_that_exchange_messages_has_a_channel() -> None:
    depths = ring_depths(pipedream(replicas=(3, 1), minibatches=30))

    assert {(tuple(channel.source), tuple(channel.destination)) for channel in depths} == {
        pair for replica in range(3) for pair in (((0, replica), (1, 0)), ((1, 0), (0, replica)))
    }


def test_a_run_of_any_length_is_cheap() -> None:
    assert kinds(ring_depths(pipedream(Policy.SPECTRAIN, stages=4, minibatches=10**12)), "activation") == [4, 3, 2]


def test_fewer_places_than_the_consumer_holds_would_stop_the_run_for_ever() -> None:
    schedule = pipedream(stages=4, minibatches=12)
    depths = ring_depths(schedule)

    for channel, depth in depths.items():
        if channel.kind == "activation":
            dry_run(lists_of(schedule), depths={**depths, channel: depth - 1})
            with pytest.raises(ScheduleError, match="deadlock"):
                dry_run(lists_of(schedule), depths={**depths, channel: depth - 2})


def test_channels_within_a_rank_need_no_ring_to_go_on() -> None:
    schedule = pipedream(stages=4, minibatches=12)

    dry_run(lists_of(schedule, [schedule.places]), depths={})
