"""What a cut holds, and that the verifier notices one that holds anything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, StageCut, cut_at, rank_actions
from hpcpipe.schedule.verify import ScheduleError, verify
from tests.unit.schedule_cases import lists_of, pipedream, schedules


def test_a_cut_of_the_asynchronous_schedule_in_its_steady_state() -> None:
    schedule = pipedream(Policy.STASH, stages=4, minibatches=40)

    cuts = [cut_at(schedule, stage, 20) for stage in range(4)]

    assert [cut.in_flight for cut in cuts] == [(21, 22, 23), (21, 22), (21,), ()]
    assert [cut.versions for cut in cuts] == [(18, 19, 20, 21), (19, 20, 21), (20, 21), (21,)]
    assert [cut.resend for cut in cuts] == [(23,), (22,), (21,), ()]


def test_vertical_sync_keeps_versions_that_coming_forwards_read() -> None:
    schedule = pipedream(Policy.VERTICAL_SYNC, stages=4, minibatches=40)

    assert [cut_at(schedule, stage, 20).versions for stage in range(4)] == [(18, 19, 20, 21)] * 4


@pytest.mark.parametrize("policy", [Policy.NONE, Policy.SPECTRAIN])
def test_policies_without_a_stash_keep_the_newest_version_only(policy: Policy) -> None:
    schedule = pipedream(policy, stages=4, minibatches=40)

    assert [cut_at(schedule, stage, 20).versions for stage in range(4)] == [(21,)] * 4
    assert cut_at(schedule, 0, 20).in_flight == (21, 22, 23)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_nothing_is_in_flight_at_a_cut_of_a_synchronous_schedule(name: str) -> None:
    schedule = Schedule(name=name, stages=3, minibatches=5, microbatches=4)

    for stage in range(3):
        for k in range(5):
            cut = cut_at(schedule, stage, k)
            assert (cut.in_flight, cut.versions, cut.resend) == ((), (k + 1,), ())


def test_nothing_is_in_flight_at_the_last_cut_nor_before_a_refill() -> None:
    schedule = replace(pipedream(stages=4, minibatches=20), drain_every=8)

    for k in (7, 15, 19):
        for stage in range(4):
            cut = cut_at(schedule, stage, k)
            assert (cut.in_flight, cut.versions, cut.resend) == ((), (k + 1,), ())


def test_a_cut_in_the_middle_of_a_trillion_minibatches_is_cheap() -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=8, minibatches=10**12)

    assert cut_at(schedule, 0, 10**11).in_flight == tuple(range(10**11 + 1, 10**11 + 8))


@pytest.mark.parametrize("name", ["pipedream", "1f1b"])
def test_a_cut_at_a_replica_in_the_middle_of_a_trillion_minibatches_is_cheap(name: str) -> None:
    schedule = Schedule(name=name, stages=2, minibatches=10**12, replicas=(2, 5))

    cut = cut_at(schedule, 1, 10**11 - 1, 4)

    assert (cut.versions, cut.in_flight) == ((10**11,), ())


def test_each_replica_has_its_own_minibatches_in_flight() -> None:
    schedule = pipedream(Policy.STASH, replicas=(3, 1), minibatches=30)

    cuts = [cut_at(schedule, 0, 11, replica) for replica in range(3)]

    assert [cut.in_flight for cut in cuts] == [(12,), (13,), (14,)]
    assert [cut.resend for cut in cuts] == [(12,), (13,), (14,)]
    assert [cut.versions for cut in cuts] == [(9, 12)] * 3
    assert [cut.replica for cut in cuts] == [0, 1, 2]


def test_there_is_no_cut_amid_a_round() -> None:
    schedule = pipedream(replicas=(3, 1), minibatches=30)

    with pytest.raises(ValueError, match=r"a run cannot be cut after U\(12\), where some stage is amid a round"):
        cut_at(schedule, 1, 12)


@settings(max_examples=80, deadline=None)
@given(schedules(stages=4, minibatches=20, replicas=3), st.data())
def test_what_a_cut_holds_is_what_crosses_it(schedule: Schedule, data: st.DataObject) -> None:
    """Versions read behind it, minibatches between F and B, activations between send and receive; nothing more."""
    boundaries = [k for k in range(schedule.first, schedule.minibatches) if schedule.is_boundary(k)]
    if not boundaries:
        return
    k = data.draw(st.sampled_from(boundaries))
    behind: dict[Place, list[Action]] = {}
    for place, actions in zip(schedule.places, lists_of(schedule), strict=True):
        (index,) = (i for i, action in enumerate(actions) if action.op is Op.UPDATE and action.minibatch == k)
        behind[place] = actions[index + 1 :]

    def among(places: list[Place], op: Op) -> set[int]:
        return {action.minibatch for place in places for action in behind[place] if action.op is op}

    for place in schedule.places:
        cut = cut_at(schedule, place.stage, k, place.replica)
        readers = [a for a in behind[place] if a.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE, Op.PREDICT)]
        assert set(cut.versions) == {a.version for a in readers if a.version <= k} | {k + 1}
        assert set(cut.in_flight) == among([place], Op.BACKWARD) - among([place], Op.FORWARD)
        following = [other for other in schedule.places if other.stage == place.stage + 1]
        assert set(cut.resend) == set(cut.in_flight) & among(following, Op.RECEIVE_ACTIVATION)


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in_flight": (5, 6)}, r"cut after U\(4\) at stage 0: in flight \(5, 6\), must be \(5, 6, 7\)"),
        ({"in_flight": (5, 6, 7, 8)}, "in flight"),
        ({"versions": (2, 3, 5)}, "versions"),
        ({"versions": (1, 2, 3, 4, 5)}, "versions"),
        ({"versions": (2, 3, 4)}, "versions"),
        ({"resend": ()}, "resend"),
        ({"resend": (6, 7)}, "resend"),
        ({"resend": (99,)}, "resend"),
        ({"replica": 1}, "place"),
    ],
)
def test_a_cut_that_holds_too_little_or_too_much_is_caught(
    change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(schedule: Schedule, stage: int, minibatch: int, replica: int = 0) -> StageCut:
        cut = cut_at(schedule, stage, minibatch, replica)
        return replace(cut, **change) if (stage, minibatch) == (0, 4) else cut  # type: ignore[arg-type]

    monkeypatch.setattr("hpcpipe.schedule.verify.cut_at", wrong)

    with pytest.raises(ScheduleError, match=says):
        verify(pipedream(stages=4, minibatches=12))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("fault", ["lost", "doubled", "changed"])
def test_a_resumed_program_that_differs_from_the_unbroken_one_is_caught(
    fault: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = pipedream(policy, stages=3, minibatches=6)
    length = len(list(rank_actions(schedule, [Place(1)], after=2)))

    for at in range(length):

        def wrong(
            schedule: Schedule, places: Sequence[Place], *, after: int | None = None, at: int = at
        ) -> Iterator[Action]:
            for index, action in enumerate(rank_actions(schedule, places, after=after)):
                if (after, list(places), index) != (2, [Place(1)], at):
                    yield action
                elif fault == "doubled":
                    yield from (action, action)
                elif fault == "changed":
                    yield action._replace(version=action.version + 1)

        monkeypatch.setattr("hpcpipe.schedule.verify.rank_actions", wrong)
        with pytest.raises(ScheduleError):
            verify(schedule)
