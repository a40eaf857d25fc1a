"""Tests of the scripts in tools/ as far as they go without installing anything."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=TOOLS.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_summary_tells_accuracy_staleness_and_where_things_are(tmp_path: Path) -> None:
    stages = [{"stage": 0, "layers": ["a", "b"], "staleness": 1}, {"stage": 1, "layers": ["c"], "staleness": 0}]
    summary = {
        "steps": 20,
        "train_seconds": 1.25,
        "policy": "stash",
        "figures": {"train_loss": 0.5, "eval_loss": 0.6, "eval_accuracy": 0.75},
        "ranks": [{"rank": 0, "stages": stages[:1]}, {"rank": 1, "stages": stages[1:]}],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    shown = runpy.run_path(str(TOOLS / "show_summary.py"))["lines"](tmp_path)

    assert "test accuracy: 0.7500" in shown
    assert "  stage 0: 1, stash  (a, b on rank 0)" in shown
    assert "  stage 1: 0, stash  (c on rank 1)" in shown
    assert shown[-2:] == [f"metrics:     {tmp_path}/metrics.jsonl", f"checkpoints: {tmp_path}/checkpoints"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 127", "was not found"),
        ('[[ $1 == --version ]] && echo Python 3.9.2; [[ "$*" != *version_info* ]]', "needs 3.10 or newer"),
        ('[[ "$*" != *ensurepip* ]]', "cannot make virtual environments"),
    ],
    ids=["missing", "old", "without venv"],
)
def test_a_python_that_will_not_do_is_named_in_one_line(tmp_path: Path, script: str, told: str) -> None:
    name = "no-such-python" if told == "was not found" else program(tmp_path / "python", script)

    done = bash("source tools/setup.sh; find_python", PYTHON=name)

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert name in done.stderr


def test_a_system_mpi_that_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    done = bash("source tools/setup.sh; PATH=; choose_mpirun", HPCPIPE_MPI="system")

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no mpirun on the PATH" in done.stderr


def test_open_mpi_is_told_to_run_for_root_and_with_more_ranks_than_cores(tmp_path: Path) -> None:
    program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    script = 'source tools/setup.sh; choose_mpirun; echo "${mpirun_command[@]}" "$OMPI_ALLOW_RUN_AS_ROOT"'

    done = bash(script, HPCPIPE_MPI="system", PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert done.stdout == f"{tmp_path}/mpirun --oversubscribe 1\n"


def test_the_fingerprint_of_an_installation_changes_with_what_it_is_made_of() -> None:
    prints = [
        bash("source tools/setup.sh; python=$(command -v python3) fingerprint", **environment).stdout
        for environment in ({}, {}, {"HPCPIPE_MPI": "system"}, {"HPCPIPE_CUDA": "0"})
    ]

    assert prints[0] == prints[1]
    assert len({*prints}) == 3
    assert all(len(found) == 65 for found in prints)


def test_the_check_of_a_gpu_ends_with_one_line_where_there_is_none(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU on this machine")
    program(tmp_path / "nvidia-smi", "exit 9")

    done = bash("bash tools/gpu_check.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no GPU here" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--after", "3", "--", "true"], "say which with --cut-off HOST"),
        (["run", "--cut-off", "1", "--", "true"], "either --after or --when"),
        (["run", "--cut-off", "1", "--after", "3", "--when", "there", "--", "true"], "either --after or --when"),
        (["run", "--cut-off", "2", "--after", "3", "--", "true"], "a host from 0 to 1"),
        (["cut", "199"], "0 boxes with a host 199 stand"),
        (["mend", "199"], "0 boxes with a host 199 stand"),
    ],
)
def test_a_host_is_cut_off_only_where_it_is_clear_which_and_when(words: list[str], told: str) -> None:
    commands = runpy.run_path(str(TOOLS / "net_box.py"))["main"]

    shown = CliRunner().invoke(commands, words)

    assert shown.exit_code != 0
    assert told in shown.output
