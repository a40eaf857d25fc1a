"""tools/slurm_box.py as a command: what it starts, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, Result, kill_tree, rank_environment, supervise
from tools.slurm_box import Box, comes_true, processes_of, stop

BOX = ROOT / "tools" / "slurm_box.py"
SCRIPT = """#!/bin/bash
trap '' TERM
srun --nodes=2 --ntasks=2 env --ignore-environment bash -c 'trap "" TERM; sleep 600' &
sleep 600
"""


def slurm_box(*words: str) -> Result:
    return supervise([sys.executable, str(BOX), *words], timeout_s=90)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("box")
    yield made
    stop(Box(made))


def sleepers(folder: Path) -> list[str]:
    """Processes that were started in this folder, whatever their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cwd").readlink() == folder:
                found.append((place / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("code", [0, 3])
def test_a_box_for_one_command_ends_with_its_exit_code_and_leaves_nothing_behind(folder: Path, code: int) -> None:
    result = slurm_box("run", "--dir", str(folder), "--", "bash", "-c", f"srun -N2 -n2 hostname; exit {code}")

    assert result.rc == code, result
    assert len(result.stdout.splitlines()) == 2, result
    assert processes_of(Box(folder)) == {}


def test_a_command_that_is_not_there_is_named_in_one_line(folder: Path) -> None:
    result = slurm_box("run", "--dir", str(folder), "--", "no-such-command")

    assert (result.rc, result.stderr) == (2, "Error: no-such-command: No such file or directory\n")
    assert processes_of(Box(folder)) == {}


def test_a_box_whose_command_is_interrupted_by_sigterm_leaves_nothing_behind(folder: Path) -> None:
    words = ["run", "--dir", str(folder), "--", "bash", "-c", "touch begun; exec sleep 600"]
    process = subprocess.Popen([sys.executable, str(BOX), *words], cwd=folder, env=rank_environment())
    try:
        assert comes_true((folder / "begun").exists, 60)
        process.terminate()
        code = process.wait(timeout=30)
    finally:
        kill_tree(process.pid)

    assert code == 143
    assert processes_of(Box(folder)) == {}
    assert sleepers(folder) == []


def test_a_box_stands_beside_others_until_it_is_stopped_with_all_its_jobs(folder: Path) -> None:
    (folder / "job.sh").write_text(SCRIPT)
    started = slurm_box("start", "--dir", str(folder), "--nodes", "3")
    exports = slurm_box("env", "--dir", str(folder)).stdout
    again = slurm_box("start", "--dir", str(folder))
    work = (
        f"cd {folder}; {exports} sinfo --noheader --Node --format=%N; sbatch --nodes=2 job.sh; "
        "until squeue --noheader --steps | grep -q '\\.0 '; do sleep 0.2; done"
    )
    used = supervise(["bash", "-c", work], timeout_s=60)
    slept = sleepers(folder)
    stopped = slurm_box("stop", "--dir", str(folder))

    assert started.rc == 0, started
    assert (again.rc, again.stderr.count("\n")) == (2, 1), again
    assert "stands" in again.stderr
    assert used.stdout.splitlines()[:3] == ["n0", "n1", "n2"], used
    assert any("sleep 600" in words for words in slept), slept
    assert stopped.rc == 0, stopped
    assert processes_of(Box(folder)) == {}
    assert sleepers(folder) == []


def test_a_box_that_does_not_stand_has_no_environment_and_is_stopped_all_the_same(folder: Path) -> None:
    exports = slurm_box("env", "--dir", str(folder))
    stopped = slurm_box("stop", "--dir", str(folder))

    assert (exports.rc, exports.stdout, exports.stderr.count("\n")) == (2, "", 1)
    assert "start one first" in exports.stderr
    assert stopped.rc == 0, stopped
