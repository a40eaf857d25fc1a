"""Where a graph can be cut: all ideals and no others, what crosses each, and layers that are never parted."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import returned_bytes, stage_costs
from hpcpipe.planning.graph import MOST_IDEALS, Ideals
from hpcpipe.planning.problem import Problem
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.search import partition
from hpcpipe.planning.topology import flat
from tests.unit.planning_cases import chain

DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))


def branching(count: int, edges: tuple[tuple[int, int], ...], shared: tuple[tuple[int, int], ...] = ()) -> Profile:
    return replace(chain(*[1.0] * count, output_bytes=1), edges=edges, shared=shared)


@st.composite
def graphs(draw: st.DrawFn, *, shared: bool = False) -> Profile:
    count = draw(st.integers(1, 7))
    pairs = [(i, k) for k in range(count) for i in range(k)]
    some = st.lists(st.sampled_from(pairs), unique=True, max_size=10) if pairs else st.just([])
    sizes = st.integers(0, 1000)
    return Profile(
        layers=tuple(
            LayerCost(
                name=f"layer {i}",
                forward_s=draw(st.floats(0, 1)),
                backward_s=0,
                output_bytes=draw(sizes),
                gradient_bytes=draw(st.none() | sizes),
                parameter_bytes=0,
            )
            for i in range(count)
        ),
        edges=tuple(sorted(draw(some))),
        shared=tuple(draw(some))[:2] if shared else (),
        rows=1,
    )


def found(profile: Profile) -> list[set[int]]:
    """The layers of each ideal."""
    ideals = Ideals(profile)
    return [set(), *(set(ideals.layers(0, index)) for index in range(1, ideals.count))]


def every_ideal(profile: Profile) -> list[set[int]]:
    """By trying all subsets: each holds all that its layers read, and both or none of a pair that shares."""
    count = len(profile.layers)
    subsets = [{i for i in range(count) if mask >> i & 1} for mask in range(2**count)]
    return [
        subset
        for subset in subsets
        if all(source in subset for source, reader in profile.edges if reader in subset)
        and all((one in subset) == (other in subset) for one, other in profile.shared)
    ]


def as_sets(ideals: list[set[int]]) -> set[frozenset[int]]:
    return {frozenset(ideal) for ideal in ideals}


# -- ideals ------------------------------------------------------------------------------------------------


def test_the_ideals_of_a_chain_are_its_prefixes() -> None:
    profile = chain(1, 1, 1, 1)

    assert found(profile) == [set(range(length)) for length in range(5)]
    assert Ideals(profile).is_chain


def test_the_ideals_of_a_diamond_take_either_branch_first() -> None:
    profile = branching(4, DIAMOND)

    assert found(profile) == [set(), {0}, {0, 1}, {0, 2}, {0, 1, 2}, {0, 1, 2, 3}]
    assert not Ideals(profile).is_chain


def test_a_chain_with_a_skip_connection_is_cut_in_the_places_of_a_chain() -> None:
    assert Ideals(branching(4, ((0, 1), (1, 2), (2, 3), (0, 3)))).is_chain


def test_layers_that_read_nothing_of_each_other_may_come_in_any_order() -> None:
    assert as_sets(found(branching(3, ()))) == as_sets(every_ideal(branching(3, ())))
    assert Ideals(branching(3, ())).count == 8


@settings(max_examples=60, deadline=None)
@given(profile=graphs(shared=True))
def test_every_subset_that_holds_what_it_reads_is_an_ideal_and_no_other_is(profile: Profile) -> None:
    ideals = found(profile)

    assert as_sets(ideals) == as_sets(every_ideal(profile))
    assert len(ideals) == len(as_sets(ideals))
    assert (ideals[0], ideals[-1]) == (set(), set(range(len(profile.layers))))


@settings(max_examples=40, deadline=None)
@given(profile=graphs(shared=True))
def test_behind_an_ideal_are_those_that_contain_it(profile: Profile) -> None:
    ideals, sets = Ideals(profile), found(profile)

    for before in range(ideals.count):
        behind = np.arange(ideals.count)[ideals.behind(before)]
        assert behind.tolist() == [index for index, larger in enumerate(sets) if sets[before] < larger]
        assert all(set(ideals.layers(before, index)) == sets[index] - sets[before] for index in behind)


@settings(max_examples=40, deadline=None)
@given(profile=graphs(shared=True))
def test_an_ideal_is_found_by_its_layers(profile: Profile) -> None:
    ideals, sets = Ideals(profile), found(profile)

    assert [ideals.index(layers) for layers in sets] == list(range(ideals.count))


def test_layers_that_are_no_ideal_have_no_place() -> None:
    with pytest.raises(KeyError):
        Ideals(chain(1, 1, 1)).index([1])


@pytest.mark.parametrize(
    ("profile", "stages"),
    [
        (chain(1, 1, 1, 1, 1), 5),
        (branching(4, DIAMOND), 4),
        (replace(chain(1, 1, 1, 1, 1), shared=((1, 3),)), 3),
        (replace(chain(1, 1, 1, 1, 1), shared=((0, 1), (3, 4))), 3),
        (branching(4, DIAMOND, shared=((1, 2),)), 3),
        (replace(chain(1, 1, 1), shared=((0, 2),)), 1),
    ],
    ids=["chain", "diamond", "tied chain", "tied twice", "tied branches", "all tied"],
)
def test_the_longest_pipeline_has_a_stage_for_every_layer_that_may_stand_alone(
    profile: Profile, stages: int
) -> None:
    assert Ideals(profile).most_stages == stages


def test_a_graph_of_more_than_64_layers_keeps_its_places_apart() -> None:
    # Two branches of 40 layers behind a first one, joined by a last.
    edges = [(0, 1), (0, 41), (40, 81), (80, 81)]
    edges += [(i, i + 1) for i in range(1, 80) if i != 40]
    layers = tuple(
        LayerCost(name=f"{i}", forward_s=1, backward_s=0, output_bytes=1, parameter_bytes=0) for i in range(82)
    )

    ideals = Ideals(Profile(layers=layers, edges=tuple(sorted(edges)), rows=1))

    assert ideals.count == 41 * 41 + 2
    assert set(ideals.activation_bytes) == {0, 1, 2}
    # Behind {0 .. 40} only the other branch and the last layer remain.
    index = next(i for i in range(ideals.count) if set(ideals.layers(0, i)) == set(range(41)))
    assert len(np.arange(ideals.count)[ideals.behind(index)]) == 41


def test_too_many_places_to_cut_are_one_line() -> None:
    with pytest.raises(PlanError) as caught:
        Ideals(branching(12, ()))

    assert MOST_IDEALS < 2**12
    assert str(caught.value) == (
        "the graph of 12 layers can be cut in more than 3,000 places: merge layers of branches that run side by "
        "side in the profile"
    )


def test_layers_without_edges_are_refused_before_their_ideals_fill_the_memory() -> None:
    layers = tuple(
        LayerCost(name=f"{i}", forward_s=1, backward_s=0, output_bytes=1, parameter_bytes=0) for i in range(2000)
    )

    with pytest.raises(PlanError, match="the graph of 2000 layers can be cut in more than 3,000 places"):
        Ideals(Profile(layers=layers, edges=(), rows=1))


def test_as_many_places_as_allowed_are_searched() -> None:
    assert Ideals(branching(4, ()), most=16).count == 16
    with pytest.raises(PlanError, match="more than 15 places"):
        Ideals(branching(4, ()), most=15)


# -- what crosses ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(profile=graphs(shared=True))
def test_the_outputs_that_layers_outside_read_cross_once(profile: Profile) -> None:
    ideals = Ideals(profile)

    for index, inside in enumerate(found(profile)):
        crossing = {source for source, reader in profile.edges if source in inside and reader not in inside}
        assert ideals.activation_bytes[index] == sum(profile.layers[i].output_bytes for i in crossing)
        assert ideals.gradient_bytes[index] == sum(returned_bytes(profile.layers[i]) for i in crossing)


@settings(max_examples=40, deadline=None)
@given(profile=graphs(), data=st.data())
def test_what_crosses_is_what_the_costs_charge_at_that_cut(profile: Profile, data: st.DataObject) -> None:
    ideals = Ideals(profile)
    places, here = [0], 0
    while here != ideals.count - 1:
        here = data.draw(st.sampled_from(np.arange(ideals.count)[ideals.behind(here)].tolist()))
        places.append(here)

    costs = stage_costs(profile, [ideals.layers(before, behind) for before, behind in pairwise(places)])

    assert [cost.output_bytes for cost in costs] == ideals.activation_bytes[places[1:]].tolist()
    assert [cost.gradient_bytes for cost in costs] == ideals.gradient_bytes[places[1:]].tolist()


# -- sums --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(profile=graphs(shared=True))
def test_a_sum_between_two_ideals_is_that_of_the_layers_between(profile: Profile) -> None:
    ideals = Ideals(profile)
    sums = ideals.sums(lambda layer: layer.forward_s)

    for before in range(ideals.count - 1):
        behind = ideals.behind(before)
        exact = [
            float(sum(Fraction(profile.layers[i].forward_s) for i in ideals.layers(before, index)))
            for index in np.arange(ideals.count)[behind]
        ]
        assert sums.between(before, behind) == pytest.approx(exact, rel=1e-15, abs=1e-30)


def test_a_tiny_stage_behind_a_huge_one_keeps_all_its_digits() -> None:
    profile = chain(1e8, 0.1, 0.2)
    seconds = [layer.forward_s for layer in profile.layers]

    between = Ideals(profile).sums(lambda layer: layer.forward_s).between(1, slice(2, 4))

    assert between.tolist() == pytest.approx([seconds[1], seconds[1] + seconds[2]], rel=1e-15)
    assert pytest.approx(0.1, rel=1e-9) != (1e8 + 0.1) - 1e8


def test_sums_of_bytes_are_exact() -> None:
    profile = chain(1, 1, 1, parameter_bytes=2**53 - 1)

    sums = Ideals(profile).sums(lambda layer: layer.parameter_bytes)

    assert sums.between(2, slice(3, 4)).tolist() == [2**53 - 1]


# -- layers that share a weight ----------------------------------------------------------------------------


def test_a_chain_is_never_cut_between_layers_that_share_a_weight() -> None:
    profile = replace(chain(1, 1, 1, 1, 1), shared=((1, 3),))

    assert found(profile) == [set(), {0}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_pairs_that_overlap_hold_all_their_layers_together() -> None:
    profile = replace(chain(1, 1, 1, 1), shared=((0, 2), (1, 3)))

    assert found(profile) == [set(), {0, 1, 2, 3}]


def test_branches_that_share_a_weight_are_in_one_stage() -> None:
    profile = branching(4, DIAMOND, shared=((1, 2),))

    assert found(profile) == [set(), {0}, {0, 1, 2}, {0, 1, 2, 3}]


def test_what_crosses_and_sums_leave_out_the_same_places() -> None:
    profile = replace(chain(3, 6, 9, output_bytes=5), shared=((0, 1),))
    ideals = Ideals(profile)

    assert ideals.activation_bytes.tolist() == [0, 5, 0]
    sums = ideals.sums(lambda layer: layer.forward_s)
    assert sums.between(0, ideals.behind(0)).tolist() == [3, 6]


@pytest.mark.parametrize(
    "edges", [tuple((i, i + 1) for i in range(5)), ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))]
)
@pytest.mark.parametrize("pair", [(0, 5), (1, 2), (1, 4), (2, 3), (4, 5)])
def test_no_plan_parts_layers_that_share_a_weight(
    edges: tuple[tuple[int, int], ...], pair: tuple[int, int]
) -> None:
    profile = branching(6, edges, shared=(pair,))

    for ranks in (2, 3, 6):
        split = partition(Problem(profile=profile, topology=flat(6, 1e9), ranks=ranks))
        assert sum(any(layer in stage.layers for layer in pair) for stage in split.stages) == 1
