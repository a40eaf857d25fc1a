"""plan = "auto": profiled, planned and trained in one job, and resumed by the plan that the run began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpipe.planning.plan_file import load_plan
from tests.crash.killing import digest_of, run_file_of, train
from tests.mpi.launch import Result

AUTO = ("--set", "pipeline.plan=auto")
SHORT = ("--set", "run.max_steps=24")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """Run file, folder and messages of a run on three ranks."""
    folder = tmp_path_factory.mktemp("auto")
    run_file = run_file_of(folder, "spectrain")
    result = train(run_file, folder / "run", *AUTO, *SHORT, ranks=3)
    assert result.rc == 0, result
    return run_file, folder / "run", result


def test_the_plan_is_kept_beside_the_checkpoints_and_is_what_was_trained(
    planned: tuple[Path, Path, Result],
) -> None:
    _, out, _ = planned
    plan = load_plan(out / "plan.json")

    ranks = json.loads((out / "summary.json").read_text())["ranks"]
    trained = {
        (stage["stage"], stage["replica"]): (tuple(stage["layers"]), entry["rank"])
        for entry in ranks
        for stage in entry["stages"]
    }

    assert plan.ranks == 3
    assert trained == {
        (index, replica): (stage.layers, rank)
        for index, stage in enumerate(plan.stages)
        for replica, rank in enumerate(stage.ranks)
    }


def test_the_run_says_what_it_predicts_and_what_the_plan_was_chosen_over(
    planned: tuple[Path, Path, Result],
) -> None:
    text = planned[2].stderr

    assert "measuring the model on 3 ranks" in text
    assert "predicted" in text
    assert "data parallel" in text


def test_a_resumed_run_keeps_its_plan_and_goes_on_to_the_bit(planned: tuple[Path, Path, Result]) -> None:
    run_file, out, _ = planned
    plan = (out / "plan.json").read_bytes()
    longer = ("--set", "run.max_steps=48", "--set", "lr_schedule.total=225")
    whole = train(run_file, out.parent / "whole", "--plan", str(out / "plan.json"), *longer, ranks=3)
    first = train(
        run_file,
        out.parent / "parts",
        "--plan",
        str(out / "plan.json"),
        *longer,
        "--set",
        "run.max_steps=24",
        ranks=3,
    )
    (out.parent / "parts" / "plan.json").write_bytes(plan)

    resumed = train(run_file, out.parent / "parts", *AUTO, *longer, "--resume", "auto", ranks=3)

    assert (whole.rc, first.rc, resumed.rc) == (0, 0, 0), resumed
    assert "made when this run began" in resumed.stderr
    assert (out.parent / "parts" / "plan.json").read_bytes() == plan
    assert digest_of(out.parent / "parts") == digest_of(out.parent / "whole")


def test_another_number_of_ranks_is_planned_anew(planned: tuple[Path, Path, Result]) -> None:
    run_file, out, _ = planned

    resumed = train(run_file, out, *AUTO, "--set", "run.max_steps=30", "--resume", "auto", ranks=2)

    assert resumed.rc == 0, resumed
    assert "planning anew" in resumed.stderr
    assert load_plan(out / "plan.json").ranks == 2


def test_a_memory_limit_that_nothing_fits_into_is_one_line(planned: tuple[Path, Path, Result]) -> None:
    run_file, out, _ = planned
    little = ("--set", "pipeline.memory_limit=1kB")

    refused = train(run_file, out.parent / "little", *AUTO, *little, ranks=2)

    assert refused.rc == 2, refused
    lines = [line for line in refused.stderr.splitlines() if "hpcpipe:" in line and "measuring" not in line]
    assert len(lines) == 1, refused
    assert "stage" in lines[0]


def test_a_folder_with_checkpoints_is_refused_before_anything_is_measured(
    planned: tuple[Path, Path, Result],
) -> None:
    run_file, out, _ = planned
    before = (out / "plan.json").read_bytes()

    refused = train(run_file, out, *AUTO, *SHORT, ranks=2)

    assert refused.rc == 2, refused
    assert "measuring" not in refused.stderr
    assert (out / "plan.json").read_bytes() == before
