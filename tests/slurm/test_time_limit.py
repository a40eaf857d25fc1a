"""Jobs that need more time than their limit, told so by Slurm's signal or by the clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcpipe.checkpoint.sets import choose
from tests.slurm.cluster import STEPS, Cluster, Job, Outcome, outcome


def check_continued(job: Job, out: Path, unbroken: Outcome) -> None:
    """The job stopped with a checkpoint, started itself again, and came to the same end as an unbroken run."""
    ended = job.wait()

    assert ended["JobState"] == "COMPLETED", job
    assert int(ended["Restarts"]) >= 1, job
    assert "goes on when its turn comes again" in job.log.read_text(), job
    assert outcome(out) == unbroken


def test_a_job_stops_by_itself_so_long_before_its_limit_as_it_was_told(slurm: Cluster, timed_job: Job) -> None:
    ended = timed_job.wait()

    assert ended["JobState"] == "FAILED", timed_job
    assert ended["ExitCode"] == "75:0", timed_job
    minutes, seconds = ended["RunTime"].split(":")[1:]
    assert 60 * int(minutes) + int(seconds) < 55, timed_job
    found, _ = choose(slurm.folder / "timed", deep=True)
    assert 0 < found.step < STEPS


def test_the_script_of_hpcpipe_job_runs_unedited_through_its_time_limit_to_the_same_end_as_an_unbroken_run(
    slurm: Cluster, written_job: Job, unbroken: Callable[[int], Outcome]
) -> None:
    check_continued(written_job, slurm.folder / "runs" / f"run-{written_job.number}", unbroken(0))


def test_the_script_for_long_runs_continues_itself_to_the_same_end_as_an_unbroken_run(
    slurm: Cluster, shipped_job: Job, unbroken: Callable[[int], Outcome]
) -> None:
    check_continued(shipped_job, slurm.folder / "runs" / f"text-gpt-{shipped_job.number}", unbroken(0))
