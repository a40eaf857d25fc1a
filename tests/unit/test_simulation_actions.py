"""Simulator and engine read the same lists: whatever a schedule says, both know how to do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest

from hpcpipe.config.sections import PipelineConfig
from hpcpipe.engine import loop
from hpcpipe.schedule import Action, Op, Place, Policy, Schedule, rank_actions
from hpcpipe.schedule.dryrun import ScheduleError
from hpcpipe.schedule.orders import ORDERS, SYNCHRONOUS
from hpcpipe.simulation import machine
from tests.unit.schedule_cases import pipedream
from tests.unit.simulation_cases import EVERYTHING, run


def schedule_named(name: str) -> Schedule:
    """A schedule with everything that one can have: replicas, predictions, evaluations, drains."""
    return Schedule(
        name=name,
        stages=3,
        minibatches=24,
        microbatches=4 if name in SYNCHRONOUS else 1,
        policy=Policy.SPECTRAIN,
        evaluate_every=6,
        evaluation_batches=3,
        drain_every=12,
        replicas=(2, 1, 2),
    )


@pytest.mark.parametrize("name", list(ORDERS))
def test_every_schedule_can_be_simulated_to_its_last_action(name: str) -> None:
    schedule = schedule_named(name)

    found = run(schedule, window=EVERYTHING)

    done = Counter(event.rank for event in found.events)
    assert done == {
        rank: sum(1 for _ in rank_actions(schedule, [place])) for rank, place in enumerate(schedule.places)
    }


def test_the_schedules_together_have_every_kind_of_action() -> None:
    seen = {
        action.op
        for name in ORDERS
        for place in schedule_named(name).places
        for action in rank_actions(schedule_named(name), [place])
    }

    assert seen == set(Op)


def test_the_engine_knows_every_kind_of_action() -> None:
    engine = loop.Engine(
        schedule=schedule_named("pipedream"),
        runners={},
        steering=None,  # type: ignore[arg-type]
        checkpoints=loop.NoCheckpoints(),
        record=loop.NoRecord(),
        activity=None,  # type: ignore[arg-type]
        progress=lambda: None,
        clip_norm=None,
        norm_squared=lambda squared: squared,
        stop_on_nonfinite=True,
    )

    assert set(engine._do) == set(Op)


def test_a_run_file_can_name_the_schedules_that_can_be_simulated() -> None:
    known = PipelineConfig.model_fields["schedule"].annotation

    assert set(get_args(known)) == set(ORDERS)


def test_an_action_that_waits_for_ever_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that the verifier would refuse: stage 0 does not send."""

    def without_sends(schedule: Schedule, places: Sequence[Place]) -> Iterator[Action]:
        return (action for action in rank_actions(schedule, places) if action.op is not Op.SEND_ACTIVATION)

    monkeypatch.setattr(machine, "rank_actions", without_sends)

    with pytest.raises(ScheduleError, match=r"<B\(0\) at stage 0: deadlock"):
        run(pipedream(stages=2))
