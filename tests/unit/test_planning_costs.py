"""The cost model in closed form: what stages, cuts and plans take, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.costs import (
    allreduce_s,
    flush_factor,
    plan_time,
    reduction_widening,
    stage_costs,
    transfer_s,
)
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, flat
from tests.unit.planning_cases import chain, nodes

LINK = Level(name="link", size=8, bandwidth=1000, latency_s=0.5)


def layered(edges: Sequence[tuple[int, int]], input_bytes: int = 0) -> Profile:
    """Layers whose outputs are 1, 10, 100, ... bytes and come back as 3, 30, 300, ..., so that sums show them."""
    count = 1 + max(end for edge in edges for end in edge)
    layers = tuple(
        LayerCost(
            name=f"layer {i}",
            forward_s=1,
            backward_s=2,
            output_bytes=10**i,
            gradient_bytes=3 * 10**i,
            parameter_bytes=0,
        )
        for i in range(count)
    )
    return Profile(layers=layers, edges=tuple(edges), rows=1, input_bytes=input_bytes)


# -- messages and all-reduces ------------------------------------------------------------------------------


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    assert transfer_s(LINK, 3000) == 3.5
    assert transfer_s(LINK, 0) == 0.5


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_moves_each_byte_twice_but_for_its_own_part(ranks: int) -> None:
    assert allreduce_s(LINK, 6000, ranks) == pytest.approx(2 * (ranks - 1) / ranks * 6 + 2 * (ranks - 1) * 0.5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_servers_move_twice_as_much_as_a_ring(ranks: int) -> None:
    assert allreduce_s(LINK, 6000, ranks, "server") == pytest.approx(4 * (ranks - 1) / ranks * 6 + (ranks - 1))


@pytest.mark.parametrize("kind", ["ring", "server"])
def test_one_rank_has_nothing_to_reduce(kind: str) -> None:
    assert allreduce_s(LINK, 6000, 1, kind) == 0


def test_an_all_reduce_has_a_bandwidth_of_its_own() -> None:
    level = replace(LINK, allreduce_bandwidth=500, latency_s=0)

    assert allreduce_s(level, 1000, 2) == 2 * allreduce_s(replace(LINK, latency_s=0), 1000, 2) == 2
    assert transfer_s(level, 1000) == 1


# -- stages ------------------------------------------------------------------------------------------------


def test_a_stage_takes_what_its_layers_take() -> None:
    profile = chain(3, 6, 9, parameter_bytes=8, state_bytes=16, buffer_bytes=4, saved_bytes=32, update_s=0.5)

    first, second = stage_costs(profile, [[0, 1], [2]])

    assert (first.forward_s, first.backward_s, first.update_s) == (3, 6, 1)
    assert (second.forward_s, second.backward_s, second.update_s) == (3, 6, 0.5)
    assert (first.parameter_bytes, first.state_bytes, first.buffer_bytes, first.saved_bytes) == (16, 32, 8, 64)


def test_each_pass_of_a_stage_has_overhead_data_targets_and_messages() -> None:
    profile = replace(
        chain(0, 0, 0), pass_overhead_s=1, message_s=10, data_s=100, targets_s=1000, about={"unit": "minibatches"}
    )

    found = [(c.forward_s, c.backward_s, c.update_s) for c in stage_costs(profile, [[0], [1], [2]])]

    assert found == [(111, 11, 0), (21, 21, 0), (1011, 11, 0)]


def test_a_single_stage_loads_data_and_targets_and_sends_nothing() -> None:
    profile = replace(chain(0, 0), pass_overhead_s=1, message_s=10, data_s=100, targets_s=1000)

    (only,) = stage_costs(profile, [[0, 1]])

    assert (only.forward_s, only.backward_s) == (1101, 1)


def test_a_stage_sums_without_losing_digits() -> None:
    # Added one by one to 1, each of 20 times 1e-16 would be lost.
    (only,) = stage_costs(chain(3, *[3e-16] * 20), [range(21)])

    assert only.forward_s == 1 + 2e-15


@pytest.mark.parametrize(("dtype", "times"), [("float32", 1), ("float64", 1), ("bfloat16", 2), ("float16", 2)])
def test_gradients_of_half_precision_are_summed_in_float32(dtype: str, times: int) -> None:
    profile = chain(1, parameter_bytes=8, about={"dtype": dtype})

    assert reduction_widening(profile) == times
    assert stage_costs(profile, [[0]])[0].reduced_bytes == 8 * times


def test_layers_of_a_stage_stand_in_the_profiles_order() -> None:
    assert stage_costs(chain(1, 1, 1), [[1, 0], [2]])[0].layers == (0, 1)


# -- what crosses cuts -------------------------------------------------------------------------------------


def test_what_one_stage_sends_the_next_one_receives() -> None:
    profile = layered([(0, 1), (1, 2), (2, 3)], input_bytes=7)

    first, second, third = stage_costs(profile, [[0], [1, 2], [3]])

    assert (first.input_bytes, first.input_gradient_bytes) == (7, 0)
    assert (first.output_bytes, first.gradient_bytes) == (1, 3)
    assert (second.input_bytes, second.input_gradient_bytes) == (1, 3)
    assert (second.output_bytes, second.gradient_bytes) == (100, 300)
    assert (third.input_bytes, third.input_gradient_bytes) == (100, 300)
    assert (third.output_bytes, third.gradient_bytes) == (0, 0)


def test_as_much_comes_back_as_went_unless_the_profile_says_otherwise() -> None:
    first, _ = stage_costs(chain(1, 1, output_bytes=5), [[0], [1]])
    without, _ = stage_costs(chain(1, 1, output_bytes=5, gradient_bytes=0), [[0], [1]])

    assert (first.output_bytes, first.gradient_bytes) == (5, 5)
    assert (without.output_bytes, without.gradient_bytes) == (5, 0)


def test_a_skip_connection_is_charged_at_every_cut_that_it_crosses() -> None:
    profile = layered([(0, 1), (1, 2), (2, 3), (0, 3)])

    found = stage_costs(profile, [[0], [1], [2], [3]])

    assert [cost.output_bytes for cost in found] == [1, 11, 101, 0]
    assert [cost.gradient_bytes for cost in found] == [3, 33, 303, 0]
    assert [cost.input_bytes for cost in found] == [0, 1, 11, 101]
    assert [cost.input_gradient_bytes for cost in found] == [0, 3, 33, 303]


def test_an_output_with_several_readers_crosses_a_cut_once() -> None:
    profile = layered([(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)])

    first, second, _ = stage_costs(profile, [[0], [1], [2, 3]])

    assert (first.output_bytes, second.output_bytes) == (1, 11)


def test_a_skip_connection_within_a_stage_costs_nothing() -> None:
    profile = layered([(0, 1), (1, 2), (0, 2), (2, 3)])

    first, _ = stage_costs(profile, [[0, 1, 2], [3]])

    assert (first.output_bytes, first.gradient_bytes) == (100, 300)


def test_an_output_that_nobody_reads_stays_where_it_is() -> None:
    profile = layered([(0, 2), (1, 2)])

    assert stage_costs(replace(profile, edges=((0, 2),)), [[0, 1], [2]])[0].output_bytes == 1


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([[0, 1], []], "stage 1 holds no layer: a stage must hold at least one"),
        ([[0, 1], [1, 2]], "layer 'b' is in stages 0 and 1"),
        ([[0], [2]], "layer 'b' is in no stage"),
        ([[1], [0, 2]], "layer 'b' of stage 0 reads 'a' of stage 1: stages must follow the edges"),
    ],
)
def test_stages_that_make_no_pipeline_are_one_line(stages: list[list[int]], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        stage_costs(chain(1, 1, 1), stages)

    assert str(caught.value) == says


# -- plans -------------------------------------------------------------------------------------------------


def test_a_replicated_stage_takes_the_longer_of_compute_and_all_reduce_once_for_each_ranks_minibatch() -> None:
    # C = 12 + 1; the ring of 3 moves 4/3 of 30 bytes at 1 byte a second.
    costs = stage_costs(chain(12, parameter_bytes=30, update_s=1), [[0]])

    slow, fast = (plan_time(costs, [range(3)], flat(3, rate)).stages[0] for rate in (1, 100))

    assert [slow.compute_s, slow.allreduce_s, slow.seconds] == pytest.approx([13, 40, 40 / 3])
    assert [fast.compute_s, fast.allreduce_s, fast.seconds] == pytest.approx([13, 0.4, 13 / 3])


def test_an_all_reduce_through_servers_costs_twice_a_ring() -> None:
    costs = stage_costs(chain(0, parameter_bytes=30), [[0]])

    ring, server = (
        plan_time(costs, [range(3)], flat(3, 1), allreduce=kind).seconds for kind in ("ring", "server")
    )

    assert server == pytest.approx(2 * ring)


def test_a_cut_takes_both_ways_with_a_latency_each() -> None:
    costs = stage_costs(layered([(0, 1)]), [[0], [1]])

    (cut,) = plan_time(costs, [[0], [1]], flat(2, 2, latency_s=0.25)).cuts

    assert (cut.nbytes, cut.seconds) == (4, 4 / 2 + 2 * 0.25)


def test_cuts_and_all_reduces_run_at_the_smallest_level_that_joins_their_ranks() -> None:
    # Ranks 0 | 1 2 3 | 4 5 in nodes of 4: the cut behind rank 3 and no other goes over the network.
    topology = nodes(8, 4, inner=100, outer=1)
    costs = stage_costs(chain(0, 0, 0, output_bytes=50, parameter_bytes=100), [[0], [1], [2]])

    found = plan_time(costs, [[0], [1, 2, 3], [4, 5]], topology)

    assert [(cut.level, cut.seconds) for cut in found.cuts] == [(0, 1), (1, 100)]
    assert [stage.allreduce_s for stage in found.stages] == pytest.approx([0, 4 / 3, 1])


def test_an_all_reduce_that_leaves_the_node_runs_at_the_speed_of_the_network() -> None:
    costs = stage_costs(chain(0, parameter_bytes=100), [[0]])

    found = plan_time(costs, [range(2, 6)], nodes(8, 4, inner=100, outer=1))

    assert found.stages[0].allreduce_s == pytest.approx(150)


def test_a_cut_is_priced_at_the_level_that_joins_all_ranks_of_both_stages() -> None:
    costs = stage_costs(chain(0, 0, output_bytes=50), [[0], [1]])

    (cut,) = plan_time(costs, [[2, 3, 4], [5]], nodes(8, 4, inner=100, outer=1)).cuts

    assert (cut.level, cut.seconds) == (1, 100)


def test_the_slowest_stage_or_cut_is_the_bottleneck() -> None:
    costs = stage_costs(chain(3, 6, output_bytes=10), [[0], [1]])

    by_stage, by_cut = (plan_time(costs, [[0], [1]], flat(2, rate)) for rate in (10, 1))

    assert (by_stage.bottleneck_s, by_stage.seconds) == (6, 6)
    assert (by_cut.bottleneck_s, by_cut.seconds) == (20, 20)


def test_a_synchronous_stage_does_its_microbatches_one_update_and_one_all_reduce() -> None:
    # 5 microbatches on 2 ranks: 3 of them on one; the ring of 2 moves 8 bytes.
    costs = stage_costs(chain(4, parameter_bytes=8, update_s=1), [[0]])

    fast, slow = (
        plan_time(costs, [[0, 1]], flat(2, rate), schedule="1f1b", microbatches=5).stages[0] for rate in (8, 0.5)
    )

    assert (fast.compute_s, fast.allreduce_s, fast.seconds) == (13, 1, 13)
    assert (slow.compute_s, slow.allreduce_s, slow.seconds) == (13, 16, 16)


def test_every_microbatch_crosses_each_cut() -> None:
    costs = stage_costs(layered([(0, 1)]), [[0], [1]])

    (cut,) = plan_time(costs, [[0], [1]], flat(2, 2, 0.25), schedule="gpipe", microbatches=6).cuts

    assert (cut.nbytes, cut.seconds) == (24, 6 * 2.5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_flush_adds_a_microbatch_for_every_further_stage(schedule: str) -> None:
    costs = stage_costs(chain(2, 2, 2), [[0], [1], [2]])

    found = plan_time(costs, [[0], [1], [2]], flat(3, 1), schedule=schedule, microbatches=4)

    assert (found.bottleneck_s, found.seconds) == (8, 12)
    assert flush_factor(schedule, 4, 3) == 6 / 4


def test_an_asynchronous_pipeline_is_not_flushed() -> None:
    assert flush_factor("pipedream", 1, 8) == 1


def test_ranks_beyond_the_topology_are_refused() -> None:
    costs = stage_costs(chain(1, 1), [[0], [1]])

    with pytest.raises(PlanError, match=r"^rank 2 lies beyond the 2 ranks of the topology"):
        plan_time(costs, [[0, 1], [2]], flat(2, 1))
