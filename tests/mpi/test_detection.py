"""Whatever happens to a rank, the job ends in time, and its messages name that rank and no bystander."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.launch import PROGRAMS, ROOT, Result, run, supervise
from tools.torture_parts.jobs import HPCPIPE, Job
from tools.torture_parts.runs import steps_of, write_run_file

pytestmark = pytest.mark.alone

RANKS = 3
FOUND_WITHIN_S = 10.0
ABORT_S = 6.0
"""A rank's first passes can take seconds on a busy machine, and must not be taken for a stall."""
ALLOWANCE_S = 5.0
TIME_LIMIT_S = 120.0

TROUBLED = """
[run]
max_steps = 6
stall_warning_s = 2
stall_abort_s = {abort_s}
[model]
name = "troubled_model:build"
kind = "{kind}"
seconds = {seconds}
[data]
name = "digits"
batch = 32
[pipeline]
balance = [1, 1, 1]
[optimizer]
lr = 0.05
"""


def lone(folder: Path) -> str:
    """A Python that the launcher does not see die: a shell stays in its place."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nsleep {TIME_LIMIT_S:.0f}\n')
    path.chmod(0o755)
    return str(path)


def train_troubled(folder: Path, kind: str, *, seconds: float = 0.0, abort_s: float = 600.0) -> Result:
    """Train the troubled model on three ranks: the trouble is rank 1's."""
    path = folder / "run.toml"
    path.write_text(TROUBLED.format(kind=kind, seconds=seconds, abort_s=abort_s))
    where = os.pathsep.join([str(ROOT), str(PROGRAMS)])
    words = ["train", str(path), "--out", str(folder / "out")]
    return run(HPCPIPE, RANKS, *words, timeout_s=TIME_LIMIT_S, environment={"PYTHONPATH": where})


def strike(folder: Path, rank: int, number: int, *, python: str = sys.executable) -> tuple[int, float, str]:
    """Send a signal to a rank of a run in the middle; the exit code, the seconds to the end, and what was said."""
    file = write_run_file(folder, policy="stash", optimizer="sgd", epochs=10**4, every=0)
    out = folder / "out"
    limits = [f"--set=run.stall_abort_s={ABORT_S}", f"--set=run.stall_warning_s={ABORT_S / 2}"]
    if number == signal.SIGKILL:
        limits = []
    words = ["train", str(file), "--out", str(out), *limits]
    with Job(RANKS, *words, log=folder / "log", python=python) as job:
        assert job.until(lambda: steps_of(out) > 3, limit_s=TIME_LIMIT_S), job.said()
        os.kill(job.ranks()[rank], number)
        since = time.monotonic()
        code = job.end(limit_s=TIME_LIMIT_S)
        return code, time.monotonic() - since, job.said()


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("hpcpipe: ", "[rank "))]


def blamed(text: str) -> set[int]:
    """The ranks at the ends of the chains of waits in all messages."""
    return {
        int(rank) for rank in re.findall(r"rank (\d+) \(stage \d+\) on host \S+ (?:is gone|does not|works)", text)
    }


def test_a_rank_killed_behind_the_launchers_back_is_found_within_ten_seconds(tmp_path: Path) -> None:
    rank = 1

    code, seconds, said = strike(tmp_path, rank, signal.SIGKILL, python=lone(tmp_path))

    assert code != 0
    assert seconds < FOUND_WITHIN_S
    last = ours(said)[-1]
    assert f"rank {rank} (stage {rank}) on host" in last, said
    assert last.endswith("is gone: its process has ended")
    assert " waited for " in last
    assert said.count("Traceback") == 1


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_frozen_rank_ends_the_job_within_the_limit_and_is_named(tmp_path: Path, rank: int) -> None:
    code, seconds, said = strike(tmp_path, rank, signal.SIGSTOP)

    assert code != 0
    assert seconds < ABORT_S + ALLOWANCE_S
    assert blamed(said) == {rank}, said
    assert "does not answer for" in ours(said)[-1]
    assert said.count("Traceback") == 1


def test_an_exception_in_a_users_layer_ends_the_job_within_ten_seconds_and_nobody_is_called_lost(
    tmp_path: Path,
) -> None:
    result = train_troubled(tmp_path, "raise")

    assert result.rc == 1, result
    lines = ours(result.stderr)
    assert lines[-1] == "[rank 1] ValueError: the forward pass broke"
    assert "waited for" not in result.stderr
    assert blamed(result.stderr) == set()


def test_a_rank_without_memory_says_so_where_and_what_helps(tmp_path: Path) -> None:
    result = train_troubled(tmp_path, "allocate")

    assert result.rc == 1, result
    (line,) = (line for line in ours(result.stderr) if "ran out of memory" in line)
    assert re.match(
        r"hpcpipe: rank 1 \(stage 1\) on \S+ ran out of memory at F of minibatch \d: use more ranks", line
    )
    assert "data.batch" in line
    assert "pipeline.memory_limit" in line
    assert ours(result.stderr)[-1].startswith("[rank 1] RuntimeError: ")


def test_a_rank_that_computes_for_long_is_waited_for_and_said_to_work(tmp_path: Path) -> None:
    result = train_troubled(tmp_path, "sleep", seconds=5.0, abort_s=60.0)

    assert result.rc == 0, result
    warnings = [line for line in ours(result.stderr) if " waits for " in line]
    told = [line.partition("; ")[2] for line in warnings if "minibatch 3" in line.partition("; ")[2]]
    assert told, result
    assert all(
        re.fullmatch(r"rank 1 \(stage 1\) on host \S+ works on F of minibatch 3 for \d s", line) for line in told
    )


OPEN_MPI = "/usr/bin/mpirun.openmpi"


@pytest.mark.skipif(not Path(OPEN_MPI).exists(), reason=f"no {OPEN_MPI}: install openmpi-bin")
def test_ranks_started_by_the_mpirun_of_another_library_are_refused_with_one_line(tmp_path: Path) -> None:
    file = write_run_file(tmp_path, policy="stash", optimizer="sgd")
    words = [OPEN_MPI, "--oversubscribe", "-n", "2", sys.executable, *HPCPIPE, "train", str(file)]

    result = supervise([*words, "--out", str(tmp_path / "out")], timeout_s=TIME_LIMIT_S)

    assert result.rc == 2, result
    (line,) = ours(result.stderr)
    assert "the launcher of Open MPI started 2 ranks of a program that uses MPICH" in line
    assert not (tmp_path / "out").exists()
