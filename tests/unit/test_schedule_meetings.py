"""Ranks can all meet at a cut, as one file for all needs it: nobody holds back what another one waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, cut_at
from hpcpipe.schedule.actions import BARRIERS, RECEIVES, SENDS
from hpcpipe.schedule.dryrun import channel_of
from tests.unit.schedule_cases import find, groupings, lists_of, pipedream, schedules


def until_the_meeting(actions: Sequence[Action], cut: int) -> list[Action]:
    """What a rank does before it meets the others at the cut after U(`cut`): all up to its last stage's update."""
    updates = [index for index, action in enumerate(actions) if action.op is Op.UPDATE and action.minibatch == cut]
    return list(actions[: updates[-1] + 1])


def hindrances(
    schedule: Schedule, lists: Sequence[Sequence[Action]], resends: Sequence[Action] = ()
) -> Iterator[Action]:
    """Actions that a rank would wait for ever for: what they need comes behind a meeting of another rank."""
    cuts = {action.minibatch for actions in lists for action in actions if action.op is Op.UPDATE}
    for cut in filter(schedule.is_boundary, sorted(cuts)):
        before = [action for actions in lists for action in until_the_meeting(actions, cut)]
        sent = {(channel_of(a), *a[2:4]) for a in (*resends, *before) if a.op in SENDS}
        done = {a[:5] for a in before if a.op in BARRIERS}
        for action in before:
            if action.op in RECEIVES and (channel_of(action), *action[2:4]) not in sent:
                yield action
            if action.op in BARRIERS:
                partners = (action._replace(replica=q) for q in range(schedule.replicas_of(action.stage)))
                yield from (partner for partner in partners if partner[:5] not in done)


@settings(deadline=None, max_examples=60)
@given(schedules(stages=5, minibatches=14, replicas=3), st.data())
def test_every_rank_gets_to_every_cut_when_the_others_stop_at_theirs(
    schedule: Schedule, data: st.DataObject
) -> None:
    groups = None if schedule.replicated else data.draw(groupings(schedule.stages))

    assert list(hindrances(schedule, lists_of(schedule, groups))) == []


@settings(deadline=None, max_examples=40)
@given(schedules(stages=4, minibatches=12, replicas=3), st.data())
def test_a_resumed_run_gets_to_every_cut_as_well(schedule: Schedule, data: st.DataObject) -> None:
    boundaries = [k for k in range(schedule.first, schedule.minibatches) if schedule.is_boundary(k)]
    if not boundaries:
        return
    after = data.draw(st.sampled_from(boundaries))
    resends = [
        Action(
            Op.SEND_ACTIVATION, place.stage, j, 0, place.replica, peer_replica=schedule.owner(place.stage + 1, j)
        )
        for place in schedule.places
        for j in cut_at(schedule, place.stage, after, place.replica).resend
    ]

    assert list(hindrances(schedule, lists_of(schedule, after=after), resends)) == []


@pytest.mark.parametrize("policy", Policy)
def test_a_gradient_sent_behind_the_update_would_be_found(policy: Policy) -> None:
    schedule = pipedream(policy, stages=3, minibatches=8)
    lists = lists_of(schedule)
    late = find(lists, Op.SEND_GRADIENT, 1, 4)
    actions = lists[1]
    actions.remove(late)
    actions.insert(actions.index(find(lists, Op.UPDATE, 1, 4)) + 1, late)

    assert [str(action) for action in hindrances(schedule, lists)] == ["<B(4) at stage 0"]


def test_a_replica_that_stays_away_from_a_sum_would_be_found() -> None:
    schedule = pipedream(replicas=(2, 1), minibatches=8)
    lists = lists_of(schedule)
    lists[0].remove(find(lists, Op.REDUCE, 0, 3))

    found = {(action.op, action.place, action.minibatch) for action in hindrances(schedule, lists)}

    assert found == {(Op.REDUCE, Place(0, 0), 3)}
