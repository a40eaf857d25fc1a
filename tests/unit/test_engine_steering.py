"""When a run cuts and stops, and how the ranks come to the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcpipe.engine.steering import CutMark, Steering


def _pass_on(sender: Steering, receiver: Steering) -> None:
    receiver.arrived_with_activation(sender.activation_word())


@given(minibatch=st.integers(0, 2**40), stop=st.booleans())
def test_a_mark_survives_its_word(minibatch: int, stop: bool) -> None:
    mark = CutMark(minibatch=minibatch, stop=stop)

    assert CutMark.from_word(mark.word()) == mark


def test_the_word_0_is_no_mark() -> None:
    assert CutMark.from_word(0) is None


def test_a_request_at_any_stage_reaches_the_first_on_gradients_and_comes_back_on_activations() -> None:
    first, middle, last = (Steering(every=0, last=999) for _ in range(3))
    last.request()

    middle.arrived_with_gradient(last.gradient_word())
    first.arrived_with_gradient(middle.gradient_word())
    first.decide(17)
    _pass_on(first, middle)
    _pass_on(middle, last)

    assert {first.stop_after, middle.stop_after, last.stop_after} == {17}
    assert all(steering.cuts_at(17) for steering in (first, middle, last))


def test_a_second_request_does_not_move_a_decided_cut() -> None:
    steering = Steering(every=0, last=999)
    steering.request()
    steering.decide(17)

    steering.request()
    steering.decide(18)

    assert steering.stop_after == 17
    assert not steering.cuts_at(18)


def test_a_request_after_the_last_forward_lets_the_run_end_normally() -> None:
    steering = Steering(every=0, last=20)
    steering.request()

    steering.decide(20)

    assert steering.stop_after is None
    assert steering.cuts_at(20)


@given(every=st.integers(1, 12), oldest=st.integers(0, 60), ahead=st.integers(0, 15))
def test_a_regular_cut_is_foreseen_by_every_forward_that_will_be_in_flight_at_it(
    every: int, oldest: int, ahead: int
) -> None:
    steering = Steering(every=every, last=10**9)
    minibatch = oldest + ahead

    expected = any(steering.cuts_at(cut) for cut in range(oldest, minibatch))

    assert steering.cut_between(oldest, minibatch) == expected


def test_a_decided_cut_is_foreseen_until_it_has_passed() -> None:
    steering = Steering(every=0, last=999)
    steering.request()
    steering.decide(10)

    assert steering.cut_between(8, 11)
    assert not steering.cut_between(8, 10)
    steering.passed(10)
    assert not steering.cut_between(8, 11)


def test_a_mark_that_arrives_again_after_its_cut_is_not_taken_for_a_new_one() -> None:
    steering = Steering(every=0, last=999)
    word = CutMark(minibatch=5, stop=False).word()
    steering.arrived_with_activation(word)
    steering.passed(5)

    steering.arrived_with_activation(word)

    assert steering.activation_word() == 0


def test_cuts_by_time_come_when_the_interval_is_over_and_count_from_the_cut_before() -> None:
    now = [0.0]
    steering = Steering(every=0, last=999, seconds=lambda: 60.0, clock=lambda: now[0])
    cuts = []
    for minibatch in range(300):
        now[0] += 1.0
        steering.decide(minibatch)
        if steering.cuts_at(minibatch):
            cuts.append(minibatch)
            steering.passed(minibatch)

    assert cuts == [59, 119, 179, 239, 299]


def test_without_an_interval_time_decides_nothing() -> None:
    now = [0.0]
    steering = Steering(every=0, last=999, clock=lambda: now[0])
    now[0] = 1e9

    steering.decide(3)

    assert not steering.cuts_at(3)


@pytest.mark.parametrize(("minibatch", "cut"), [(0, 9), (8, 9), (9, 9), (10, 19)])
def test_where_the_pipeline_is_drained_a_stop_waits_for_the_end_of_the_stretch(minibatch: int, cut: int) -> None:
    steering = Steering(every=10, last=999, drain_every=10)
    steering.request()

    steering.decide(minibatch)

    assert steering.stop_after == cut


def test_a_request_from_outside_is_looked_for_before_each_forward() -> None:
    answers = iter([False, False, True])
    steering = Steering(every=0, last=999, asked=lambda: next(answers))

    for minibatch in range(3):
        steering.decide(minibatch)

    assert steering.stop_after == 2
