"""The folded unit clock against a simulation of the whole run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Op
from hpcpipe.schedule.clock import UnitClock, start_times
from hpcpipe.schedule.orders import order_named


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["pipedream", "gpipe", "1f1b"]), st.integers(1, 16), st.integers(0, 150), st.integers(1, 5))
def test_the_folded_clock_equals_the_full_simulation(name: str, stages: int, minibatches: int, micro: int) -> None:
    microbatches = 1 if name == "pipedream" else micro
    clock = UnitClock(schedule=name, stages=stages, minibatches=minibatches, microbatches=microbatches)
    orders = [list(order_named(name)(k, stages, 0, minibatches, microbatches, None)) for k in range(stages)]

    full = start_times(orders)

    for stage, starts in enumerate(full):
        for (op, j, i), when in starts.items():
            assert clock.start(stage, op, j, i) == when
    for stage in range(stages):
        ends = [full[stage][Op.BACKWARD, j, microbatches - 1] + 1 for j in range(minibatches)]
        for j in range(minibatches):
            returned = full[0][Op.BACKWARD, j, 0]
            assert clock.updates_before_return(stage, j) == sum(end < returned for end in ends)


def test_a_long_run_is_not_simulated_whole() -> None:
    clock = UnitClock(schedule="pipedream", stages=4, minibatches=10**12)

    assert clock.simulated < 50
    assert clock.updates_before_return(3, 10**11) == 10**11 + 1
    assert clock.updates_before_return(3, 10**12 - 1) == 10**12


def test_orders_that_wait_for_each_other_are_named() -> None:
    orders = [[(Op.BACKWARD, 0, 0), (Op.FORWARD, 0, 0)], [(Op.FORWARD, 0, 0), (Op.BACKWARD, 0, 0)]]

    with pytest.raises(RuntimeError, match=r"deadlocks at stages \[0, 1\]"):
        start_times(orders)
