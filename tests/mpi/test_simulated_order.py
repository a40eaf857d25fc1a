"""What is simulated happens: real ranks go through the same actions, in the same order, also between ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

import pytest

from hpcpipe.schedule import Policy, Schedule
from hpcpipe.simulation.trace import trace_events
from tests.mpi.pipeline_runs import train_all
from tests.oracle.cases import ROWS, case
from tests.oracle.runs import configured
from tests.unit.simulation_cases import EVERYTHING, run, unit

STEPS = 9
SECONDS = 0.03
SLOW = {"model": {"name": "tests.oracle.nets:build_slow", "seconds": SECONDS}, "data": ROWS}


class Case(NamedTuple):
    pipeline: dict[str, Any]
    schedule: Schedule


CASES = {
    "stash": Case({"policy": "stash"}, Schedule(name="pipedream", stages=4, minibatches=STEPS)),
    "spectrain": Case(
        {"policy": "spectrain"},
        Schedule(name="pipedream", stages=4, minibatches=STEPS, policy=Policy.SPECTRAIN),
    ),
    "1f1b": Case(
        {"schedule": "1f1b", "microbatches": 4},
        Schedule(name="1f1b", stages=4, minibatches=STEPS, microbatches=4),
    ),
    "gpipe": Case(
        {"schedule": "gpipe", "microbatches": 3},
        Schedule(name="gpipe", stages=4, minibatches=STEPS, microbatches=3),
    ),
    "replicas": Case(
        {"policy": "stash", "replicas": (2, 1, 1), "balance": (2, 1, 1)},
        Schedule(name="pipedream", stages=3, minibatches=STEPS, replicas=(2, 1, 1)),
    ),
    "replicas at the loss": Case(
        {"policy": "stash", "replicas": (1, 3), "balance": (2, 2)},
        Schedule(name="pipedream", stages=2, minibatches=STEPS, replicas=(1, 3)),
    ),
}


Event = dict[str, Any]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Event]]:
    """The events of real runs on four ranks, by case."""
    folder = tmp_path_factory.mktemp("traced")
    configs = {
        name: configured(folder / name, **case("stash", None, SLOW, {"run": {"trace": True}}, steps=STEPS))
        for name in CASES
    }
    for name, config in configs.items():
        pipeline = type(config.pipeline).model_validate(CASES[name].pipeline)
        configs[name] = config.model_copy(update={"pipeline": pipeline})
    # The first run of a process pays for what torch loads at the first backward pass.
    first = configured(folder / "first", **case("stash", None, SLOW, steps=STEPS))
    train_all({"first": first, **configs}, 4, folder)
    return {name: json.loads((folder / name / "trace.json").read_text())["traceEvents"] for name in configs}


@pytest.fixture(scope="module")
def simulated() -> dict[str, list[Event]]:
    """The events of the same runs in a simulation in which a layer takes the time that it takes there."""
    found = {}
    for name, one in CASES.items():
        layers = [
            4 // one.schedule.stages + (stage < 4 % one.schedule.stages) for stage in range(one.schedule.stages)
        ]
        costs = [unit(forward_s=SECONDS * count, backward_s=SECONDS * count) for count in layers]
        result = run(one.schedule, costs, window=EVERYTHING)
        found[name] = [event for event in trace_events(result) if event["ph"] == "X" and event["pid"] < 4]
    return found


def by_rank(events: list[Event]) -> dict[int, list[str]]:
    found = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], event["ts"] + event["dur"])):
        found[event["pid"]].append((event["tid"], event["name"]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_rank_does_what_is_simulated_in_that_order(
    name: str, traced: dict[str, list[Event]], simulated: dict[str, list[Event]]
) -> None:
    assert by_rank(traced[name]).keys() == {0, 1, 2, 3}
    assert by_rank(traced[name]) == by_rank(simulated[name])


@pytest.mark.parametrize("name", CASES)
def test_passes_on_different_ranks_follow_each_other_as_simulated(
    name: str, traced: dict[str, list[Event]], simulated: dict[str, list[Event]]
) -> None:
    """Wherever one pass ends well before another starts in the simulation, it does on real ranks."""
    real = {(e["pid"], e["name"]): e for e in traced[name] if e["name"][0] in "FB" and ">" not in e["name"]}
    passes = [e for e in simulated[name] if e["name"][0] in "FB" and ">" not in e["name"]]
    assert len(passes) == len(real)

    wrong = []
    for first in passes:
        for second in passes:
            if first["ts"] + first["dur"] <= second["ts"] - 0.9e6 * SECONDS:
                before, behind = (real[e["pid"], e["name"]] for e in (first, second))
                if before["ts"] >= behind["ts"]:
                    wrong.append((first["pid"], first["name"], second["pid"], second["name"]))
    assert wrong == []
