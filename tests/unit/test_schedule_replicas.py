"""Replicated stages: who does which minibatch, what a round is, and where all stages hold the same minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, StageProgram, Target, warm_up_of
from hpcpipe.schedule.verify import verify
from tests.unit.schedule_cases import lists_of, pipedream, schedules


def order(schedule: Schedule, stage: int, replica: int = 0) -> str:
    """The passes and updates of a place, as `F0 B0 U2`."""
    actions = StageProgram(schedule, stage, replica).actions()
    shown = (Op.FORWARD, Op.BACKWARD, Op.UPDATE, Op.REDUCE)
    micro = schedule.microbatches > 1
    return " ".join(
        f"{a.op.value}{a.minibatch}{f'.{a.microbatch}' if micro and a.op not in (Op.UPDATE, Op.REDUCE) else ''}"
        for a in actions
        if a.op in shown
    )


def of_kind(schedule: Schedule, place: Place, *ops: Op) -> Iterator[Action]:
    return (action for action in StageProgram(schedule, *place).actions() if action.op in ops)


# -- who does what -----------------------------------------------------------------------------------------


def test_the_places_of_ranks_are_the_replicas_of_stage_0_first() -> None:
    schedule = pipedream(replicas=(2, 1, 3))

    assert schedule.ranks == 6
    assert schedule.places == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))
    assert [schedule.replicas_of(stage) for stage in range(3)] == [2, 1, 3]


def test_without_replicas_each_stage_is_one_place() -> None:
    assert pipedream(stages=3).places == (Place(0), Place(1), Place(2))
    assert not pipedream(stages=3).replicated
    assert not pipedream(replicas=(1, 1, 1)).replicated


def test_minibatches_are_dealt_out_in_turn_and_anew_after_each_drain() -> None:
    schedule = replace(pipedream(replicas=(3, 1), minibatches=9), drain_every=4)

    assert [schedule.owner(0, j) for j in range(9)] == [0, 1, 2, 0, 0, 1, 2, 0, 0]
    assert [schedule.owner(1, j) for j in range(9)] == [0] * 9


def test_microbatches_are_dealt_out_where_every_minibatch_is_one_update() -> None:
    schedule = Schedule(name="gpipe", stages=2, minibatches=2, microbatches=5, replicas=(2, 3))

    assert [schedule.owner(0, 1, i) for i in range(5)] == [0, 1, 0, 1, 0]
    assert [schedule.owner(1, 1, i) for i in range(5)] == [0, 1, 2, 0, 1]
    assert [schedule.round_length(stage) for stage in range(2)] == [1, 1]


def test_evaluation_batches_are_dealt_out_in_turn() -> None:
    schedule = pipedream(replicas=(3, 2))

    assert [schedule.evaluation_owner(0, batch) for batch in range(5)] == [0, 1, 2, 0, 1]


def test_the_order_of_the_replicas_of_a_stage() -> None:
    schedule = pipedream(replicas=(3, 1), minibatches=8)

    assert [order(schedule, 0, replica) for replica in range(3)] == [
        "F0 F3 B0 R2 U2 F6 B3 R5 U5 B6 R7 U7",
        "F1 F4 B1 R2 U2 F7 B4 R5 U5 B7 R7 U7",
        "F2 F5 B2 R2 U2 B5 R5 U5 R7 U7",
    ]
    assert order(schedule, 1).startswith("F0 B0 U0 F1 B1 U1")


def test_a_replica_without_a_minibatch_in_a_short_round_updates_with_the_others() -> None:
    schedule = pipedream(replicas=(4,), minibatches=2)

    assert [order(schedule, 0, replica) for replica in range(4)] == [
        "F0 B0 R1 U1",
        "F1 B1 R1 U1",
        "R1 U1",
        "R1 U1",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_replica_without_a_microbatch_updates_with_the_others(name: str) -> None:
    schedule = Schedule(name=name, stages=1, minibatches=2, microbatches=2, replicas=(3,))

    assert [order(schedule, 0, replica) for replica in range(3)] == [
        "F0.0 B0.0 R0 U0 F1.0 B1.0 R1 U1",
        "F0.1 B0.1 R0 U0 F1.1 B1.1 R1 U1",
        "R0 U0 R1 U1",
    ]


def test_each_replica_of_a_synchronous_stage_keeps_its_own_order() -> None:
    schedule = Schedule(name="1f1b", stages=2, minibatches=1, microbatches=5, replicas=(2, 1))

    assert order(schedule, 0) == "F0.0 F0.2 B0.0 F0.4 B0.2 B0.4 R0 U0"
    assert order(schedule, 0, 1) == "F0.1 F0.3 B0.1 B0.3 R0 U0"


def test_gradients_are_reduced_directly_before_the_update_and_only_where_there_are_replicas() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=7)

    for place in schedule.places:
        actions = list(StageProgram(schedule, *place).actions())
        updates = [index for index, action in enumerate(actions) if action.op is Op.UPDATE]
        reduces = [index for index, action in enumerate(actions) if action.op is Op.REDUCE]
        assert reduces == ([index - 1 for index in updates] if place.stage == 0 else [])


def test_an_evaluation_begins_with_averaged_buffers_and_ends_with_collected_figures() -> None:
    schedule = replace(pipedream(replicas=(2, 1, 2), minibatches=2), evaluate_at_end=True, evaluation_batches=3)
    evaluating = (Op.AVERAGE, Op.EVALUATE, Op.COLLECT)

    shown = [
        " ".join(f"{a.op.value}{a.microbatch}" for a in of_kind(schedule, place, *evaluating))
        for place in schedule.places
    ]

    assert shown == ["A0 E0 E2", "A0 E1", "E0 E1 E2", "A0 E0 E2 C0", "A0 E1 C0"]


def test_a_message_names_the_replica_at_its_other_end() -> None:
    schedule = replace(pipedream(replicas=(2, 3), minibatches=9), evaluate_at_end=True, evaluation_batches=6)

    for actions in lists_of(schedule):
        for action in actions:
            if action.op in (Op.SEND_EVALUATION, Op.RECEIVE_EVALUATION):
                owner = schedule.evaluation_owner(action.peer, action.microbatch)
            elif action.op.value[0] == "<" or action.op.value[-1] == ">":
                owner = schedule.owner(action.peer, action.minibatch)
            else:
                continue
            assert action.peer_place == (1 - action.stage, owner)


def test_an_action_says_where_it_is_done() -> None:
    assert str(Action(Op.FORWARD, stage=2, minibatch=7)) == "F(7) at stage 2"
    assert str(Action(Op.REDUCE, stage=2, minibatch=7, replica=1)) == "R(7) at stage 2 replica 1"


# -- rounds and versions -----------------------------------------------------------------------------------


def test_the_last_round_of_a_stretch_may_be_short() -> None:
    schedule = replace(pipedream(replicas=(3, 1), minibatches=11), drain_every=7)

    assert [schedule.round_of(0, j) for j in (0, 5, 6, 7, 10)] == [
        range(3),
        range(3, 6),
        range(6, 7),
        range(7, 10),
        range(10, 11),
    ]
    updates = list(of_kind(schedule, Place(0, 1), Op.UPDATE))
    assert [(action.minibatch, action.version) for action in updates] == [
        (2, 3),
        (5, 6),
        (6, 7),
        (9, 10),
        (10, 11),
    ]


def test_a_forward_reads_the_version_of_the_rounds_before_its_warm_up() -> None:
    schedule = pipedream(replicas=(3, 1), minibatches=20)

    versions = {a.minibatch: a.version for q in range(3) for a in of_kind(schedule, Place(0, q), Op.FORWARD)}

    assert [versions[j] for j in range(20)] == [max(0, 3 * (j // 3 - 1)) for j in range(20)]


@pytest.mark.parametrize(("policy", "delay"), [(Policy.STASH, 1), (Policy.NONE, 0), (Policy.SPECTRAIN, 0)])
def test_a_backward_reads_its_forwards_version_or_the_newest(policy: Policy, delay: int) -> None:
    schedule = pipedream(policy, replicas=(3, 1), minibatches=20)

    versions = {a.minibatch: a.version for q in range(3) for a in of_kind(schedule, Place(0, q), Op.BACKWARD)}

    assert [versions[j] for j in range(20)] == [max(0, 3 * (j // 3 - delay)) for j in range(20)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 60))
def test_vertical_sync_uses_no_minibatch_that_the_first_stage_had_not_seen(counts: list[int], count: int) -> None:
    schedule = pipedream(Policy.VERTICAL_SYNC, replicas=tuple(counts), minibatches=count)
    entry = StageProgram(schedule, 0)

    for stage, length in enumerate(counts):
        program = StageProgram(schedule, stage)
        for j in range(count):
            bound = entry.forward_version(j)
            assert bound - length < program.forward_version(j) <= bound
            assert program.backward_version(j) == program.forward_version(j)


@pytest.mark.parametrize("policy", Policy)
def test_one_replicated_stage_is_plain_data_parallelism(policy: Policy) -> None:
    proof = verify(pipedream(policy, replicas=(4,), minibatches=14))

    for place in proof.stages:
        assert set(place.staleness) == {0}
        assert place.warm_up == 0
        assert place.peak_versions == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_as_many_minibatches_are_admitted_as_pipedream_says(counts: list[int]) -> None:
    schedule = pipedream(replicas=tuple(counts), minibatches=3 * sum(counts))

    noam = -(-sum(counts) // counts[0])

    assert warm_up_of(schedule, 0) + 1 == noam
    for replica in range(counts[0]):
        steps = [action.op for action in of_kind(schedule, Place(0, replica), Op.FORWARD, Op.BACKWARD)]
        assert steps[: noam + 1] == [Op.FORWARD] * noam + [Op.BACKWARD]


@settings(max_examples=40, deadline=None)
@given(schedules(stages=4, minibatches=40, replicas=4))
def test_staleness_in_the_steady_state_is_the_warm_up(schedule: Schedule) -> None:
    if schedule.synchronous or schedule.policy is Policy.VERTICAL_SYNC or schedule.drain_every:
        return
    for stage in range(schedule.stages):
        program, w = StageProgram(schedule, stage), warm_up_of(schedule, stage)
        rounds = [schedule.round_of(stage, j) for j in range(schedule.first, schedule.minibatches)]
        found = [program.staleness(members[0]) for members in rounds]
        assert found == [min(w, (members[0] - schedule.first) // len(rounds[0])) for members in rounds]


@settings(max_examples=60, deadline=None)
@given(schedules(stages=4, minibatches=30, replicas=4))
def test_passes_read_what_the_program_says_of_each_minibatch(schedule: Schedule) -> None:
    for place in schedule.places:
        program = StageProgram(schedule, *place)
        for action in program.actions():
            j, found = action.minibatch, (action.version, action.distance)
            if action.op is Op.FORWARD:
                assert found == (program.forward_version(j), program.forward_distance(j))
            elif action.op is Op.BACKWARD:
                assert found == (program.backward_version(j), program.backward_distance(j))


def test_distances_count_updates_and_not_minibatches() -> None:
    schedule = replace(pipedream(Policy.SPECTRAIN, replicas=(3, 1), minibatches=30), target=Target.LOCAL)

    assert [StageProgram(schedule, 0).forward_distance(j) for j in range(0, 30, 3)] == [0] + [1] * 9


def test_updates_to_come_are_called_by_the_last_minibatches_of_their_rounds() -> None:
    schedule = replace(pipedream(replicas=(3, 1), minibatches=20), drain_every=10)

    assert StageProgram(schedule, 0).updates_from(3, 4) == (5, 8, 9, 12)
    assert StageProgram(schedule, 1).updates_from(3, 4) == (3, 4, 5, 6)
    assert StageProgram(schedule, 0).updates_from(3, 0) == ()


def test_there_are_no_updates_behind_the_runs_last() -> None:
    program = StageProgram(pipedream(replicas=(3, 1), minibatches=8), 0)

    assert program.updates_from(6, 1) == (7,)
    with pytest.raises(ValueError, match="the run ends 1 updates before those asked for"):
        program.updates_from(6, 2)


# -- boundaries --------------------------------------------------------------------------------------------


def test_boundaries_are_where_the_rounds_of_all_stages_end_together() -> None:
    schedule = pipedream(replicas=(3, 2), minibatches=14)

    assert [k for k in range(14) if schedule.is_boundary(k)] == [5, 11, 13]
    assert [schedule.next_boundary(k) for k in (0, 5, 6, 12, 13)] == [5, 5, 11, 13, 13]


def test_the_ends_of_stretches_are_boundaries() -> None:
    schedule = replace(pipedream(replicas=(3, 2), minibatches=14, first=1), drain_every=8)

    assert [k for k in range(14) if schedule.is_boundary(k)] == [6, 7, 13]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_minibatch_of_a_synchronous_schedule_is_a_boundary(name: str) -> None:
    schedule = Schedule(name=name, stages=2, minibatches=5, microbatches=4, replicas=(3, 2))

    assert [k for k in range(-1, 7) if schedule.is_boundary(k)] == [0, 1, 2, 3, 4]


def test_what_is_due_at_an_interval_waits_for_the_next_boundary() -> None:
    schedule = pipedream(replicas=(3, 2), minibatches=20)

    assert [k for k in range(20) if schedule.due(4, k)] == [5, 11, 17, 19]
    assert [k for k in range(20) if schedule.due(12, k)] == [11]
    assert [k for k in range(20) if schedule.due(0, k)] == []


@settings(max_examples=80, deadline=None)
@given(schedules(stages=3, minibatches=40, replicas=4), st.integers(1, 15))
def test_each_multiple_of_an_interval_is_served_by_the_first_boundary_past_it(
    schedule: Schedule, every: int
) -> None:
    span = range(schedule.first, schedule.minibatches)
    boundaries = [k for k in span if all(schedule.round_of(stage, k)[-1] == k for stage in range(schedule.stages))]

    assert [k for k in span if schedule.is_boundary(k)] == boundaries
    multiples = [done for done in range(every, schedule.minibatches + 1, every) if done > schedule.first]
    served = {min(k for k in boundaries if k + 1 >= done) for done in multiples}
    assert [k for k in span if schedule.due(every, k)] == sorted(served)


def test_evaluations_wait_for_boundaries() -> None:
    schedule = replace(pipedream(replicas=(3, 2), minibatches=20), evaluate_every=5, evaluation_batches=1)

    for place in schedule.places:
        found = {action.minibatch for action in of_kind(schedule, place, Op.EVALUATE, Op.AVERAGE)}
        assert found == {5, 11, 17, 19}


def test_a_run_does_not_go_on_amid_a_round() -> None:
    program = StageProgram(pipedream(replicas=(3, 2), minibatches=20), 0)

    with pytest.raises(ValueError, match=r"a run cannot go on behind U\(7\), where some stage is amid a round"):
        next(program.actions(after=7))


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ((1, 2, 3), r"replicas = \[1, 2, 3\] count those of 3 stages, but there are 2: give one number a stage"),
        ((0, 1), r"a stage needs at least 1 replica, got replicas = \[0, 1\]"),
    ],
)
def test_numbers_of_replicas_that_make_no_schedule_are_refused(replicas: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Schedule(name="pipedream", stages=2, minibatches=4, replicas=replicas)
