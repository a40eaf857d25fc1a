"""Plan files: what is written is read again, and a plan that no run could follow is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.plan_file import PlanFile, PlannedStage, load_plan, parse_plan, plan_table, save_plan
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, Topology

LAYERS = tuple(
    LayerCost(name=name, forward_s=1e-3, backward_s=2e-3, output_bytes=64, parameter_bytes=128)
    for name in ("first", "left", "right", "last")
)
PROFILE = Profile(layers=LAYERS, edges=((0, 1), (0, 2), (1, 3), (2, 3)), rows=32)
TOPOLOGY = Topology(
    levels=(Level(name="node", size=2, bandwidth=1e10, latency_s=1e-6), Level(name="net", size=4, bandwidth=1e9))
)
STAGES = (PlannedStage(("first", "right"), (0, 1)), PlannedStage(("left", "last"), (2,)))
PLAN = PlanFile(
    stages=STAGES,
    schedule="pipedream",
    policy="spectrain",
    microbatches=1,
    profile=PROFILE,
    topology=TOPOLOGY,
    predicted={"samples_per_s": 12.5},
    about={"options": {"ranks": 3}},
)


def refusal(**changes: Any) -> str:
    with pytest.raises(PlanError) as caught:
        replace(PLAN, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stages(*pairs: tuple[str, Any]) -> tuple[PlannedStage, ...]:
    return tuple(PlannedStage(tuple(layers.split()), ranks) for layers, ranks in pairs)


def test_a_plan_is_read_as_it_was_written_with_all_that_it_rests_on(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    save_plan(PLAN, path)

    assert load_plan(path) == PLAN
    assert load_plan(path).profile == PROFILE
    assert load_plan(path).topology == TOPOLOGY


def test_a_plan_goes_through_json_between_ranks() -> None:
    assert parse_plan(json.loads(json.dumps(plan_table(PLAN))), source="rank 0") == PLAN


def test_replicas_are_the_ranks_of_each_stage() -> None:
    assert (PLAN.replicas, PLAN.ranks) == ((2, 1), 3)


def test_ranks_may_be_dealt_in_any_order() -> None:
    assert replace(PLAN, stages=stages(("first right", (2, 0)), ("left last", (1,)))).replicas == (2, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (stages(), "stages: must hold at least one stage, got none"),
        (stages(("first left right last", ())), "stages[0].ranks: must hold at least one rank, got none"),
        (stages(("", (0,)), ("first left right last", (1,))), "stages[0].layers: must hold at least one layer"),
        (
            stages(("first lost", (0,)), ("left right", (1,))),
            'stages[0].layers: "lost" is no layer of the profile',
        ),
        (stages(("first right", (0,)), ("left", (1,))), 'stages: "last", a layer of the profile, is in none'),
        (stages(("first left", (0,)), ("left last", (1,))), 'stages[1].layers: "left" is in stages[0] already'),
        (stages(("right first left last", (0,))), 'stages[0].layers: "first" stands behind a layer that it'),
        (
            stages(("first last", (0,)), ("left right", (1,))),
            'stages[0].layers: "last" reads from "left", which is in the later stages[1]',
        ),
    ],
)
def test_each_layer_is_in_one_stage_and_reads_from_no_later_one(changed: Any, says: str) -> None:
    assert refusal(stages=changed).startswith(says)


def test_a_layer_that_is_nearly_one_of_the_profile_is_guessed() -> None:
    assert refusal(stages=stages(("frist", (0,)))).endswith('did you mean "first"?')


@pytest.mark.parametrize("ranks", [((0, 1), (1,)), ((0,), (2,)), ((-1,), (0,)), ((0.0,), (1,)), ((True,), (0,))])
def test_each_rank_has_one_place(ranks: Any) -> None:
    said = refusal(stages=stages(("first right", ranks[0]), ("left last", ranks[1])))

    assert "ranks: must be ranks, each of 0 to" in said


def test_the_topology_joins_all_ranks() -> None:
    said = refusal(stages=stages(("first right", (0, 1, 2)), ("left last", (3, 4))))

    assert said.startswith("the topology joins 4 ranks")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "schedule",
            "1f1",
            'schedule: must be one of "pipedream", "gpipe", "1f1b", got "1f1"; did you mean "1f1b"?',
        ),
        ("schedule", 3, "schedule: must be one of "),
        ("policy", "stashed", 'policy: must be one of "stash", '),
        ("microbatches", 0, "microbatches: must be a whole number of parts, 1 to "),
        ("microbatches", 2, 'microbatches: must be 1 for "pipedream", got 2'),
    ],
)
def test_the_way_it_is_run_is_checked(key: str, value: Any, says: str) -> None:
    assert refusal(**{key: value}).startswith(says)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"profile": None}, "profile: must be an object, got null"),
        ({"profile": {}}, "profile: layers: missing"),
        ({"topology": {"levels": []}}, "topology: levels: must hold at least one level"),
        ({"stages": [{"layers": ["first"]}]}, "stages[0].ranks: missing"),
        ({"stages": [{"layers": "first", "ranks": [0]}]}, 'stages[0].layers: must be a list, got "first"'),
        ({"stages": [{"layers": [3], "ranks": [0]}]}, "stages[0].layers: must be a string of one line"),
        ({"stages": [{"layers": [["a"]], "ranks": [0]}]}, "stages[0].layers: must be a string of one line"),
        ({"stages": [{"layers": ["first"], "ranks": [[0]]}]}, 'stages: "left", a layer of the profile'),
        ({"policy": []}, "policy: must be one of "),
        ({"predicted": 3}, "predicted: must be an object, got 3"),
        ({"stage": []}, 'stage: no such key; did you mean "stages"?'),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "hpcpipe-plan", "version": 1, **plan_table(PLAN), **keys}))

    with pytest.raises(PlanError) as caught:
        load_plan(path)

    assert "\n" not in str(caught.value)
    assert str(caught.value).removeprefix(f"{path}: ").startswith(says)


def test_a_profile_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "hpcpipe-profile", "version": 1}')

    with pytest.raises(PlanError, match='must have the format "hpcpipe-plan", got "hpcpipe-profile"'):
        load_plan(path)
