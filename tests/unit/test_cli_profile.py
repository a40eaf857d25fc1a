"""The profile command: what it prints, what it leaves, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import hpcpipe.transport.job
from hpcpipe.cli.profile import lines_of, profile
from hpcpipe.errors import ConfigError, LauncherError, ModelError, PlanError
from hpcpipe.planning.profile import LayerCost, Profile, load_profile, profile_table
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import configured, write_run_file
from tests.unit.measured_nets import net


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpcpipe.transport.job, "run_job", lambda main: main(LoneWorld()))


def run(tmp_path: Path, *arguments: str, **sections: dict[str, Any]) -> Result:
    run_file = write_run_file(configured(tmp_path / "run", **sections))
    return CliRunner().invoke(
        profile, [str(run_file), "-o", str(tmp_path / "p.json"), "--repeats", "1", *arguments]
    )


def test_it_leaves_a_profile_and_shows_it(tmp_path: Path) -> None:
    result = run(tmp_path, **net("build_chain"))
    assert result.exit_code == 0, result.output
    found = load_profile(tmp_path / "p.json")
    rows = [line.split()[0] for line in result.stdout.splitlines()]
    at = rows.index("layer") + 1
    assert rows[at : at + 6] == [*(layer.name for layer in found.layers), "all"]
    assert result.stdout.splitlines()[-1] == f"written to {tmp_path / 'p.json'}"


def test_json_is_the_profile_and_nothing_else(tmp_path: Path) -> None:
    result = run(tmp_path, "--json", **net("build_chain"))
    assert json.loads(result.stdout) == json.loads(json.dumps(profile_table(load_profile(tmp_path / "p.json"))))


def test_values_of_the_run_file_can_be_overridden(tmp_path: Path) -> None:
    run(tmp_path, "--set", "data.batch=5", "--set", "run.dtype=bfloat16", **net("build_chain"))
    found = load_profile(tmp_path / "p.json")
    assert (found.rows, found.about["batch"], found.about["dtype"]) == (5, 5, "bfloat16")


def test_threads_are_those_of_the_run_file(tmp_path: Path) -> None:
    run(tmp_path, **net("build_chain"))
    assert load_profile(tmp_path / "p.json").about["threads"] == 1


def test_progress_goes_where_figures_do_not(tmp_path: Path) -> None:
    result = run(tmp_path, "--json", "--set", "run.progress=lines", **net("build_chain"))
    assert "measuring" in result.stderr
    json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--set", "data.batch=none"], ConfigError, "--set: data.batch: "),
        (["--concurrent"], LauncherError, "--concurrent needs several ranks, there is 1: "),
        (["-o", "nowhere/p.json"], PlanError, "nowhere/p.json: there is no folder "),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, *arguments, **net("build_chain"))
    assert type(result.exception) is kind
    assert str(result.exception).startswith(message)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "p.json").exists()


def test_a_run_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(profile, [str(tmp_path / "none.toml")])
    assert isinstance(result.exception, ConfigError)
    assert "none.toml: no such run file" in str(result.exception)


def test_a_layer_that_fails_is_named_behind_its_run_file(tmp_path: Path) -> None:
    result = run(tmp_path, **net("build_unfit"))
    assert isinstance(result.exception, ModelError)
    assert str(result.exception).startswith(f"{tmp_path / 'run.toml'}: layer '2' failed in its forward pass on ")


def test_repeats_must_be_at_least_one() -> None:
    assert CliRunner().invoke(profile, ["run.toml", "--repeats", "0"]).exit_code == 2


def test_the_table_adds_up_times_and_bytes() -> None:
    layers = [
        LayerCost(
            name=name, forward_s=0.001, backward_s=0.002, update_s=0.0005, output_bytes=1024, parameter_bytes=2048
        )
        for name in ("a" * 40, "b")
    ]
    about = {
        "model": "mlp",
        "dtype": "float32",
        "device": "cpu",
        "device_name": "a CPU",
        "threads": 2,
        "batch": 21,
        "microbatches": 3,
        "sweeps": 5,
        "ranks_measuring": 4,
        "message_s": "measured",
    }
    lines = lines_of(
        Profile(layers=tuple(layers), edges=((0, 1),), rows=7, pass_overhead_s=0.0005, data_s=0.001, about=about)
    )
    assert "4 ranks at the same time" in lines[1]
    assert lines[-3].split()[:5] == ["all", "2.000", "4.000", "4", "KiB"]
    # 21 rows in 3 passes of 8 ms and an update of 1 ms.
    assert lines[-1] == "one rank alone would train 840.0 samples/s"
