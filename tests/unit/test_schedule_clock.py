"""The folded unit clock against a simulation of the whole run."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Op
from hpcpipe.schedule.clock import UnitClock, simulate, timed


def check(name: str, replicas: tuple[int, ...], minibatches: int, microbatches: int) -> None:
    """Every time and every count of the folded clock is that of the full simulation."""
    clock = UnitClock(schedule=name, replicas=replicas, minibatches=minibatches, microbatches=microbatches)

    full = simulate(name, replicas, minibatches, microbatches)

    for stage in range(len(replicas)):
        for op, j, i in product((Op.FORWARD, Op.BACKWARD), range(minibatches), range(microbatches)):
            assert clock.start(stage, op, j, i) == full.start(stage, op, j, i) >= 0
    for stage, count in enumerate(replicas):
        length = count if name == "pipedream" else 1
        for j in range(minibatches):
            returned = full.start(0, Op.BACKWARD, j)
            counted = sum(end < returned for end in full.updated[stage])
            assert clock.updates_before_return(stage, j) == max(counted, j // length)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["pipedream", "gpipe", "1f1b"]), st.integers(1, 12), st.integers(0, 120), st.integers(1, 4))
def test_the_folded_clock_equals_the_full_simulation(name: str, stages: int, minibatches: int, micro: int) -> None:
    check(name, (1,) * stages, minibatches, 1 if name == "pipedream" else micro)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 200))
def test_the_folded_clock_of_replicated_stages_equals_the_full_simulation(counts: list[int], count: int) -> None:
    check("pipedream", tuple(counts), count, 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 30), st.integers(1, 5))
def test_the_folded_clock_of_replicas_that_share_microbatches(counts: list[int], count: int, micro: int) -> None:
    check("1f1b", tuple(counts), count, micro)


def test_times_may_repeat_after_several_common_rounds_only() -> None:
    assert UnitClock(schedule="pipedream", replicas=(4, 2, 3, 2), minibatches=333).simulated < 333
    check("pipedream", (4, 2, 3, 2), 333, 1)


def test_updates_end_when_the_last_replica_comes_to_them() -> None:
    times = simulate("pipedream", (2,), 3, 1)

    assert [times.start(0, Op.FORWARD, j) for j in range(3)] == [0, 0, 2]
    assert [times.start(0, Op.BACKWARD, j) for j in range(3)] == [1, 1, 3]
    assert list(times.updated[0]) == [2, 4]


def test_a_long_run_is_not_simulated_whole() -> None:
    clock = UnitClock(schedule="pipedream", replicas=(1,) * 4, minibatches=10**12)

    assert clock.simulated < 50
    assert clock.updates_before_return(3, 10**11) == 10**11 + 1
    assert clock.updates_before_return(3, 10**12 - 1) == 10**12


def test_a_long_run_of_replicas_is_not_simulated_whole() -> None:
    clock = UnitClock(schedule="pipedream", replicas=(3, 1), minibatches=10**12)

    assert clock.simulated < 100
    assert clock.updates_before_return(0, 3 * 10**11) == 10**11


def test_an_update_is_counted_before_the_pass_that_follows_it_at_the_same_time() -> None:
    # The gradients of four replicas come so close together that B(1) starts as U(0) ends.
    clock = UnitClock(schedule="pipedream", replicas=(1, 4), minibatches=4)

    assert [clock.updates_before_return(0, j) for j in range(4)] == [0, 1, 2, 3]


def test_orders_that_wait_for_each_other_are_named() -> None:
    orders = [[[(Op.BACKWARD, 0, 0), (Op.FORWARD, 0, 0)]], [[(Op.FORWARD, 0, 0), (Op.BACKWARD, 0, 0)]]]

    with pytest.raises(RuntimeError, match=r"deadlocks at stages \[0, 1\]"):
        timed(orders, 1, 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(0, 60))
def test_a_straight_pipeline_keeps_the_times_of_the_formulas(stages: int, minibatches: int) -> None:
    times = simulate("pipedream", (1,) * stages, minibatches, 1)

    for stage, j in product(range(stages), range(minibatches)):
        ahead = j if j < stages - stage else 2 * j
        assert times.start(stage, Op.FORWARD, j) == stage + ahead
        assert times.start(stage, Op.BACKWARD, j) == 2 * stages - 1 - stage + 2 * j
        assert times.updated[stage][j] == 2 * stages - stage + 2 * j


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 60))
def test_a_straight_pipeline_makes_half_as_many_updates_as_stages_lie_before_it_in_the_round_trip(
    stages: int, minibatches: int
) -> None:
    clock = UnitClock(schedule="pipedream", replicas=(1,) * stages, minibatches=minibatches)

    for stage, j in product(range(stages), range(minibatches)):
        # SpecTrain's backward distance, floor(k/2).
        assert clock.updates_before_return(stage, j) == min(j + stage // 2, minibatches)
