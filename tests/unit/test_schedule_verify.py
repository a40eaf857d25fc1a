"""The verifier passes every schedule there is and catches every fault put into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Action, Op, Place, Policy, Prediction, Role, Schedule, StageProgram, Target
from hpcpipe.schedule.verify import ScheduleError, prove, verify
from tests.unit.schedule_cases import changed, find, groupings, lists_of, pipedream, schedules

POLICIES = list(Policy)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_schedule_on_any_ranks_is_proved(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    ranks = data.draw(groupings(schedule.stages))

    proof = verify(schedule, ranks)

    count = schedule.minibatches - schedule.first
    assert proof.cuts == tuple(range(schedule.first, schedule.minibatches))
    assert proof.actions == sum(len(actions) for actions in lists_of(schedule, ranks))
    for stage in proof.stages:
        program = StageProgram(schedule, stage.stage)
        span = range(schedule.first, schedule.minibatches)
        assert stage.staleness == tuple(program.staleness(j) for j in span)
        assert stage.forward_distances == tuple(program.forward_distance(j) for j in span)
        assert len(stage.backward_distances) == count


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_peaks_of_the_asynchronous_schedule_equal_their_closed_forms(policy: Policy, stages: int) -> None:
    proof = prove(schedule := pipedream(policy, stages=stages, minibatches=4 * stages), lists_of(schedule))

    versions = {Policy.STASH: lambda k: stages - k, Policy.VERTICAL_SYNC: lambda k: stages}
    for k, stage in enumerate(proof.stages):
        assert stage.warm_up == stages - 1 - k
        assert stage.in_flight == stages - k
        assert stage.peak_versions == versions.get(policy, lambda k: 1)(k)
        delay = stages - 1 if policy is Policy.VERTICAL_SYNC else stages - 1 - k
        assert stage.staleness == tuple(min(j, delay) for j in range(4 * stages))


@pytest.mark.parametrize(("name", "in_flight"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
def test_peaks_of_the_synchronous_schedules(name: str, in_flight: list[int]) -> None:
    proof = verify(Schedule(name=name, stages=4, minibatches=5, microbatches=6))

    assert [stage.in_flight for stage in proof.stages] == in_flight
    assert [stage.peak_versions for stage in proof.stages] == [1] * 4
    assert {value for stage in proof.stages for value in stage.staleness} == {0}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("minibatches", [0, 1, 2, 3])
def test_fewer_minibatches_than_stages_fill_and_drain(minibatches: int, policy: Policy) -> None:
    proof = verify(pipedream(policy, stages=4, minibatches=minibatches))

    assert [stage.in_flight for stage in proof.stages] == [min(minibatches, 4 - k) for k in range(4)]
    assert sum(proof.messages.values()) == 6 * minibatches


def test_messages_are_counted_per_channel() -> None:
    schedule = replace(pipedream(stages=3, minibatches=10), evaluate_every=5, evaluation_batches=4)

    proof = verify(schedule)

    boundaries = [(0, 1), (1, 2)]
    expected = {(Place(a), Place(b), "activation"): 10 for a, b in boundaries}
    expected |= {(Place(b), Place(a), "gradient"): 10 for a, b in boundaries}
    expected |= {(Place(a), Place(b), "evaluation"): 8 for a, b in boundaries}
    assert proof.messages == expected


def test_cuts_of_a_long_run_are_sampled_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpipe.schedule.verify._CUT_BUDGET", 5_000)

    proof = verify(pipedream(stages=4, minibatches=60))

    assert 2 < len(proof.cuts) < 60
    assert (proof.cuts[0], proof.cuts[-1]) == (0, 59)


@pytest.mark.parametrize("ranks", [[[0], [1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], [[0, 1, 2], []], []])
def test_ranks_that_do_not_share_out_the_stages_are_refused(ranks: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="must own each of the 3 replicas of stages 0 to 2 once"):
        verify(pipedream(stages=3), [[Place(stage) for stage in stages] for stages in ranks])


# -- faults ------------------------------------------------------------------------------------------------


def faulty(policy: Policy) -> Schedule:
    """Small enough to try every fault in every place."""
    return replace(pipedream(policy, stages=3, minibatches=5), evaluate_every=2, evaluation_batches=1)


def every_action(lists: list[list[Action]]) -> Iterator[Action]:
    return (action for actions in lists for action in actions)


def without(lists: list[list[Action]], action: Action) -> list[list[Action]]:
    return [[a for a in actions if a is not action] for actions in lists]


def swapped(lists: list[list[Action]], first: Action, second: Action) -> list[list[Action]]:
    other = {id(first): second, id(second): first}
    return [[other.get(id(a), a) for a in actions] for actions in lists]


def refused(schedule: Schedule, lists: list[list[Action]]) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        prove(schedule, lists)
    return caught.value


@pytest.mark.parametrize("policy", POLICIES)
def test_no_action_can_be_dropped_or_repeated(policy: Policy) -> None:
    schedule = faulty(policy)
    lists = lists_of(schedule)

    for action in every_action(lists):
        refused(schedule, without(lists, action))
        refused(schedule, [[b for a in actions for b in ([a, a] if a is action else [a])] for actions in lists])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_version_is_checked(policy: Policy) -> None:
    schedule = faulty(policy)
    lists = lists_of(schedule)

    for action in every_action(lists):
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE, Op.UPDATE, Op.PREDICT):
            for wrong in (action.version - 1, action.version + 1):
                refused(schedule, changed(lists, action, version=wrong))


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_distance_is_checked(policy: Policy, target: Target) -> None:
    schedule = replace(faulty(policy), target=target)
    lists = lists_of(schedule)

    for action in every_action(lists):
        if action.op in (Op.FORWARD, Op.BACKWARD):
            for wrong in (action.distance - 1, action.distance + 1):
                error = refused(schedule, changed(lists, action, distance=wrong))
                assert f"predicts {wrong} updates ahead" in str(error)


def test_a_distance_off_by_one_is_caught_even_where_the_prediction_agrees_with_it() -> None:
    schedule = faulty(Policy.SPECTRAIN)
    lists = lists_of(schedule)

    for maker in every_action(lists):
        for prediction in maker.predictions:
            op = Op.FORWARD if prediction.role is Role.FORWARD else Op.BACKWARD
            reader = find(lists, op, maker.stage, prediction.minibatch)
            wrong = prediction._replace(distance=prediction.distance + 1)
            others = tuple(wrong if p is prediction else p for p in maker.predictions)
            faulted = changed(changed(lists, maker, predictions=others), reader, distance=wrong.distance)
            refused(schedule, faulted)


def test_a_backward_that_uses_the_forwards_distance_is_caught() -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=4, minibatches=12)
    lists = lists_of(schedule)
    action = find(lists, Op.BACKWARD, 2, 6)

    error = refused(schedule, changed(lists, action, distance=find(lists, Op.FORWARD, 2, 6).distance))

    assert (error.stage, error.action is not None) == (2, True)
    assert str(error) == "B(6) at stage 2: it predicts 2 updates ahead of version 6, counted are 1"


@pytest.mark.parametrize(
    "change",
    [
        {"minibatch": 99},
        {"version": 0},
        {"distance": 7},
        {"distance": 0},
        {"role": Role.FORWARD},
        {"role": Role.BACKWARD},
    ],
)
def test_every_prediction_is_checked_and_used(change: dict[str, object]) -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=3, minibatches=8)
    lists = lists_of(schedule)

    for maker in every_action(lists):
        for prediction in maker.predictions:
            wrong = prediction._replace(**change)
            if wrong != prediction:
                others = tuple(wrong if p is prediction else p for p in maker.predictions)
                refused(schedule, changed(lists, maker, predictions=others))


def test_a_prediction_that_nothing_needs_is_caught() -> None:
    schedule = pipedream(Policy.STASH)
    lists = lists_of(schedule)
    extra = Prediction(role=Role.FORWARD, minibatch=4, version=2, distance=1)

    error = refused(schedule, changed(lists, find(lists, Op.UPDATE, 1, 1), predictions=(extra,)))

    assert str(error).startswith("F(3) at stage 1: it needs None and finds ")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_version_released_too_early_or_too_late_is_caught(policy: Policy) -> None:
    schedule = faulty(policy)
    lists = lists_of(schedule)

    for update in every_action(lists):
        if update.op is Op.UPDATE:
            for version in update.releases:
                late = tuple(v for v in update.releases if v != version)
                assert "needed no more" in str(refused(schedule, changed(lists, update, releases=late)))
            early = (*update.releases, update.version)
            assert "still needed" in str(refused(schedule, changed(lists, update, releases=early)))


def test_a_stash_released_before_its_backward_is_caught() -> None:
    schedule = pipedream(stages=4, minibatches=12)
    lists = lists_of(schedule)
    update = find(lists, Op.UPDATE, 0, 5)

    error = refused(schedule, changed(lists, update, releases=(*update.releases, 3)))

    assert str(error) == "U(5) at stage 0: it releases [3], still needed; to release: [2]"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ((Op.RECEIVE_ACTIVATION, 1, 2), (Op.FORWARD, 1, 2), "message has not been received"),
        ((Op.FORWARD, 1, 2), (Op.SEND_ACTIVATION, 1, 2), "sends what no pass has just made"),
        ((Op.RECEIVE_GRADIENT, 1, 2), (Op.BACKWARD, 1, 2), "lets go of its gradient before that of an earlier"),
        ((Op.BACKWARD, 1, 2), (Op.SEND_GRADIENT, 1, 2), "sends what no pass has just made"),
        ((Op.BACKWARD, 1, 2), (Op.UPDATE, 1, 2), "has not been done"),
        ((Op.UPDATE, 0, 2), (Op.FORWARD, 0, 5), "does not read the newest version 2"),
        ((Op.UPDATE, 0, 2), (Op.UPDATE, 0, 3), "the update due here is U(2)"),
        ((Op.FORWARD, 0, 2), (Op.FORWARD, 0, 3), "does not read the newest version 0"),
        ((Op.BACKWARD, 2, 2), (Op.BACKWARD, 2, 3), "lets go of its activation before that of an earlier"),
        ((Op.SEND_ACTIVATION, 0, 2), (Op.SEND_ACTIVATION, 0, 3), "the next message of stage 0 is F>(3)"),
        ((Op.RECEIVE_GRADIENT, 0, 1), (Op.RECEIVE_GRADIENT, 0, 2), "the next message of stage 1 is B>(1)"),
        ((Op.SEND_ACTIVATION, 0, 0), (Op.RECEIVE_GRADIENT, 0, 0), "deadlock: "),
    ],
)
def test_two_actions_in_the_wrong_order_are_caught(
    first: tuple[Op, int, int], second: tuple[Op, int, int], says: str
) -> None:
    schedule = pipedream(stages=3, minibatches=6)
    lists = lists_of(schedule)

    error = refused(schedule, swapped(lists, find(lists, *first), find(lists, *second)))

    assert says in str(error)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    schedule = pipedream(stages=2, minibatches=2)
    lists = lists_of(schedule)
    faulted = swapped(lists, find(lists, Op.SEND_ACTIVATION, 0, 0), find(lists, Op.RECEIVE_GRADIENT, 0, 0))

    error = refused(schedule, faulted)

    assert "<B(0) at stage 0 waits for stage 1; <F(0) at stage 1 waits for stage 0" in str(error)


def test_a_send_that_nobody_receives_is_caught() -> None:
    schedule = pipedream(stages=2, minibatches=3)
    lists = lists_of(schedule)
    last = find(lists, Op.RECEIVE_GRADIENT, 0, 2)

    error = refused(schedule, without(lists, last))

    assert str(error) == "B>(2) at stage 1: stage 0 never receives what it sends"


def test_an_action_on_the_wrong_rank_is_caught() -> None:
    schedule = pipedream(stages=2, minibatches=3)
    lists = lists_of(schedule)

    lists[0].append(lists[1].pop())

    assert str(refused(schedule, lists)).endswith("rank 1 has an action of rank 0's")


def test_a_pipeline_that_is_not_drained_where_asked_is_caught() -> None:
    undrained = pipedream(stages=3, minibatches=8)

    error = refused(replace(undrained, drain_every=4), lists_of(undrained))

    assert error.action is not None
    assert error.action.minibatch == 4


def test_lists_of_another_schedule_are_caught() -> None:
    schedule = pipedream(stages=3, minibatches=8)

    refused(replace(schedule, minibatches=9), lists_of(schedule))
    refused(schedule, lists_of(replace(schedule, minibatches=9)))
    refused(replace(schedule, policy=Policy.VERTICAL_SYNC), lists_of(schedule))
    refused(schedule, lists_of(replace(schedule, evaluate_every=3, evaluation_batches=1)))
    refused(replace(schedule, evaluate_every=3, evaluation_batches=1), lists_of(schedule))
