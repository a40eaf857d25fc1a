from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.datasets.order import Order, held_out
from hpcpipe.errors import DataError


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(0, 3), st.booleans())
def test_an_epoch_deals_every_row_out_once(rows: int, batch: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = Order(rows=rows, batch=batch, seed=seed, shuffle=shuffle)
    minibatches = range(epoch * order.minibatches_per_epoch, (epoch + 1) * order.minibatches_per_epoch)

    dealt = [order.indices(j) for j in minibatches]

    assert sorted(np.concatenate(dealt).tolist()) == list(range(rows))
    assert [len(index) for index in dealt] == [order.rows(j) for j in minibatches]
    assert all(len(index) == batch for index in dealt[:-1])
    assert {order.epoch(j) for j in minibatches} == {epoch}


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    forwards = Order(rows=23, batch=5, seed=1)
    backwards = Order(rows=23, batch=5, seed=1)
    there = [forwards.indices(j).tolist() for j in range(20)]

    back = [backwards.indices(j).tolist() for j in reversed(range(20))]

    assert there == back[::-1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = Order(rows=50, batch=50, seed=1)

    assert order.indices(0).tolist() != order.indices(1).tolist()
    assert order.indices(0).tolist() != Order(rows=50, batch=50, seed=2).indices(0).tolist()


def test_without_shuffling_rows_come_as_they_are() -> None:
    order = Order(rows=5, batch=2, seed=1, shuffle=False)

    assert [order.indices(j).tolist() for j in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_short_last_minibatch_can_be_left_out() -> None:
    order = Order(rows=5, batch=2, seed=1, shuffle=False, drop_last=True)

    assert order.minibatches_per_epoch == 2
    assert [order.indices(j).tolist() for j in range(3)] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(("rows", "drop_last"), [(3, True), (0, False)])
def test_an_epoch_without_a_minibatch_is_refused(rows: int, drop_last: bool) -> None:
    with pytest.raises(DataError, match=f"data.batch: {rows} training rows make no minibatch of 4 rows"):
        Order(rows=rows, batch=4, seed=0, drop_last=drop_last)


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.999])
def test_held_out_rows_are_apart_from_the_others_and_both_exist(fraction: float) -> None:
    train, held = held_out(10, fraction, 3)

    assert sorted([*train, *held]) == list(range(10))
    assert len(train) >= 1
    assert len(held) >= 1
