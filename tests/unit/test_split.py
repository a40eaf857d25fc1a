from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import ModelError
from hpcpipe.models.split import split, split_counts


def every_split(layers: int, stages: int) -> list[list[tuple[int, int]]]:
    return [list(pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), stages - 1)]


def quality(weights: list[int], bounds: list[tuple[int, int]]) -> tuple[int, int, int]:
    sums = [sum(weights[first:last]) for first, last in bounds]
    return max(sums), sum(total**2 for total in sums), sum((last - first) ** 2 for first, last in bounds)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
def test_a_split_is_as_good_as_the_best_of_all_splits(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))

    bounds = split(weights, stages)

    assert bounds in every_split(len(weights), stages)
    best = min(quality(weights, other) for other in every_split(len(weights), stages))
    assert quality(weights, bounds) == best


@pytest.mark.parametrize(
    ("weights", "stages", "counts"),
    [
        ([1, 1, 1, 1, 1], 4, [2, 1, 1, 1]),
        ([0, 0, 0, 0, 0], 4, [2, 1, 1, 1]),
        ([1, 1, 1000, 1, 1], 3, [2, 1, 2]),
        ([5, 5, 5], 3, [1, 1, 1]),
        ([5, 5, 5], 1, [3]),
        ([0.25, 0.25, 0.5], 2, [2, 1]),
    ],
    ids=["ones", "zeros", "one huge", "as many as layers", "one stage", "floats"],
)
def test_a_split_leaves_no_stage_empty(weights: list[float], stages: int, counts: list[int]) -> None:
    assert [last - first for first, last in split(weights, stages)] == counts


def test_42_layers_on_16_ranks_give_each_rank_two_or_three() -> None:
    counts = [last - first for first, last in split([1] * 42, 16)]

    assert sum(counts) == 42
    assert set(counts) == {2, 3}


def test_weights_whose_squares_overflow_are_split() -> None:
    assert split([1e200, 1e200, 1e200], 3) == [(0, 1), (1, 2), (2, 3)]


def test_more_stages_than_layers_is_an_error_that_names_both() -> None:
    with pytest.raises(ModelError, match=r"pipeline.stages: 5 stages for a model of 3 layers.*at most 3 ranks"):
        split([1, 2, 3], 5)


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        split([1, -1], 2)


def test_layer_counts_become_bounds() -> None:
    assert split_counts([2, 1, 3], 6) == [(0, 2), (2, 3), (3, 6)]


@pytest.mark.parametrize("counts", [[1, 2], [0, 5], [6, -1], [3, 3]])
def test_layer_counts_that_do_not_fit_are_refused_with_some_that_do(counts: list[int]) -> None:
    with pytest.raises(ModelError, match=r"the model has 5 .*an even split is \[3, 2\]"):
        split_counts(counts, 5)
