"""`hpcpipe simulate`: from a plan file to figures, a timeline and a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcpipe.cli.simulate import simulate
from hpcpipe.errors import PlanError
from hpcpipe.planning.plan_file import save_plan
from tests.unit.test_simulation_predict import PLAN


@pytest.fixture
def plan(tmp_path: Path) -> str:
    save_plan(PLAN, tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def called(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments))


def figures(*arguments: str) -> dict[str, Any]:
    result = called(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_it_prints_throughput_bubble_and_a_row_per_stage(plan: str) -> None:
    result = called(plan)

    head, numbers, table = result.output.split("\n\n")
    assert head == "pipedream (stash), 2 stages on 2 ranks, 200 minibatches of 32 samples"
    labels = [line.split()[0] for line in numbers.splitlines()]
    assert labels == ["throughput", "bubble", "slowest", "whole"]
    assert "samples/s" in numbers
    assert table.splitlines()[0].split() == ["stage", "ranks", "layers", "busy", "peak", "memory"]
    assert len(table.splitlines()) == 3


def test_json_has_every_figure(plan: str) -> None:
    found = figures(plan, "--minibatches", "100")

    assert found["minibatches"] == 100
    assert found["samples_per_s"] == pytest.approx(32 * found["minibatches_per_s"])
    assert found["steady"] == [25, 88]
    assert len(found["busy"]) == len(found["peak_bytes"]) == 2
    assert set(found["level_bytes"]) == {"node", "net"}
    assert found["slowest"]["name"] == "rank 0 (stage 0)"


def test_what_if_says_both_rates(plan: str) -> None:
    found = figures(plan, "--what-if", "compute=2x")

    assert found["what_if"]["compute"] == 2.0
    assert found["samples_per_s"] == pytest.approx(2 * found["samples_per_s_without_what_if"])
    shown = called(plan, "--what-if", "compute=2x").output
    assert "what if: compute 2x" in shown
    assert "on the machine of the plan" in shown


def test_another_schedule_policy_and_number_of_microbatches_can_be_asked_for(plan: str) -> None:
    assert "1f1b (8 microbatches)" in called(plan, "--schedule", "1f1b", "--microbatches", "8").output
    assert "pipedream (spectrain)" in called(plan, "--policy", "spectrain").output


def test_asynchronous_schedules_drop_the_microbatches_of_a_synchronous_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(replace(PLAN, schedule="gpipe", microbatches=4), path)

    assert figures(str(path), "--schedule", "pipedream")["microbatches"] == 1


def test_throughput_counts_minibatches_where_nobody_knows_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(replace(PLAN, profile=replace(PLAN.profile, about={"unit": "minibatches"})), path)

    assert "minibatches/s" in called(str(path)).output


def test_a_profile_without_times_has_no_rate(tmp_path: Path) -> None:
    idle = replace(PLAN.profile, pass_overhead_s=0.0, data_s=0.0, message_s=0.0)
    layers = tuple(
        replace(layer, forward_s=0.0, backward_s=0.0, update_s=0.0, output_bytes=0) for layer in idle.layers
    )
    path = tmp_path / "plan.json"
    save_plan(replace(PLAN, profile=replace(idle, layers=layers)), path)

    assert figures(str(path))["samples_per_s"] is None
    assert "throughput   inf samples/s" in called(str(path)).output


def test_timeline_and_trace_are_written(plan: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "timeline.png", tmp_path / "trace.json"

    result = called(plan, "--timeline", str(picture), "--trace", str(trace), "--window", "4:6")

    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    # Two minibatches are in flight, and two around the window.
    assert {"F4", "B5", "F2", "F7"} <= names
    assert not {"F1", "F8"} & names


@pytest.mark.parametrize("window", ["5:2", "5:5", "a:b", "-3", "1:2:3", ":", ""])
def test_a_wrong_window_is_one_line(plan: str, window: str) -> None:
    result = called(plan, "--window", window)

    assert isinstance(result.exception, PlanError)
    assert "must be two numbers of minibatches" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--microbatches", "4"], 'microbatches: must be 1 for "pipedream"'),
        (["--what-if", "bandwith=2x"], 'did you mean "bandwidth"'),
        (["--bucket", "many"], "is no size"),
    ],
)
def test_other_mistakes_are_one_line_too(plan: str, arguments: list[str], said: str) -> None:
    result = called(plan, *arguments)

    assert isinstance(result.exception, PlanError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_missing_plan_is_one_line(tmp_path: Path) -> None:
    result = called(str(tmp_path / "none.json"))

    assert "no such plan" in str(result.exception)


def test_a_login_node_needs_neither_torch_nor_mpi_nor_matplotlib(plan: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['hpcpipe', 'simulate', {plan!r}, '--minibatches', '4']\n"
        "from hpcpipe.cli.main import hpcpipe\n"
        "hpcpipe(standalone_mode=False)\n"
        "print({'torch', 'mpi4py', 'matplotlib', 'pydantic'} & set(sys.modules))\n"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.splitlines()[-1] == "set()"
