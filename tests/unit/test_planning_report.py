"""What a plan is compared with, its figures and its words, on models that can be worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hpcpipe.planning.alternatives import Alternative, alternatives, fewer_ranks, is_allowed, limits, work_s
from hpcpipe.planning.figures import Forecast, Report, Row, report_table, stage_figures, staleness
from hpcpipe.planning.problem import Problem, Split, bytes_of, split_of
from hpcpipe.planning.profile import MINIBATCHES
from hpcpipe.planning.report import report_text, show_split, show_time
from hpcpipe.planning.search import partition
from hpcpipe.planning.topology import flat
from tests.unit.planning_cases import chain, nodes

FAST = Forecast(minibatches_per_s=20.0, bubble=0.1, minibatches=200)
SLOW = Forecast(minibatches_per_s=10.0, bubble=0.5, minibatches=200)


def problem(*seconds: float, ranks: int, bandwidth: float = 1e9, **every: int) -> Problem:
    return Problem(profile=chain(*seconds, **every), topology=flat(ranks, bandwidth), ranks=ranks)


def split(asked: Problem, *stages: tuple[str, int]) -> Split:
    layers = [tuple(ord(name) - ord("a") for name in names) for names, _ in stages]
    return split_of(asked, layers, [ranks for _, ranks in stages])


def report(asked: Problem, chosen: Split, *rows: Row, forecast: Forecast = FAST, **more: object) -> Report:
    return Report(
        problem=asked,
        split=chosen,
        forecast=forecast,
        rows=rows,
        limits=limits(asked, chosen),
        **more,  # type: ignore[arg-type]
    )


def named(asked: Problem) -> dict[str, Alternative]:
    return {each.name: each for each in alternatives(asked)}


# -- alternatives ------------------------------------------------------------------------------------------


def test_the_alternatives_are_the_best_of_their_kind() -> None:
    # 4 ranks, 12 s: data parallel 3 s, straight 4 s (b alone), two stages 3-1 by 9 s and 3 s.
    found = named(problem(3, 4, 2, 3, ranks=4))

    assert {name: each.split.seconds for name, each in found.items() if each.split} == pytest.approx(
        {"data parallel": 3, "straight pipeline": 4, "two stages": 3}
    )
    assert found["data parallel"].split == split(problem(3, 4, 2, 3, ranks=4), ("abcd", 4))
    assert found["two stages"].split is not None
    assert found["two stages"].split.replicas in {(1, 3), (3, 1)}


def test_two_stages_are_two_even_where_one_costs_less() -> None:
    asked = problem(1, 1, ranks=3)

    assert len(partition(asked).stages) == 1
    two = named(asked)["two stages"].split
    assert two is not None
    assert (len(two.stages), two.seconds) == (2, 1)


def test_more_ranks_than_layers_are_no_straight_pipeline() -> None:
    straight = named(problem(1, 1, ranks=3))["straight pipeline"]

    assert (straight.split, straight.why_not) == (None, "3 ranks are more than 2 layers")


def test_one_rank_or_one_layer_is_no_two_stages() -> None:
    assert named(problem(1, 1, ranks=1))["two stages"].split is None
    assert named(problem(1, ranks=2))["two stages"].split is None


def test_alternatives_that_do_not_fit_say_by_how_much() -> None:
    asked = problem(1, 1, ranks=2, parameter_bytes=2**20)
    whole = split(asked, ("ab", 2))
    needed = bytes_of(asked, whole)[0].total
    tight = replace(asked, memory_bytes=needed - 2**20)

    found = named(tight)["data parallel"]

    assert found.split is None
    assert found.why_not == f"needs {needed >> 20} MiB a rank, 1 MiB too much"
    assert named(replace(asked, memory_bytes=needed))["data parallel"].split == whole


def test_two_stages_take_the_fastest_that_fits() -> None:
    asked = problem(1, 1, 1, 9, ranks=2, parameter_bytes=2**20)
    fastest = named(asked)["two stages"].split
    assert fastest is not None
    assert fastest == split(asked, ("abc", 1), ("d", 1))
    needed = max(each.total for each in bytes_of(asked, fastest))

    tight = named(replace(asked, memory_bytes=needed - 1))["two stages"].split

    assert tight == split(asked, ("ab", 1), ("cd", 1))


def test_a_restricted_plan_is_compared_with_an_unrestricted_one() -> None:
    free = problem(3, 4, 2, 3, ranks=4)

    assert "any stages" not in named(free)
    assert named(replace(free, straight=True))["any stages"].split == partition(free)
    assert named(replace(free, max_stages=3))["any stages"].split == partition(free)


def test_restrictions_say_which_alternatives_may_be_chosen() -> None:
    free = problem(1, 1, 1, 1, ranks=4)
    straight, shared = split(free, ("a", 1), ("b", 1), ("c", 1), ("d", 1)), split(free, ("abcd", 4))

    assert is_allowed(free, straight)
    assert is_allowed(free, shared)
    assert not is_allowed(replace(free, straight=True), shared)
    assert not is_allowed(replace(free, max_stages=3), straight)


def test_ranks_that_bring_nothing_are_found() -> None:
    # A straight pipeline is as slow as its slowest layer, here b: three ranks hold a, b and the rest.
    asked = replace(problem(1, 3, 1, 1, 1, ranks=5), straight=True)
    chosen = partition(asked)

    fewer = fewer_ranks(asked, chosen)

    assert chosen.seconds == 3
    assert fewer is not None
    assert (fewer.seconds, fewer.replicas) == (3, (1, 1, 1))


def test_ranks_that_are_all_needed_are_kept() -> None:
    asked = problem(3, 4, 2, 3, ranks=4)

    assert fewer_ranks(asked, partition(asked)) is None


def test_a_rank_beyond_a_node_may_cost_more_than_it_brings() -> None:
    # Over the slow link the parameters take 3 s for a round of 5 minibatches; inside a node, nearly nothing.
    asked = Problem(
        profile=chain(1, 1, parameter_bytes=9375 * 10**5, output_bytes=10**10),
        topology=nodes(8, 4, 1e12),
        ranks=5,
    )

    fewer = fewer_ranks(asked, partition(asked))

    assert fewer is not None
    assert (fewer.replicas, fewer.seconds) == ((4,), 0.5)


def test_nothing_is_tried_for_many_ranks() -> None:
    asked = problem(0, ranks=65)

    assert fewer_ranks(asked, partition(asked)) is None


def test_a_model_that_takes_no_time_needs_one_rank() -> None:
    asked = problem(0, 0, 0, ranks=3)

    fewer = fewer_ranks(asked, partition(asked))

    assert fewer is not None
    assert fewer.replicas == (1,)


# -- what limits a plan -------------------------------------------------------------------------------------


def test_compute_limits_a_plan_of_free_links() -> None:
    asked = problem(3, 1, ranks=2)

    first, second = limits(asked, split(asked, ("a", 1), ("b", 1)))[:2]

    assert (str(first), first.seconds) == ("the compute of stage 0", 3)
    assert (str(second), second.seconds) == ("the compute of stage 1", 1)


def test_an_all_reduce_limits_a_plan_of_many_parameters() -> None:
    asked = problem(1, ranks=2, parameter_bytes=4 * 10**9)

    # 2 (m-1)/m P / b over the two minibatches of a round.
    (only,) = limits(asked, split(asked, ("a", 2)))

    assert (str(only), only.seconds) == ("the all-reduce of stage 0", 2)


def test_a_cut_limits_a_plan_of_large_outputs() -> None:
    asked = problem(1, 1, ranks=2, output_bytes=10**9)

    first = limits(asked, split(asked, ("a", 1), ("b", 1)))[0]

    assert (str(first), first.seconds) == ("the cut between stages 0 and 1", 2)


# -- figures -----------------------------------------------------------------------------------------------


def test_figures_are_those_of_one_minibatch_shared_by_the_replicas() -> None:
    asked = Problem(
        profile=chain(6, 1, parameter_bytes=3 * 10**9, output_bytes=10**9), topology=nodes(4, 2, 2e9), ranks=4
    )

    first, last = stage_figures(asked, split(asked, ("a", 3), ("b", 1)))

    assert (first.layers, first.ranks, first.compute_s) == (("a",), (0, 1, 2), 2)
    # Ranks 0 to 2 meet on the network: 4/3 of 3 GB at 1 GB/s, over three minibatches.
    assert first.allreduce_s == pytest.approx(4 / 3)
    assert (first.cut_s, first.cut_level, first.share) == (2, "network", 1)
    assert (last.compute_s, last.allreduce_s, last.cut_s, last.cut_level, last.share) == (1, 0, None, None, 0.5)


def test_memory_is_that_of_the_memory_model() -> None:
    asked = problem(1, 1, ranks=3, parameter_bytes=1000, saved_bytes=77)
    chosen = split(asked, ("a", 2), ("b", 1))

    found = stage_figures(asked, chosen)

    assert [each.memory_bytes for each in found] == [each.total for each in bytes_of(asked, chosen)]
    assert [sum(each.memory.values()) for each in found] == [each.memory_bytes for each in found]


@pytest.mark.parametrize("policy", ["stash", "none", "spectrain"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2), (3, 1, 2), (15, 1), (4,)])
def test_staleness_is_the_warm_up_of_each_stage(policy: str, replicas: tuple[int, ...]) -> None:
    asked = replace(problem(1, ranks=1), policy=policy)

    found = [staleness(asked, replicas, stage) for stage in range(len(replicas))]

    total = sum(replicas)
    assert found == [(total - 1 - sum(replicas[:s])) // r for s, r in enumerate(replicas)]


def test_vertical_sync_is_as_stale_at_every_stage() -> None:
    asked = replace(problem(1, ranks=1), policy="vertical_sync")

    assert [staleness(asked, (1, 1, 1), stage) for stage in range(3)] == [2, 2, 2]


def test_synchronous_schedules_are_never_stale() -> None:
    asked = Problem(profile=chain(1, 1), topology=flat(2, 1e9), ranks=2, schedule="1f1b", microbatches=4)

    assert [staleness(asked, (1, 1), stage) for stage in range(2)] == [0, 0]


def test_figures_go_into_json() -> None:
    asked = problem(3, 1, ranks=2)
    chosen = split(asked, ("a", 1), ("b", 1))
    none = Row(alternative=Alternative(name="other", split=None, why_not="too large"), forecast=None)

    found = json.loads(json.dumps(report_table(report(asked, chosen, none)), allow_nan=False))

    assert (found["replicas"], found["bottleneck_s"], found["limit"]["what"]) == ([1, 1], 3, "compute")
    assert (found["minibatches_per_s"], found["samples_per_s"], found["bubble"]) == (20, 200, 0.1)
    assert found["alternatives"] == [
        {"name": "other", "replicas": None, "bottleneck_s": None, "seconds": None, "why_not": "too large"}
    ]
    assert [stage["layers"] for stage in found["stages"]] == [["a"], ["b"]]


def test_a_rate_without_end_is_null_in_json() -> None:
    asked = problem(0, ranks=1)
    endless = Forecast(minibatches_per_s=math.inf, bubble=0.0)

    found = report_table(report(asked, split(asked, ("a", 1)), forecast=endless))

    assert (found["minibatches_per_s"], found["samples_per_s"]) == (None, None)


def test_only_a_clear_difference_between_simulations_counts() -> None:
    assert FAST.beats(SLOW)
    assert not SLOW.beats(FAST)
    assert not replace(SLOW, minibatches_per_s=10.05).beats(SLOW)
    assert not replace(FAST, minibatches=0).beats(SLOW)


# -- words -------------------------------------------------------------------------------------------------


def test_the_report_shows_stages_forecast_and_alternatives() -> None:
    asked = problem(3, 1, ranks=2)
    chosen = split(asked, ("a", 1), ("b", 1))
    other = Row(alternative=Alternative(name="data parallel", split=split(asked, ("ab", 2))), forecast=SLOW)
    none = Row(alternative=Alternative(name="another", split=None, why_not="too large"), forecast=None)

    head, stages, outlook, table = report_text(report(asked, chosen, other, none, notes=("a note",))).split("\n\n")

    assert head.splitlines() == [
        "2 layers: 4 s for a minibatch of 10 samples on one rank, 0 B of parameters",
        "pipedream (spectrain) on 2 ranks: links at 1 GB/s",
        "a note",
    ]
    assert stages.splitlines()[1].split() == ["0", "a", "1", "0", "3", "s", "-", "0", "0", "B", "100%", "1"]
    assert outlook.splitlines() == [
        "predicted    200 samples/s, 80 times one rank; bubble 10.0% (simulated, 200 minibatches)",
        "limited by   the compute of stage 0, 3 s a minibatch; next the compute of stage 1, 1 s",
    ]
    assert table.splitlines()[1].split() == ["this", "plan", "1-1", "3", "s", "200", "10.0%"]
    assert table.splitlines()[2].split() == ["data", "parallel", "2", "2", "s", "100", "50.0%"]
    assert table.splitlines()[3] == "another: none, too large"


def test_the_report_names_what_is_faster_in_the_simulation() -> None:
    asked = problem(3, 1, ranks=2)
    chosen = split(asked, ("a", 1), ("b", 1))
    other = Row(alternative=Alternative(name="data parallel", split=split(asked, ("ab", 2))), forecast=FAST)

    shown = report_text(report(asked, chosen, other, forecast=SLOW))

    assert "\nbut          faster in the simulation: data parallel (200 samples/s)\n" in shown


def test_the_report_says_when_fewer_ranks_would_do() -> None:
    asked = problem(3, 1, 1, ranks=3)
    chosen = split(asked, ("a", 1), ("b", 1), ("c", 1))
    few = replace(asked, ranks=2)

    as_fast = report_text(report(asked, chosen, fewer=split(few, ("a", 1), ("bc", 1))))
    faster = report_text(report(asked, chosen, fewer=split(few, ("abc", 2))))

    assert "\nfewer ranks  2 ranks (1-1) would be as fast\n" in as_fast
    assert "\nfewer ranks  2 ranks (2) would be faster, 2.5 s instead of 3 s a minibatch\n" in faster


def test_a_forecast_without_simulation_is_marked() -> None:
    asked = problem(3, 1, ranks=2)
    guessed = replace(FAST, minibatches=0)

    shown = report_text(report(asked, split(asked, ("a", 1), ("b", 1)), forecast=guessed))

    assert "(by the slowest part alone)" in shown
    assert " 200~ " in shown


def test_a_profile_that_does_not_know_its_samples_counts_minibatches() -> None:
    asked = Problem(profile=chain(3, 1, about={"unit": MINIBATCHES}), topology=flat(2, 1e9), ranks=2)

    shown = report_text(report(asked, split(asked, ("ab", 2))))

    assert "20 minibatches/s" in shown
    assert "samples" not in shown


def test_a_model_that_takes_no_time_is_reported_without_a_division_by_zero() -> None:
    asked = problem(0, 0, ranks=2)
    endless = Forecast(minibatches_per_s=math.inf, bubble=0.0)

    shown = report_text(report(asked, split(asked, ("a", 1), ("b", 1)), forecast=endless))

    assert "any number of samples/s" in shown


def test_memory_is_compared_with_its_limit() -> None:
    asked = problem(3, 1, ranks=2, parameter_bytes=2**20)
    chosen = split(asked, ("a", 1), ("b", 1))
    needed = stage_figures(asked, chosen)[0].memory_bytes

    shown = report_text(report(replace(asked, memory_bytes=needed * 4), chosen))

    assert f" {needed >> 20} MiB (25%) " in shown


@pytest.mark.parametrize(
    ("replicas", "shown"),
    [
        ((15, 1), "15-1"),
        ((1,) * 8, "1-1-1-1-1-1-1-1"),
        ((2, *[1] * 14), "2, 14 x 1"),
        (tuple(range(1, 10)), "1, 2, 3, 4, 5, 6, ... (9 stages)"),
    ],
)
def test_many_stages_are_counted(replicas: tuple[int, ...], shown: str) -> None:
    assert show_split(replicas) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.5, "1.5 s"), (0.044159, "44.16 ms"), (2e-5, "20 µs"), (0, "0"), (1e-9, "0.001 µs")]
)
def test_times_are_shown_in_a_unit_that_fits(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown


def test_the_work_of_a_minibatch_counts_all_its_microbatches() -> None:
    asked = Problem(profile=chain(3, 1), topology=flat(2, 1e9), ranks=2, schedule="gpipe", microbatches=4)

    assert work_s(asked) == pytest.approx(16)
