"""How a job ends: all ranks are gone within seconds, with the right exit code, and one says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcpipe.errors import EXIT_REQUEUE
from hpcpipe.transport.job import LAST_ONE_S
from tests.mpi.launch import Result, mpirun, run, run_alone, supervise

pytestmark = pytest.mark.alone

PROGRAM = "transport_endings.py"
ABORTED_WITHIN_S = 10.0


def _end(mode: str, ranks: int = 3) -> Result:
    result = run(PROGRAM, ranks, mode, timeout_s=40)
    pause = LAST_ONE_S if result.rc == EXIT_REQUEUE else 0.0
    assert result.seconds < ABORTED_WITHIN_S + pause, str(result)
    return result


def _ours(result: Result) -> list[str]:
    """What hpcpipe printed: a launcher adds lines of its own about an abort."""
    return [line for line in result.stderr.splitlines() if line.startswith(("hpcpipe: ", "[rank "))]


@pytest.mark.parametrize("mode", ["raises", "raises_while_others_compute"])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_last(mode: str) -> None:
    result = _end(mode)

    assert result.rc == 1
    lines = _ours(result)
    assert lines[0].startswith("hpcpipe: rank 1 on ")
    assert lines[1] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "[rank 1] ValueError: the forward pass broke"


@pytest.mark.parametrize(
    ("mode", "rc", "line"),
    [
        ("exits_3", 3, "hpcpipe: rank 1 left before the end of the job: sys.exit(3)"),
        ("exits_0_alone", 1, "hpcpipe: rank 1 left before the end of the job: sys.exit(0)"),
        ("is_interrupted", 130, "hpcpipe: rank 1 was interrupted"),
        ("finds_bad_input", 2, "hpcpipe: data.path: no file /nowhere; give the path of an IDX file"),
        ("agrees_on_bad_input", 2, "hpcpipe: model.depth = -1: must be positive"),
        ("agrees_on_one_bad_rank", 2, "hpcpipe: data.path: no file /nowhere"),
        ("returns_different_codes", 1, "hpcpipe: the ranks end with different exit codes: [0, 75, 0]"),
    ],
)
def test_one_line_says_why_the_job_ended(mode: str, rc: int, line: str) -> None:
    result = _end(mode)

    assert (result.rc, _ours(result)) == (rc, [line]), str(result)


@pytest.mark.parametrize(
    ("mode", "rc"),
    [("agrees_that_all_is_well", 0), ("is_signalled_while_it_leaves", 75)],
)
def test_what_all_ranks_agree_on_is_returned_in_silence(mode: str, rc: int) -> None:
    result = _end(mode)

    assert (result.rc, _ours(result)) == (rc, []), str(result)


def test_rank_0_alone_leaves_with_75_and_as_the_last_one_so_that_no_launcher_kills_another_for_it(
    tmp_path: Path,
) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\n'{sys.executable}' \"$@\"\ncode=$?\necho $code > '{tmp_path}/rank'$PMI_RANK\nexit $code\n"
    )
    script.chmod(0o755)
    command = [str(script) if word == sys.executable else word for word in mpirun(PROGRAM, 3, "stops_for_requeue")]

    result = supervise(command, timeout_s=40)

    assert (result.rc, _ours(result)) == (75, []), str(result)
    files = [tmp_path / f"rank{rank}" for rank in range(3)]
    assert [file.read_text() for file in files] == ["75\n", "0\n", "0\n"]
    assert files[0].stat().st_mtime > max(file.stat().st_mtime for file in files[1:]) + 1.0


def test_another_code_of_all_ranks_is_the_code_of_the_job() -> None:
    assert _end("returns_4").rc == 4


def test_a_stall_is_told_and_ends_the_job() -> None:
    result = _end("stalls")

    assert result.rc == 1
    said = "(stage 0) waits for a neighbour that never comes for"
    assert any(line.startswith("hpcpipe: rank 0 ") and said in line for line in _ours(result))
    assert "TransportError: rank" in _ours(result)[-1]


def test_a_replica_that_never_joins_is_named() -> None:
    result = _end("a_replica_never_joins")

    assert result.rc == 1
    assert "hpcpipe: rank 2 waits for rank 1 to join the replicas of stage 1" in _ours(result)[0]
    assert "TransportError: rank 2 waited for rank 1 to join the replicas of stage 1" in _ours(result)[-1]


def test_an_all_reduce_that_a_replica_never_comes_to_is_named() -> None:
    result = _end("a_replica_never_sums")

    assert result.rc == 1
    assert "hpcpipe: rank 2 waits for the all-reduce of stage 1, minibatch 7" in _ours(result)[0]
    assert "TransportError: rank 2 waited for the all-reduce of stage 1, minibatch 7" in _ours(result)[-1]


def test_an_exception_in_the_middle_of_an_all_reduce_ends_all_with_its_traceback_last() -> None:
    result = _end("raises_during_a_sum", ranks=4)

    assert result.rc == 1
    assert _ours(result)[-1] == "[rank 1] ValueError: the backward pass broke"


STEP = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    "launcher",
    [{**STEP, "SLURM_PROCID": "0"}, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}],
    ids=["srun without PMI", "mpirun of another library"],
)
def test_ranks_that_do_not_see_each_other_are_refused(launcher: dict[str, str]) -> None:
    result = run_alone(PROGRAM, "agrees_that_all_is_well", environment=launcher)

    assert result.rc == 2
    (line,) = result.stderr.splitlines()
    assert "started 4 ranks" in line
    assert "MPICH" in line or "Open MPI" in line
    assert "srun --mpi=" in line


def test_of_ranks_that_do_not_see_each_other_one_speaks() -> None:
    result = run_alone(PROGRAM, "agrees_that_all_is_well", environment={**STEP, "SLURM_PROCID": "2"})

    assert (result.rc, result.stdout, result.stderr) == (2, "", "")


@pytest.mark.parametrize(
    "launcher",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
    ids=["no launcher", "one task", "batch script"],
)
def test_one_rank_without_mpirun_runs(launcher: dict[str, str]) -> None:
    result = run_alone(PROGRAM, "agrees_that_all_is_well", environment=launcher)

    assert (result.rc, result.stderr) == (0, "")


def test_mpirun_inside_a_batch_step_runs() -> None:
    result = run(PROGRAM, 2, "agrees_that_all_is_well", environment={**STEP, "SLURM_PROCID": "0"})

    assert (result.rc, result.stderr) == (0, "")


def test_a_failure_of_a_single_process_is_its_exit_code() -> None:
    result = run_alone(PROGRAM, "agrees_on_bad_input")

    assert (result.rc, result.stderr) == (2, "hpcpipe: model.depth = -1: must be positive\n")


def test_without_an_mpi_library_one_line_says_how_to_get_one() -> None:
    result = run_alone(PROGRAM, "agrees_that_all_is_well", environment={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})

    assert result.rc == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("hpcpipe: no usable MPI library")
    assert "pip install hpcpipe[mpich]" in line


def test_a_lower_thread_level_than_needed_is_noted() -> None:
    wished = run_alone(PROGRAM, "prints_the_thread_level")
    forced = run_alone(PROGRAM, "prints_the_thread_level", environment={"MPI4PY_RC_THREAD_LEVEL": "single"})

    assert wished.stdout == "funneled []\n"
    assert "granted thread level single, funneled was needed" in forced.stdout
