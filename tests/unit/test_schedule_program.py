"""Versions and distances of the generated programs against the published formulas and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcpipe.errors import ConfigError
from hpcpipe.schedule import Action, Op, Policy, Schedule, StageProgram, Target
from hpcpipe.schedule.program import warm_up_of
from tests.unit.schedule_cases import pipedream


def distances(schedule: Schedule, stage: int, op: Op) -> list[int]:
    return [action.distance for action in StageProgram(schedule, stage).actions() if action.op is op]


def passes(schedule: Schedule, stage: int) -> list[tuple[str, int]]:
    return [
        (a.op.value, a.minibatch)
        for a in StageProgram(schedule, stage).actions()
        if a.op in (Op.FORWARD, Op.BACKWARD)
    ]


@pytest.mark.parametrize("stages", range(1, 17))
def test_counted_distances_equal_the_formulas_of_spectrain_in_the_steady_state(stages: int) -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=stages, minibatches=5 * stages + 5)

    for k in range(stages):
        forward, backward = distances(schedule, k, Op.FORWARD), distances(schedule, k, Op.BACKWARD)
        steady = slice(stages - 1 - k, 5 * stages + 5 - stages)
        assert set(forward[steady]) == {k // 2 + stages - 1 - k}
        assert set(backward[steady]) == {k // 2}


@pytest.mark.parametrize("stages", range(1, 17))
def test_forward_and_backward_aim_at_one_version_and_differ_by_the_local_delay(stages: int) -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=stages, minibatches=3 * stages)

    for k in range(stages):
        program = StageProgram(schedule, k)
        for j in range(3 * stages):
            delay = min(j, stages - 1 - k)
            assert program.forward_distance(j) - program.backward_distance(j) == delay == program.staleness(j)


@pytest.mark.parametrize(
    ("stages", "forward", "backward"),
    [
        (4, [3, 2, 2, 1], [0, 0, 1, 1]),
        (8, [7, 6, 6, 5, 5, 4, 4, 3], [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_the_tables_of_the_paper(stages: int, forward: list[int], backward: list[int]) -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=stages, minibatches=40)

    assert [StageProgram(schedule, k).forward_distance(20) for k in range(stages)] == forward
    assert [StageProgram(schedule, k).backward_distance(20) for k in range(stages)] == backward


@pytest.mark.parametrize("stages", range(1, 17))
def test_distances_grow_in_the_fill_and_are_capped_in_the_drain(stages: int) -> None:
    last = 4 * stages
    schedule = pipedream(Policy.SPECTRAIN, stages=stages, minibatches=last)

    for k in range(stages):
        delay, ahead = stages - 1 - k, k // 2
        forward, backward = distances(schedule, k, Op.FORWARD), distances(schedule, k, Op.BACKWARD)
        assert forward[:delay] == [j + ahead for j in range(delay)]
        assert backward == [min(ahead, last - j) for j in range(last)]


def test_counts_start_again_after_a_drain() -> None:
    schedule = replace(pipedream(Policy.SPECTRAIN, stages=4, minibatches=20), drain_every=10)

    assert distances(schedule, 0, Op.FORWARD) == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3] * 2
    assert distances(schedule, 3, Op.BACKWARD) == [1] * 20


@pytest.mark.parametrize("target", [Target.LOCAL, Target.DAMPED])
def test_a_local_target_is_the_minibatchs_own_version(target: Target) -> None:
    schedule = replace(pipedream(Policy.SPECTRAIN, stages=4, minibatches=20), target=target)

    for k in range(4):
        assert distances(schedule, k, Op.FORWARD) == [min(j, 3 - k) for j in range(20)]
        assert distances(schedule, k, Op.BACKWARD) == [0] * 20


@pytest.mark.parametrize("every", [1, 3])
def test_evaluations_change_no_pass(every: int) -> None:
    plain = pipedream(Policy.SPECTRAIN, stages=4, minibatches=12)
    evaluating = replace(plain, evaluate_every=every, evaluation_batches=2)

    for stage in range(4):
        without = [a for a in StageProgram(evaluating, stage).actions() if "E" not in a.op.value]
        assert without == list(StageProgram(plain, stage).actions())


def test_passes_of_the_asynchronous_schedule() -> None:
    schedule = pipedream(stages=3, minibatches=4)

    order = {k: "".join(f"{op}{j}" for op, j in passes(schedule, k)) for k in range(3)}

    assert order == {0: "F0F1F2B0F3B1B2B3", 1: "F0F1B0F2B1F3B2B3", 2: "F0B0F1B1F2B2F3B3"}


@pytest.mark.parametrize("policy", Policy)
def test_synchronous_schedules_run_on_the_newest_weights_whatever_the_policy(policy: Policy) -> None:
    schedule = Schedule(name="1f1b", stages=3, minibatches=4, microbatches=5, policy=policy)

    for stage in range(3):
        for action in StageProgram(schedule, stage).actions():
            assert action.distance == 0
            assert action.predictions == ()
            if action.op in (Op.FORWARD, Op.BACKWARD):
                assert action.version == action.minibatch
        assert warm_up_of(schedule, stage) == 0


def test_a_stage_that_drains_releases_versions_nothing_reads_at_once() -> None:
    program = StageProgram(pipedream(stages=4, minibatches=4), 0)

    updates = [action for action in program.actions() if action.op is Op.UPDATE]

    # B1 to B3 read version 0, so versions 1 and 2 go as soon as the next update has read them.
    assert [update.releases for update in updates] == [(), (1,), (2,), (0, 3)]


def test_an_update_predicts_for_the_next_forward_and_the_next_backward() -> None:
    program = StageProgram(pipedream(Policy.SPECTRAIN, stages=4, minibatches=20), 2)

    update = next(a for a in program.actions() if a.op is Op.UPDATE and a.minibatch == 9)

    made = {p.role.value: (p.minibatch, p.version, p.distance) for p in update.predictions}
    assert made == {"forward": (11, 10, 2), "backward": (10, 10, 1)}


def test_a_message_names_the_stage_at_its_other_end() -> None:
    def peer(op: Op) -> int:
        return Action(op, stage=5, minibatch=0).peer

    assert [peer(op) for op in (Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT, Op.SEND_EVALUATION)] == [6, 6, 6]
    assert [peer(op) for op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT, Op.RECEIVE_EVALUATION)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": "zb-h1"}, "unknown schedule 'zb-h1': choose one of pipedream, gpipe, 1f1b"),
        ({"stages": 0}, "needs at least 1 stage, got 0"),
        ({"minibatches": -1}, "no minibatches from 0 to -1"),
        ({"first": 9}, "no minibatches from 9 to 8"),
        ({"microbatches": 0}, "at least 1 microbatch, got 0"),
        ({"microbatches": 2}, "microbatches = 2 needs one of 1f1b, gpipe"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(wrong: dict[str, object], says: str) -> None:
    numbers: dict[str, object] = {"name": "pipedream", "stages": 4, "minibatches": 8}

    with pytest.raises(ConfigError, match=says):
        Schedule(**{**numbers, **wrong})  # type: ignore[arg-type]
