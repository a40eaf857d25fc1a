"""What a cut holds, and that the verifier notices one that holds anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Action, Op, Policy, Schedule, StageCut, cut_at, rank_actions
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


@settings(max_examples=40, deadline=None)
@given(schedules(stages=6, minibatches=20), st.data())
def test_what_a_cut_holds_is_what_crosses_it(schedule: Schedule, data: st.DataObject) -> None:
    """Versions read behind it, minibatches between F and B, activations between send and receive; nothing more."""
    if schedule.first == schedule.minibatches:
        return
    k = data.draw(st.integers(schedule.first, schedule.minibatches - 1))
    behind: list[list[Action]] = []
    for actions in lists_of(schedule):
        (index,) = (i for i, action in enumerate(actions) if action.op is Op.UPDATE and action.minibatch == k)
        behind.append(actions[index + 1 :])

    def among(stage: int, op: Op) -> set[int]:
        return {action.minibatch for action in behind[stage] if action.op is op} if stage < len(behind) else set()

    for stage in range(schedule.stages):
        cut = cut_at(schedule, stage, k)
        readers = [a for a in behind[stage] if a.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE, Op.PREDICT)]
        assert set(cut.versions) == {a.version for a in readers if a.version <= k} | {k + 1}
        assert set(cut.in_flight) == among(stage, Op.BACKWARD) - among(stage, Op.FORWARD)
        lacking = among(stage + 1, Op.RECEIVE_ACTIVATION) - among(stage, Op.SEND_ACTIVATION)
        assert set(cut.resend) == lacking


# -- faults ------------------------------------------------------------------------------------------------

Cut = Callable[[Schedule, int, int], StageCut]


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
    ],
)
def test_a_cut_that_holds_too_little_or_too_much_is_caught(
    change: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(schedule: Schedule, stage: int, minibatch: int) -> StageCut:
        cut = cut_at(schedule, stage, minibatch)
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
    length = len(list(rank_actions(schedule, [1], after=2)))

    for place in range(length):

        def wrong(
            schedule: Schedule, stages: Sequence[int], *, after: int | None = None, place: int = place
        ) -> Iterator[Action]:
            for index, action in enumerate(rank_actions(schedule, stages, after=after)):
                if (after, list(stages), index) != (2, [1], place):
                    yield action
                elif fault == "doubled":
                    yield from (action, action)
                elif fault == "changed":
                    yield replace(action, version=action.version + 1)

        monkeypatch.setattr("hpcpipe.schedule.verify.rank_actions", wrong)
        with pytest.raises(ScheduleError):
            verify(schedule)
