"""The verifier passes every schedule with replicated stages and catches every fault put into one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, StageProgram, Target
from hpcpipe.schedule.verify import ScheduleError, prove, verify
from tests.unit.schedule_cases import changed, find, lists_of, pipedream, schedules


def faulty(policy: Policy) -> Schedule:
    """Small enough to try every fault in every place; the last round is short."""
    return replace(pipedream(policy, replicas=(2, 1, 2), minibatches=5), evaluate_every=2, evaluation_batches=3)


def refused(schedule: Schedule, lists: list[list[Action]]) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        prove(schedule, lists)
    return caught.value


def everywhere(lists: list[list[Action]], fault: dict[int, list[Action]]) -> list[list[Action]]:
    """The lists with each action that `fault` knows by identity replaced by what it says."""
    return [[b for a in actions for b in fault.get(id(a), [a])] for actions in lists]


def common(lists: list[list[Action]], op: Op, stage: int, minibatch: int) -> list[Action]:
    """What the replicas of a stage do together there, an action each."""
    return [a for actions in lists for a in actions if a[:3] == (op, stage, minibatch)]


# -- what is right -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(schedules(stages=4, minibatches=25, replicas=4))
def test_every_replicated_schedule_is_proved(schedule: Schedule) -> None:
    proof = verify(schedule)

    span = range(schedule.first, schedule.minibatches)
    assert proof.cuts == proof.boundaries == tuple(k for k in span if schedule.is_boundary(k))
    for place, found in zip(schedule.places, proof.stages, strict=True):
        program = StageProgram(schedule, *place)
        parts = range(schedule.microbatches)
        own = [j for j in span if any(schedule.owner(place.stage, j, i) == place.replica for i in parts)]
        assert (found.stage, found.replica) == place
        assert found.staleness == tuple(program.staleness(j) for j in own)
        assert found.forward_distances == tuple(program.forward_distance(j) for j in own)
        assert found.backward_distances == tuple(program.backward_distance(j) for j in own)
        assert found.updates == len({schedule.round_of(place.stage, j) for j in span})


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("minibatches", [0, 1, 2, 3])
def test_fewer_minibatches_than_replicas_fill_and_drain(minibatches: int, policy: Policy) -> None:
    proof = verify(pipedream(policy, replicas=(3, 2, 4), minibatches=minibatches))

    assert sum(proof.messages.values()) == 4 * minibatches
    assert [sum(len(s.staleness) for s in proof.stages if s.stage == k) for k in range(3)] == [minibatches] * 3


@pytest.mark.parametrize("replicas", [(4, 2, 1), (3, 2), (1, 3), (2, 2, 2)])
def test_a_stash_holds_the_warm_up_and_the_newest(replicas: tuple[int, ...]) -> None:
    proof = verify(pipedream(replicas=replicas, minibatches=6 * sum(replicas)))

    for place in proof.stages:
        w = (sum(replicas[place.stage :]) - 1) // replicas[place.stage]
        assert (place.warm_up, place.in_flight, place.peak_versions) == (w, w + 1, w + 1)


@pytest.mark.parametrize("replicas", [(4, 2, 1), (3, 2), (1, 3), (2, 2, 2)])
def test_without_kept_weights_only_the_newest_version_is_held(replicas: tuple[int, ...]) -> None:
    proof = verify(pipedream(Policy.SPECTRAIN, replicas=replicas, minibatches=6 * sum(replicas)))

    assert {place.peak_versions for place in proof.stages} == {1}


def test_a_long_run_of_replicas_is_verified_at_a_sample_of_its_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpipe.schedule.verify._CUT_BUDGET", 5_000)

    proof = verify(pipedream(Policy.SPECTRAIN, replicas=(2, 1), minibatches=100))

    assert len(proof.boundaries) == 50
    assert 2 <= len(proof.cuts) < 50
    assert (proof.cuts[0], proof.cuts[-1]) == (1, 99)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([[(0, 0)], [(0, 1)]], "must own each of the 3 replicas of stages 0 to 1 once"),
        ([[(0, 0)], [(0, 0)], [(1, 0)]], "must own each of the 3 replicas of stages 0 to 1 once"),
        ([[(0, 0)], [(0, 1), (1, 0)]], "replicated stages need a rank for each of 3 replicas, got 2"),
    ],
)
def test_replicas_without_a_rank_of_their_own_are_refused(groups: list[list[tuple[int, int]]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verify(pipedream(replicas=(2, 1)), [[Place(*place) for place in places] for places in groups])


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy)
def test_no_action_of_a_replica_can_be_dropped_or_repeated(policy: Policy) -> None:
    schedule = faulty(policy)
    lists = lists_of(schedule)

    for action in (action for actions in lists for action in actions):
        refused(schedule, everywhere(lists, {id(action): []}))
        refused(schedule, everywhere(lists, {id(action): [action, action]}))


@pytest.mark.parametrize("op", [Op.REDUCE, Op.AVERAGE, Op.COLLECT])
def test_nothing_that_the_replicas_do_together_can_be_dropped_by_all_or_done_twice(op: Op) -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)

    for stage in (0, 2):
        for k in range(5):
            if together := common(lists, op, stage, k):
                assert len(together) == 2
                refused(schedule, everywhere(lists, {id(action): [] for action in together}))
                refused(schedule, everywhere(lists, {id(action): [action, action] for action in together}))


def test_an_update_of_gradients_that_are_not_reduced_is_caught() -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)
    dropped = {id(action): list[Action]() for action in common(lists, Op.REDUCE, 0, 3)}

    assert str(refused(schedule, everywhere(lists, dropped))) == (
        "U(3) at stage 0: its gradients have not been reduced"
    )


def test_an_update_that_does_not_follow_its_reduction_directly_is_caught() -> None:
    schedule = pipedream(replicas=(3, 1), minibatches=8)
    lists = lists_of(schedule)
    update, forward = find(lists, Op.UPDATE, 0, 2), find(lists, Op.FORWARD, 0, 6)

    error = refused(schedule, everywhere(lists, {id(update): [forward, update], id(forward): []}))

    assert str(error) == "F(6) at stage 0: U(2) does not follow its R directly"


def test_gradients_reduced_before_the_last_backward_are_caught() -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)
    faults: dict[int, list[Action]] = {}
    for replica in (0, 1):
        reduce, backward = (
            find(lists, op, 0, j, replica=replica) for op, j in ((Op.REDUCE, 1), (Op.BACKWARD, replica))
        )
        faults |= {id(backward): [reduce, backward], id(reduce): []}

    assert "B(0.0) has not been done" in str(refused(schedule, everywhere(lists, faults)))


def test_a_reduction_by_a_stage_with_one_replica_is_caught() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=4)
    lists = lists_of(schedule)
    update = find(lists, Op.UPDATE, 1, 2)
    reduce = update._replace(op=Op.REDUCE, version=0, releases=())

    error = refused(schedule, everywhere(lists, {id(update): [reduce, update]}))

    assert str(error) == "R(2) at stage 1: a stage with one replica has nothing to reduce"


def test_replicas_that_wait_for_each_other_are_named() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=4)
    lists = lists_of(schedule)

    error = refused(schedule, everywhere(lists, {id(find(lists, Op.REDUCE, 0, 3, replica=1)): []}))

    assert str(error) == ("R(3) at stage 0: deadlock: R(3) at stage 0 waits for stage 0 replica 1")


def test_replicas_that_meet_for_different_things_are_caught() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=6)
    lists = lists_of(schedule)
    reduce = find(lists, Op.REDUCE, 0, 3, replica=1)

    error = refused(schedule, changed(lists, reduce, minibatch=5))

    assert "it meets" in str(error)


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
def test_a_minibatch_at_the_wrong_replica_is_caught(op: Op) -> None:
    schedule = pipedream(replicas=(3,), minibatches=6)
    lists = lists_of(schedule)
    mine, theirs = find(lists, op, 0, 3), find(lists, op, 0, 4, replica=1)
    swapped = {id(mine): [theirs._replace(replica=0)], id(theirs): [mine._replace(replica=1)]}

    refused(schedule, everywhere(lists, swapped))


def test_all_of_a_minibatch_at_the_wrong_replica_is_caught() -> None:
    schedule = pipedream(replicas=(2,), minibatches=2)
    lists = lists_of(schedule)
    exchanged = [[a._replace(replica=1 - a.replica) for a in actions] for actions in lists]

    assert str(refused(schedule, exchanged)) == "F(1) at stage 0: the schedule has no such pass here"


def test_a_message_to_or_from_the_wrong_replica_is_caught() -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)

    for action in (action for actions in lists for action in actions):
        if action.op.value[0] == "<" or action.op.value[-1] == ">":
            refused(schedule, changed(lists, action, peer_replica=action.peer_replica + 1))
            refused(schedule, changed(lists, action, peer_replica=1 - action.peer_replica))


def test_a_message_to_the_wrong_replica_that_takes_it_is_caught() -> None:
    schedule = pipedream(replicas=(1, 2), minibatches=2)
    lists = lists_of(schedule)
    crossed: list[list[Action]] = []
    for actions in lists:
        passing = {Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT} if actions[0].stage == 0 else set[Op]()
        crossed.append([a._replace(peer_replica=1 - a.peer_replica) if a.op in passing else a for a in actions])
    crossed[1] = [a._replace(replica=1) for a in crossed[1]]
    crossed[2] = [a._replace(replica=0) for a in crossed[2]]

    refused(schedule, crossed)


@pytest.mark.parametrize("policy", Policy)
def test_every_version_distance_and_release_of_a_replica_is_checked(policy: Policy) -> None:
    schedule = replace(faulty(policy), target=Target.ROUND_TRIP)
    lists = lists_of(schedule)

    for action in (action for actions in lists for action in actions):
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE, Op.UPDATE, Op.PREDICT, Op.AVERAGE):
            for wrong in (action.version - 1, action.version + 1):
                refused(schedule, changed(lists, action, version=wrong))
        if action.op in (Op.FORWARD, Op.BACKWARD):
            for wrong in (action.distance - 1, action.distance + 1):
                refused(schedule, changed(lists, action, distance=wrong))
        if action.op is Op.UPDATE:
            for version in action.releases:
                late = tuple(v for v in action.releases if v != version)
                refused(schedule, changed(lists, action, releases=late))
            refused(schedule, changed(lists, action, releases=(*action.releases, action.version)))


def test_buffers_averaged_behind_a_pass_that_needs_them_are_caught() -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)
    faults: dict[int, list[Action]] = {}
    for replica in (0, 1):
        average = find(lists, Op.AVERAGE, 0, 1, replica=replica)
        evaluate = find(lists, Op.EVALUATE, 0, 1, replica, replica=replica)
        faults |= {id(average): [], id(evaluate): [evaluate, average]}

    assert str(refused(schedule, everywhere(lists, faults))) == (
        "E(1) at stage 0: the replicas' buffers have not been averaged"
    )


def test_figures_collected_before_the_last_pass_are_caught() -> None:
    schedule = faulty(Policy.STASH)
    lists = lists_of(schedule)
    faults: dict[int, list[Action]] = {}
    for replica in (0, 1):
        collect = find(lists, Op.COLLECT, 2, 1, replica=replica)
        receive = find(lists, Op.RECEIVE_EVALUATION, 2, 1, replica, replica=replica)
        faults |= {id(collect): [], id(receive): [collect, receive]}

    assert str(refused(schedule, everywhere(lists, faults))) == "C(1) at stage 2: E(1.0) has not been done"


def test_lists_for_other_numbers_of_replicas_are_caught() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=6)

    refused(schedule, lists_of(replace(schedule, replicas=(1, 2))))
    refused(schedule, lists_of(replace(schedule, replicas=())))
    refused(replace(schedule, replicas=()), lists_of(schedule))
