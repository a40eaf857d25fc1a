"""Which layers and ranks a run file or a plan file gives each stage, what is refused, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hpcpipe.cli.main import hpcpipe as command_line
from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.assemble import lay_out
from hpcpipe.engine.describe import describe, uneven_rounds
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.planned import plan_named, remarks
from hpcpipe.errors import ConfigError, PlanError
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import inspect_layers
from hpcpipe.planning.plan_file import PlanFile, PlannedStage, save_plan
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.schedule import Place, Schedule
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import assert_same, configured, failure_of, run_alone

NAMES = ("hidden1", "hidden2", "hidden3", "output")
BATCH = 16


def plan_file(*stages: tuple[int, Sequence[int]], names: Sequence[str] = NAMES, **about: Any) -> PlanFile:
    """A plan of stages, each of so many layers on these ranks."""
    layers = [
        LayerCost(name=name, forward_s=1e-3, backward_s=2e-3, output_bytes=64, parameter_bytes=64)
        for name in names
    ]
    rest = iter(names)
    return PlanFile(
        stages=tuple(
            PlannedStage(tuple(next(rest) for _ in range(count)), tuple(ranks)) for count, ranks in stages
        ),
        schedule="pipedream",
        policy="stash",
        microbatches=1,
        profile=Profile(
            layers=tuple(layers),
            edges=tuple((i, i + 1) for i in range(len(names) - 1)),
            rows=BATCH,
            about={"batch": BATCH, "dtype": "float32", **about},
        ),
        topology=Topology(levels=(Level(name="host", size=8, bandwidth=1e9),)),
    )


def laid_out(ranks: int, file: PlanFile | None = None, **pipeline: Any) -> tuple[Plan, Schedule]:
    config = configured(pipeline={"plan": "plan.json" if file else None, **pipeline})
    _, plan, schedule = lay_out(config, build_dataset(config.data, config.run.seed), ranks, file)
    return plan, schedule


def fingerprint_of(config: RunConfig) -> str:
    data = build_dataset(config.data, config.run.seed)
    return inspect_layers(
        build_layers(config.model, config.run.seed, data.describe()), config.run.seed
    ).fingerprint


# -- replicas of the run file --


def test_replicas_decide_stages_and_contiguous_ranks() -> None:
    plan, schedule = laid_out(4, replicas=(3, 1))

    assert plan.ranks_of_stage == ((0, 1, 2), (3,))
    assert (plan.stages, plan.ranks, plan.replicas) == (2, 4, (3, 1))
    assert [plan.places_of(rank) for rank in range(4)] == [
        (Place(0, 0),),
        (Place(0, 1),),
        (Place(0, 2),),
        (Place(1),),
    ]
    assert schedule.replica_counts == (3, 1)
    assert plan.recording_rank == 3


def test_metrics_are_written_by_the_first_replica_of_the_last_stage() -> None:
    plan, _ = laid_out(3, replicas=(1, 2))

    assert plan.recording_rank == 1


def test_several_stages_may_share_a_rank_where_none_is_replicated() -> None:
    plan, schedule = laid_out(2, stages=3)

    assert plan.places_of(0) == (Place(0), Place(1))
    assert not schedule.replicated


@pytest.mark.parametrize("ranks", [3, 5])
def test_replicas_need_a_rank_each(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"makes 4 ranks, but {ranks} were started: start 4"):
        laid_out(ranks, replicas=(3, 1))


def test_more_ranks_than_stages_are_told_of_replicas() -> None:
    with pytest.raises(ConfigError, match=r"start at most 2, .* or replicate stages with pipeline.replicas"):
        laid_out(3, stages=2)


# -- plan files --


def test_a_plan_file_decides_layers_and_ranks_of_every_stage_in_whatever_order() -> None:
    plan, schedule = laid_out(4, plan_file((1, (3, 0)), (3, (2, 1))))

    assert plan.bounds == ((0, 1), (1, 4))
    assert plan.ranks_of_stage == ((3, 0), (2, 1))
    assert [plan.places_of(rank) for rank in range(4)] == [
        (Place(0, 1),),
        (Place(1, 1),),
        (Place(1, 0),),
        (Place(0, 0),),
    ]
    assert schedule.replicas == (2, 2)


def test_a_plan_for_another_number_of_ranks_says_how_many_to_start() -> None:
    with pytest.raises(PlanError, match=r"^plan.json: is for 3 ranks, but 2 were started: start 3"):
        laid_out(2, plan_file((2, (0, 1)), (2, (2,))))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("hidden1", "hidden2", "other", "output"), "as layer 2 the plan has 'other', the model has 'hidden3'"),
        (NAMES[:3], "as layer 3 the plan has no such layer, the model has 'output'"),
        ((*NAMES, "more"), "as layer 4 the plan has 'more', the model has no such layer"),
    ],
)
def test_a_plan_of_other_layers_names_the_first_that_differs(names: Sequence[str], words: str) -> None:
    file = plan_file((1, (0,)), (len(names) - 1, (1,)), names=names)

    with pytest.raises(PlanError, match=f"^plan.json: is for another model: {words}"):
        laid_out(2, file)


def test_a_plan_of_layers_of_other_shapes_is_refused() -> None:
    right = fingerprint_of(configured())
    plan, _ = laid_out(1, plan_file((4, (0,)), fingerprint=right))
    assert plan.fingerprint == right

    with pytest.raises(PlanError, match="layers of these names, but of other shapes"):
        laid_out(1, plan_file((4, (0,)), fingerprint="another"))


def test_a_run_by_a_plan_file_is_the_run_that_the_plan_describes(tmp_path: Path) -> None:
    save_plan(plan_file((4, (0,))), tmp_path / "plan.json")
    sections = {"run": {"max_steps": 5}}
    by_plan = configured(tmp_path / "by-plan", **sections, pipeline={"plan": str(tmp_path / "plan.json")})

    assert_same(run_alone(by_plan), run_alone(configured(tmp_path / "plain", **sections)))


def test_a_run_with_a_plan_that_does_not_fit_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_file((2, (0,)), (2, (1,))), path)

    message = failure_of(configured(tmp_path / "run", pipeline={"plan": str(path)}), PlanError)

    assert "is for 2 ranks, but 1 were started: start 2" in message
    assert "\n" not in message


@pytest.mark.parametrize(("content", "words"), [(None, "no such plan"), ("{", "is no valid JSON")])
def test_a_plan_that_cannot_be_read_ends_in_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)

    message = failure_of(configured(tmp_path / "run", pipeline={"plan": str(path)}), PlanError)

    assert message.startswith(f"{path}: ")
    assert words in message


def test_every_rank_gets_the_plan_that_rank_0_has_read(tmp_path: Path) -> None:
    file = plan_file((1, (1,)), (3, (0,)))
    save_plan(file, tmp_path / "plan.json")

    assert plan_named(str(tmp_path / "plan.json"), LoneWorld()) == file


def test_the_option_of_the_command_names_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("hpcpipe.transport.job.run_job", lambda main, leaving: main(None))
    monkeypatch.setattr("hpcpipe.engine.train.train", lambda world, options, signals: given.append(options) or 0)
    monkeypatch.setattr("hpcpipe.engine.signals.StopSignals.listen", lambda self, names: None)

    done = CliRunner().invoke(command_line, ["train", "run.toml", "--plan", "my plan.json"])

    assert done.exit_code == 0
    assert given[0].overrides == ("pipeline.plan='my plan.json'",)


# -- what is said --


def test_a_plan_made_for_another_batch_or_type_is_remarked_upon() -> None:
    file = plan_file((4, (0,)), batch=64, dtype="bfloat16")
    config = configured(pipeline={"plan": "plan.json"}, data={"batch": 256})

    (line,) = remarks(file, config, torch.device("cpu"))

    assert line.startswith(
        "plan.json: was made for batch 64, dtype bfloat16, but this run has batch 256, dtype float32"
    )


def test_a_plan_made_for_another_schedule_is_remarked_upon() -> None:
    flushing = replace(plan_file((4, (0,))), schedule="1f1b", microbatches=4)
    config = configured(pipeline={"plan": "plan.json", "policy": "stash"})

    (line,) = remarks(flushing, config, torch.device("cpu"))

    assert "made for schedule 1f1b, microbatches 4, but this run has schedule pipedream, microbatches 1" in line
    assert "policy" not in line


def test_a_plan_made_for_this_run_is_not_remarked_upon() -> None:
    config = configured(pipeline={"plan": "plan.json", "policy": "stash"})

    assert remarks(plan_file((4, (0,)), device="cpu", optimizer="sgd"), config, torch.device("cpu")) == []


def test_the_table_of_a_replicated_plan_shows_replicas_and_ranks() -> None:
    lines = describe(*laid_out(4, plan_file((1, (3, 0)), (3, (1, 2)))))

    assert [line.split()[:3] for line in lines] == [
        ["stage", "replicas", "ranks"],
        ["0", "2", "3,0"],
        ["1", "2", "1-2"],
    ]


@pytest.mark.parametrize(
    ("replicas", "in_flight", "staleness"),
    # (R - 1 - ranks before) // replicas forwards of warm-up, each of another update.
    [((1, 1, 1), [3, 2, 1], [2, 1, 0]), ((2, 1), [2, 1], [1, 0]), ((1, 2, 1), [4, 2, 1], [3, 1, 0])],
)
def test_the_table_shows_minibatches_in_flight_and_staleness_in_updates(
    replicas: tuple[int, ...], in_flight: list[int], staleness: list[int]
) -> None:
    plan, schedule = laid_out(sum(replicas), replicas=replicas, policy="stash")
    rows = [line.split()[-3:] for line in describe(plan, schedule)[1:]]

    assert [int(row[0]) for row in rows] == in_flight
    assert [int(row[1]) for row in rows] == staleness
    assert {row[2] for row in rows} == {"-"}


def test_the_table_of_a_plan_without_replicas_has_a_rank_for_each_stage() -> None:
    lines = describe(*laid_out(4, policy="spectrain"))

    assert lines[0].split()[:3] == ["stage", "rank", "layers"]
    assert [line.split()[:2] for line in lines[1:]] == [["0", "0"], ["1", "1"], ["2", "2"], ["3", "3"]]
    assert [line[-10:] for line in lines[1:]] == ["3, 0 ahead", "2, 0 ahead", "2, 1 ahead", "1, 1 ahead"]


def test_a_short_last_round_is_said_and_drops_nothing() -> None:
    schedule = Schedule(name="pipedream", stages=3, minibatches=10009, replicas=(1, 2, 3))

    assert list(uneven_rounds(schedule)) == [
        f"stage {stage}: 10009 minibatches are no multiple of its {replicas} replicas: none is dropped, "
        "the last update averages 1"
        for stage, replicas in ((1, 2), (2, 3))
    ]


def test_short_rounds_before_drains_are_said() -> None:
    schedule = Schedule(name="pipedream", stages=1, minibatches=20, drain_every=8, replicas=(3,))

    assert [line.split(":")[1].strip() for line in uneven_rounds(schedule)] == [
        "4 minibatches from one drain to the next are no multiple of its 3 replicas",
        "8 minibatches from one drain to the next are no multiple of its 3 replicas",
    ]


def test_even_rounds_are_not_spoken_of() -> None:
    assert list(uneven_rounds(Schedule(name="pipedream", stages=2, minibatches=12, replicas=(3, 2)))) == []
    assert (
        list(uneven_rounds(Schedule(name="1f1b", stages=2, minibatches=7, microbatches=6, replicas=(3, 2)))) == []
    )


def test_replicas_without_a_microbatch_of_their_own_are_said() -> None:
    schedule = Schedule(name="gpipe", stages=2, minibatches=7, microbatches=2, replicas=(3, 1))

    (line,) = uneven_rounds(schedule)

    assert line.startswith(
        "stage 0: a minibatch has 2 microbatches for 3 replicas, so 1 of them has nothing to compute"
    )


def test_the_start_of_a_run_with_a_plan_says_what_it_was_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(plan_file((4, (0,)), batch=99), tmp_path / "plan.json")
    run = {"max_steps": 2, "progress": "lines"}

    run_alone(configured(tmp_path / "run", run=run, pipeline={"plan": str(tmp_path / "plan.json")}))

    assert "was made for batch 99, but this run has batch 16" in capsys.readouterr().err
