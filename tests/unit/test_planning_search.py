"""The partitioner against exhaustive search and the plain dynamic program, on random problems and known ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpcpipe.errors import PlanError
from hpcpipe.planning.problem import Problem, Split, bytes_of
from hpcpipe.planning.profile import LayerCost, Profile, load_profile
from hpcpipe.planning.search import Search, partition
from hpcpipe.planning.topology import Level, Topology, flat
from tests.oracle import partition_oracle as oracle

PROFILES = Path(__file__).resolve().parents[1] / "data" / "profiles"
THOROUGH = settings(
    max_examples=80,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
Draw = Callable[[st.SearchStrategy[Any]], Any]

seconds = st.sampled_from([0.0, 1e-3, 2e-3, 3e-3, 5e-3, 0.011, 0.07]) | st.floats(1e-5, 0.1)
sizes = st.sampled_from([0, 1, 100, 1000, 2000, 50_000]) | st.integers(0, 100_000)
latencies = st.sampled_from([0.0, 0.0, 1e-4, 2e-3, 0.02])
rates = st.sampled_from([1e4, 1e5, 1e6, 1e7, 1e9])
overheads = st.sampled_from([0.0, 0.0, 5e-4])


@st.composite
def layers(draw: Draw, name: str) -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        update_s=draw(st.sampled_from([0.0, 0.0, 1e-3])),
        output_bytes=draw(sizes),
        gradient_bytes=draw(st.none() | sizes),
        parameter_bytes=draw(sizes),
        state_bytes=draw(sizes),
        saved_bytes=draw(sizes),
        buffer_bytes=draw(st.sampled_from([0, 8, 5000])),
    )


@st.composite
def profiles(draw: Draw, most: int, branching: bool) -> Profile:
    count = draw(st.integers(1, most))
    edges = [(i, i + 1) for i in range(count - 1)]
    possible = [(i, k) for k in range(count) for i in range(k)]
    if branching and possible:
        edges = draw(st.lists(st.sampled_from(possible), unique=True, max_size=2 * count))
        if draw(st.booleans()):
            edges = sorted({*edges, *((i, i + 1) for i in range(draw(st.integers(0, count - 1))))})
    shared = (draw(st.sampled_from(possible)),) if possible and draw(st.integers(0, 4)) == 0 else ()
    return Profile(
        layers=tuple(draw(layers(f"layer{i}")) for i in range(count)),
        edges=tuple(sorted(edges)),
        rows=1,
        input_bytes=draw(sizes),
        pass_overhead_s=draw(overheads),
        message_s=draw(overheads),
        data_s=draw(overheads),
        targets_s=draw(overheads),
        shared=shared,
        about={"dtype": draw(st.sampled_from(["float32", "bfloat16"]))},
    )


@st.composite
def chains(draw: Draw, count: int) -> Profile:
    return Profile(
        layers=tuple(draw(layers(f"layer{i}")) for i in range(count)),
        edges=tuple((i, i + 1) for i in range(count - 1)),
        rows=1,
    )


@st.composite
def topologies(draw: Draw) -> Topology:
    shape = draw(st.sampled_from([(8,), (2, 6), (3, 6), (2, 8), (1, 8), (2, 4, 8)]))
    return Topology(
        levels=tuple(
            Level(
                name=f"level{i}",
                size=size,
                bandwidth=draw(rates),
                latency_s=draw(latencies),
                allreduce_bandwidth=draw(st.none() | rates),
            )
            for i, size in enumerate(shape)
        )
    )


@st.composite
def problems(
    draw: Draw, *, most: int = 5, branching: bool = False, synchronous: bool = False, memory: bool = False
) -> Problem:
    profile = draw(profiles(most, branching))
    ranks = draw(st.integers(1, 5))
    straight = ranks <= len(profile.layers) and not profile.shared and draw(st.integers(0, 5)) == 0
    problem = Problem(
        profile=profile,
        topology=draw(topologies()),
        ranks=ranks,
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])) if synchronous else "pipedream",
        microbatches=draw(st.integers(1, 6)) if synchronous else 1,
        policy=draw(st.sampled_from(["stash", "vertical_sync", "none", "spectrain"])),
        straight=straight,
        max_stages=None if straight else draw(st.none() | st.integers(1, 4)),
        allreduce=draw(st.sampled_from(["ring", "server"])),
        cut_in_flight=draw(st.booleans()),
    )
    if not memory:
        return problem
    # Between what the easiest plan needs, or a byte less, and what the hardest needs.
    needs = sorted(oracle.most_bytes(problem, split, alone=True) for split in oracle.every_plan(problem))
    limit = needs[draw(st.integers(0, len(needs) - 1))] - draw(st.sampled_from([0, 1]))
    return replace(problem, memory_bytes=max(1, limit))


def check(problem: Problem) -> None:
    """The plan is one of those that there are, and none of them costs less.

    What rings of several ranks need is left out of the comparison, but never of what `partition` takes.
    """
    expected = oracle.least_seconds(problem, alone=True)
    if expected == math.inf:
        with pytest.raises(PlanError, match="no plan fits"):
            partition(problem)
        return
    split = Search(problem).best()
    assert split.seconds == pytest.approx(expected, rel=1e-12, abs=0)
    assert oracle.fits(problem, split, alone=True)
    assert [rank for stage in split.stages for rank in stage.ranks] == list(range(problem.ranks))
    assert problem.max_stages is None or len(split.stages) <= problem.max_stages
    assert not problem.straight or max(split.replicas) == 1
    if oracle.fits(problem, split):
        assert partition(problem) == split
    else:
        with suppress(PlanError):
            assert oracle.fits(problem, partition(problem))


@THOROUGH
@given(problems(most=7))
def test_no_plan_of_a_chain_costs_less(problem: Problem) -> None:
    check(problem)


@THOROUGH
@given(problems(most=7, branching=True))
def test_no_plan_of_a_branching_graph_costs_less(problem: Problem) -> None:
    check(problem)


@THOROUGH
@given(problems(most=7, memory=True))
def test_no_plan_of_a_chain_that_fits_into_memory_costs_less(problem: Problem) -> None:
    check(problem)


@THOROUGH
@given(problems(memory=True, branching=True))
def test_no_plan_of_a_branching_graph_that_fits_into_memory_costs_less(problem: Problem) -> None:
    check(problem)


@THOROUGH
@given(problems(synchronous=True, memory=True, branching=True))
def test_no_plan_of_a_flushing_schedule_costs_less(problem: Problem) -> None:
    check(problem)


@THOROUGH
@given(problems(most=7, branching=True))
def test_the_plain_dynamic_program_finds_the_same_cost(problem: Problem) -> None:
    plain = replace(problem, max_stages=None)

    assert partition(plain).bottleneck_s == pytest.approx(oracle.program(plain), rel=1e-12, abs=0)


@settings(THOROUGH, max_examples=12)
@given(chains(12), st.sampled_from([(12,), (4, 12), (3, 15), (2, 4, 16)]), rates, latencies, st.integers(8, 12))
def test_long_chains_on_many_ranks_cost_what_the_plain_dynamic_program_finds(
    profile: Profile, shape: tuple[int, ...], rate: float, latency_s: float, ranks: int
) -> None:
    """Latencies from nothing to more than a layer takes, so that more ranks are worse at some levels."""
    levels = tuple(
        Level(name=str(i), size=size, bandwidth=rate / 2**i, latency_s=latency_s * 2**i)
        for i, size in enumerate(shape)
    )
    problem = Problem(profile=profile, topology=Topology(levels=levels), ranks=ranks)

    assert partition(problem).bottleneck_s == pytest.approx(oracle.program(problem), rel=1e-12, abs=0)


@THOROUGH
@given(problems(most=5))
def test_of_plans_that_cost_the_same_the_one_with_the_smallest_cut_between_nodes_is_taken(
    problem: Problem,
) -> None:
    split = partition(problem)

    as_cheap = [
        other for other in oracle.every_plan(problem) if other.bottleneck_s <= split.bottleneck_s * (1 + 1e-12)
    ]

    least = min(oracle.slow_bytes(problem, other) for other in as_cheap)
    assert oracle.slow_bytes(problem, split) <= max(least, 0)


def chain(*costs: LayerCost) -> Profile:
    return Profile(layers=costs, edges=tuple((i, i + 1) for i in range(len(costs) - 1)), rows=1)


def layer(name: str, forward_s: float = 1e-3, **sizes: int) -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        **{"output_bytes": 1000, "parameter_bytes": 1000, **sizes},
    )


def test_the_cut_with_the_most_bytes_is_kept_off_the_slow_link() -> None:
    """Four stages on two nodes: the bottleneck is the same wherever the large cut lies."""
    costs = [layer(f"l{i}", output_bytes=10**6 if i == 1 else 10**3) for i in range(5)]
    profile = chain(*costs)
    levels = (Level(name="node", size=2, bandwidth=1e12), Level(name="net", size=4, bandwidth=1e9))

    split = partition(Problem(profile=profile, topology=Topology(levels=levels), ranks=4, straight=True))

    # Stages of one or two layers; ranks 1 and 2 are on different nodes.
    before_the_network = sum(len(stage.layers) for stage in split.stages[:2])
    assert before_the_network == 3


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_layers_that_cost_nothing_are_planned(count: int, ranks: int) -> None:
    profile = chain(*(layer(str(i), forward_s=0.0, output_bytes=0, parameter_bytes=0) for i in range(count)))

    split = partition(Problem(profile=profile, topology=flat(8, 1e9), ranks=ranks))

    assert split.bottleneck_s == 0
    assert [index for stage in split.stages for index in stage.layers] == list(range(count))
    assert sum(split.replicas) == ranks


def test_one_layer_on_several_ranks_is_replicated() -> None:
    split = partition(Problem(profile=chain(layer("only")), topology=flat(4, 1e9), ranks=4))

    assert split.replicas == (4,)


def test_a_huge_layer_gets_most_of_the_ranks() -> None:
    profile = chain(layer("a"), layer("huge", forward_s=1.0), layer("c"))

    split = partition(Problem(profile=profile, topology=flat(16, 1e9), ranks=16))

    (stage,) = (stage for stage in split.stages if 1 in stage.layers)
    assert len(stage.ranks) >= 15


def test_what_does_not_fit_is_one_line_with_the_tightest_stage_and_the_missing_bytes() -> None:
    profile = chain(*(layer(name, parameter_bytes=2**size) for name, size in (("a", 28), ("fat", 30), ("c", 28))))
    problem = Problem(profile=profile, topology=flat(3, 1e9), ranks=3, policy="none", memory_bytes=2**30)

    with pytest.raises(
        PlanError, match=r"fits into 1 GiB a rank.*, fat on 1 rank, needs 3 GiB, 2 GiB too"
    ) as refused:
        partition(problem)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_tiny_limit_is_refused_as_any_other(limit: int) -> None:
    profile = chain(*(layer(str(i), parameter_bytes=1, output_bytes=0) for i in range(3)))

    with pytest.raises(PlanError, match="needs 9 B"):
        partition(Problem(profile=profile, topology=flat(1, 1e9), ranks=1, policy="none", memory_bytes=limit))


def crowded(*layers: LayerCost) -> tuple[Problem, Split]:
    """A problem with too little memory for the rings of its best plan, whose last rank hears of two."""
    problem = Problem(profile=chain(*layers), topology=flat(3, 1e9), ranks=3, policy="stash")
    best = partition(problem)
    assert best.replicas == (2, 1)
    needs = max(each.total for each in bytes_of(problem, best))
    assert partition(replace(problem, memory_bytes=needs)) == best
    return replace(problem, memory_bytes=needs - 1), best


def test_a_plan_whose_rings_do_not_fit_gives_way_to_one_with_a_smaller_cut() -> None:
    free = {"parameter_bytes": 0}
    problem, best = crowded(
        layer("a", 0.2, **free),
        layer("b", 0.1, **free, output_bytes=10),
        layer("c", 0.01, **free, output_bytes=10**6),
        layer("d", 0.15, parameter_bytes=2 * 10**9),
    )

    assert [stage.layers for stage in best.stages] == [(0, 1, 2), (3,)]
    assert [stage.layers for stage in partition(problem).stages] == [(0, 1), (2, 3)]


def test_a_plan_whose_rings_do_not_fit_gives_way_to_a_straight_one() -> None:
    free = {"parameter_bytes": 0}
    problem, _ = crowded(
        layer("a", 0.2, **free), layer("b", 0.1, **free), layer("c", 0.1, parameter_bytes=2 * 10**9)
    )

    assert partition(problem).replicas == (1, 1, 1)


def test_rings_that_fit_in_no_plan_are_named_as_missing_memory() -> None:
    problem, _ = crowded(layer("a", 0.2, parameter_bytes=0), layer("b", 0.1, parameter_bytes=2 * 10**9))

    with pytest.raises(PlanError, match=r"b on 1 rank, needs .* 1 B too much"):
        partition(problem)


def test_memory_moves_layers_behind_where_fewer_versions_are_kept() -> None:
    profile = chain(*(layer(str(i), parameter_bytes=10**6, output_bytes=0) for i in range(6)))
    problem = Problem(profile=profile, topology=flat(3, 1e12), ranks=3, policy="stash", straight=True)

    free = partition(problem)
    limited = partition(replace(problem, memory_bytes=10 * 10**6))

    assert [len(stage.layers) for stage in free.stages] == [2, 2, 2]
    # The first stage holds 4 versions and the gradients, the second 3 and the gradients, the last 2.
    assert [len(stage.layers) for stage in limited.stages] == [2, 2, 2]
    assert [len(stage.layers) for stage in partition(replace(problem, memory_bytes=9 * 10**6)).stages] == [1, 2, 3]


def test_fewer_stages_are_taken_when_they_cost_the_same() -> None:
    """The bottleneck is the large layer; the others could stand alone or together."""
    profile = chain(layer("large", 1.0), *(layer(str(i), 0.01) for i in range(4)))
    problem = Problem(profile=profile, topology=flat(3, 1e9), ranks=3, max_stages=3)

    assert len(partition(problem).stages) == min(
        len(split.stages)
        for split in oracle.every_plan(problem)
        if split.seconds <= partition(problem).seconds * (1 + 1e-12)
    )


@pytest.mark.parametrize(("microbatches", "replicas", "seconds"), [(2, (2, 2, 2, 2), 0.015), (8, (8,), 0.024)])
def test_a_flush_makes_few_stages_better_where_microbatches_can_be_dealt_out(
    microbatches: int, replicas: tuple[int, ...], seconds: float
) -> None:
    """Eight layers of 3 ms: k stages of 8/k ranks take ceil(M k / 8) 24/k ms times (M + k - 1) / M."""
    profile = chain(*(layer(str(i), parameter_bytes=0, output_bytes=0) for i in range(8)))
    problem = Problem(profile=profile, topology=flat(8, 1e9), ranks=8, schedule="1f1b", microbatches=microbatches)

    split = partition(problem)

    assert split.replicas == replicas
    assert split.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks: must be a whole number of ranks, 1 to"),
        ({"ranks": 9}, "joins 8 ranks"),
        ({"memory_bytes": -1}, "memory_bytes: must be a whole number of bytes"),
        ({"max_stages": 0}, "max_stages: must be a whole number of stages"),
        ({"schedule": "pipe"}, "schedule: must be one of pipedream, gpipe, 1f1b"),
        ({"policy": "hope"}, "policy: must be one of stash"),
        ({"allreduce": "tree"}, "allreduce: must be one of ring, server"),
        ({"microbatches": 4}, "pipedream updates after every minibatch: microbatches = 4 needs one of"),
        ({"straight": True, "ranks": 3}, "over 3 ranks needs a layer for each, but the profile has 2"),
        ({"straight": True, "max_stages": 1}, "over 2 ranks has as many stages, more than the 1 allowed"),
    ],
)
def test_what_makes_no_problem_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    given = {"profile": chain(layer("a"), layer("b")), "topology": flat(8, 1e9), "ranks": 2, **changes}

    with pytest.raises(PlanError, match=message) as refused:
        Problem(**given)

    assert "\n" not in str(refused.value)


def test_layers_with_weights_in_common_may_make_a_straight_pipeline_impossible() -> None:
    profile = replace(chain(layer("a"), layer("b"), layer("c")), shared=((0, 2),))

    with pytest.raises(
        PlanError, match="weights in common allow at most 1 stages, but a straight pipeline over 2"
    ):
        partition(Problem(profile=profile, topology=flat(2, 1e9), ranks=2, straight=True))


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"), [("vgg16", 4, (3, 1)), ("vgg16", 16, (15, 1)), ("resnet50", 16, (16,))]
)
def test_published_profiles_give_plans_of_the_published_kind(
    name: str, ranks: int, replicas: tuple[int, ...]
) -> None:
    """PipeDream, SOSP'19, table 1: few replicas for fully connected layers, many for convolutions (10 Gbit/s)."""
    levels = (Level(name="node", size=4, bandwidth=12e9), Level(name="network", size=16, bandwidth=1.25e9))
    topology = flat(4, 1.25e9) if ranks == 4 else Topology(levels=levels)
    problem = Problem(
        profile=load_profile(PROFILES / f"{name}.txt"),
        topology=topology,
        ranks=ranks,
        policy="stash",
        allreduce="server" if ranks == 4 else "ring",
    )

    assert partition(problem).replicas == replicas


def test_a_graph_with_many_loose_ends_is_planned() -> None:
    """GNMT reads one output of many and has several inputs; its ideals are too many unless those are set aside."""
    levels = (Level(name="node", size=4, bandwidth=12e9), Level(name="network", size=16, bandwidth=1.25e9))
    profile = load_profile(PROFILES / "gnmt8.txt")

    split = partition(Problem(profile=profile, topology=Topology(levels=levels), ranks=16, policy="stash"))

    assert sorted(index for stage in split.stages for index in stage.layers) == list(range(len(profile.layers)))
    assert split.bottleneck_s < sum(each.forward_s + each.backward_s for each in profile.layers) / 4
