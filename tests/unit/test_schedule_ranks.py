"""Programs of ranks that own several stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Op, Place, Policy, StageProgram, rank_actions
from hpcpipe.schedule.dryrun import by_place, dry_run
from hpcpipe.schedule.ranks import spread
from tests.unit.schedule_cases import groupings, lists_of, pipedream, schedules


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_merged_program_holds_each_stages_program_in_order(data: st.DataObject) -> None:
    schedule = data.draw(schedules(minibatches=15))
    ranks = data.draw(groupings(schedule.stages))

    projected = by_place(lists_of(schedule, ranks), schedule.places)

    assert projected == {place: list(StageProgram(schedule, *place).actions()) for place in schedule.places}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_lists_of_all_ranks_are_parts_of_one_executable_order(data: st.DataObject) -> None:
    schedule = data.draw(schedules(minibatches=15))
    ranks = data.draw(groupings(schedule.stages))
    everything = lists_of(schedule, [schedule.places])

    dry_run(everything)

    places = {action: place for place, action in enumerate(everything[0])}
    for actions in lists_of(schedule, ranks):
        order = [places[action] for action in actions]
        assert order == sorted(order)


def test_stages_of_one_rank_in_any_order_give_one_program() -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=4)

    assert list(rank_actions(schedule, [Place(2), Place(0)])) == list(rank_actions(schedule, [Place(0), Place(2)]))


def test_a_rank_with_all_stages_runs_each_pass_when_its_message_is_there() -> None:
    passes = [
        a
        for a in rank_actions(pipedream(stages=2, minibatches=2), [Place(0), Place(1)])
        if a.op in (Op.FORWARD, Op.BACKWARD)
    ]

    assert " ".join(f"{a.op.value}{a.minibatch}@{a.stage}" for a in passes) == (
        "F0@0 F1@0 F0@1 B0@1 B0@0 F1@1 B1@1 B1@0"
    )


@pytest.mark.parametrize(
    ("stages", "ranks", "dealt"),
    [
        (1, 1, [[0]]),
        (5, 4, [[0, 1], [2], [3], [4]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_stages_are_spread_evenly_and_in_order(stages: int, ranks: int, dealt: list[list[int]]) -> None:
    assert spread(stages, ranks) == dealt


@given(st.integers(1, 60), st.integers(1, 60))
def test_no_rank_is_left_without_a_stage(stages: int, ranks: int) -> None:
    if ranks > stages:
        with pytest.raises(
            ConfigError, match=f"{stages} stages can be spread over 1 to {stages} ranks, got {ranks}"
        ):
            spread(stages, ranks)
        return

    dealt = spread(stages, ranks)

    assert [stage for group in dealt for stage in group] == list(range(stages))
    sizes = {len(group) for group in dealt}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
