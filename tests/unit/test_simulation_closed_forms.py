"""Simulated throughput, bubbles and start times against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Schedule
from hpcpipe.schedule.actions import COMPUTES
from hpcpipe.schedule.dryrun import Pass, dry_run
from hpcpipe.simulation import Simulated
from hpcpipe.simulation.simulate import in_flight, steady_span
from tests.unit.schedule_cases import groupings, lists_of, pipedream, schedules
from tests.unit.simulation_cases import EVERYTHING, links, run, unit


def starts(found: Simulated) -> dict[Pass, float]:
    """When each pass starts."""
    return {
        (event.action.op, event.action.stage, event.action.minibatch, event.action.microbatch): event.start
        for event in found.events
        if event.action.op in COMPUTES
    }


def synchronous(name: str, *, stages: int, microbatches: int, minibatches: int = 20) -> Schedule:
    return Schedule(name=name, stages=stages, minibatches=minibatches, microbatches=microbatches)


# -- the unit clock ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(schedules(stages=4, minibatches=20, replicas=3))
def test_with_unit_passes_and_free_messages_all_start_on_the_unit_clock(schedule: Schedule) -> None:
    assert starts(run(schedule, window=EVERYTHING)) == dry_run(lists_of(schedule)).start


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_so_do_several_stages_on_a_rank(data: st.DataObject) -> None:
    schedule = data.draw(schedules(stages=5, minibatches=12))
    groups = data.draw(groupings(schedule.stages))

    found = run(schedule, groups=groups, window=EVERYTHING)

    assert starts(found) == dry_run(lists_of(schedule, groups)).start


# -- bubbles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 4), (3, 8)])
def test_the_bubble_of_a_flush_is_the_textbooks(name: str, stages: int, microbatches: int) -> None:
    found = run(synchronous(name, stages=stages, microbatches=microbatches))

    assert found.steady is not None
    assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert found.minibatches_per_s == pytest.approx(1 / (2 * (microbatches + stages - 1)))


def test_a_balanced_asynchronous_pipeline_has_no_bubble_between_fill_and_drain() -> None:
    found = run(pipedream(stages=4, minibatches=100))

    assert found.bubble == pytest.approx(0.0, abs=1e-12)
    assert found.minibatches_per_s == pytest.approx(0.5)
    # Fill and drain together cost each of 4 ranks 2 * 3 units.
    assert found.whole_bubble == pytest.approx(6 / 206)


def test_the_slowest_stage_sets_the_pace_and_is_named() -> None:
    costs = [unit(), unit(forward_s=3.0, backward_s=4.0, update_s=0.5), unit()]

    found = run(pipedream(stages=3, minibatches=80), costs)

    assert found.minibatches_per_s == pytest.approx(1 / 7.5)
    assert found.steady is not None
    assert found.steady.busy == pytest.approx((2 / 7.5, 1.0, 2 / 7.5))
    assert found.slowest.name == "rank 1 (stage 1)"
    assert found.slowest.share > 0.9


def test_replicas_share_the_minibatches_of_a_slow_stage() -> None:
    costs = [unit(forward_s=3.0, backward_s=3.0), unit()]

    found = run(pipedream(replicas=(3, 1), minibatches=120), costs)

    assert found.minibatches_per_s == pytest.approx(0.5)
    assert found.bubble == pytest.approx(0.0, abs=1e-12)


def test_a_synchronous_stage_of_replicas_is_as_fast_as_its_share_of_microbatches() -> None:
    schedule = Schedule(name="1f1b", stages=1, minibatches=20, microbatches=6, replicas=(3,))

    assert run(schedule).minibatches_per_s == pytest.approx(1 / 4)


def test_evaluations_take_their_time() -> None:
    plain = pipedream(stages=1, minibatches=10)

    found = run(replace(plain, evaluate_every=5, evaluation_batches=3))

    assert found.seconds == run(plain).seconds + 6


# -- the steady state --------------------------------------------------------------------------------------


def test_a_run_that_never_gets_beyond_its_fill_has_no_steady_state() -> None:
    found = run(pipedream(stages=8, minibatches=12))

    assert found.steady is None
    assert found.minibatches_per_s == 12 / found.seconds
    assert found.bubble == found.whole_bubble


@settings(max_examples=100, deadline=None)
@given(schedules(stages=6, minibatches=200, replicas=4))
def test_the_steady_state_lies_between_two_boundaries_behind_the_fill(schedule: Schedule) -> None:
    span = steady_span(schedule)

    if span is not None:
        begin, end = span
        assert schedule.is_boundary(begin - 1)
        assert schedule.is_boundary(end - 1)
        assert schedule.first + in_flight(schedule) <= begin < end


def test_drains_within_the_run_count_as_part_of_its_steady_state() -> None:
    found = run(replace(pipedream(stages=3, minibatches=100), drain_every=10))

    # Ten minibatches, and a fill and a drain of two minibatches each.
    assert found.minibatches_per_s == pytest.approx(10 / (2 * 10 + 4))


def test_passes_that_take_no_time_are_infinitely_fast() -> None:
    found = run(pipedream(minibatches=4), unit(forward_s=0.0, backward_s=0.0))

    assert (found.seconds, found.bubble) == (0.0, 1.0)
    assert found.minibatches_per_s == float("inf")


def test_a_schedule_without_minibatches_takes_no_time() -> None:
    assert run(pipedream(minibatches=0)).seconds == 0.0


def test_samples_are_those_of_a_minibatch() -> None:
    assert run(pipedream(stages=1, minibatches=50), samples=64).samples_per_s == pytest.approx(32.0)


def test_two_stages_on_one_rank_take_turns_and_send_nothing() -> None:
    schedule = pipedream(stages=2, minibatches=40)
    costs = unit(output_bytes=10, input_gradient_bytes=10)

    found = run(schedule, costs, links(1), groups=[schedule.places])

    assert found.minibatches_per_s == pytest.approx(1 / 4)
    assert found.bubble == pytest.approx(0.0)
