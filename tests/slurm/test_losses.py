"""What a batch system takes away: a job that is cancelled, a node that goes down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import choose
from tests.crash.killing import wait_for_steps
from tests.slurm.cluster import STEPS, Cluster, Outcome, cluster, outcome

JOB = """
echo "started as number ${{SLURM_RESTART_COUNT:-0}}"
exec srun --mpi=pmi2 {train}
"""


@pytest.fixture
def second_slurm(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose nodes can be taken away from nobody else."""
    with cluster(tmp_path) as made:
        yield made


def test_a_cancelled_job_leaves_a_checkpoint_that_a_following_job_goes_on_from_to_the_bit(
    slurm: Cluster, tmp_path: Path, unbroken: Callable[[int], Outcome]
) -> None:
    script = slurm.script("cancelled.sh", JOB.format(train=" ".join(slurm.train(tmp_path))))
    first = slurm.submit(script, nap_s=0.1)
    wait_for_steps(tmp_path, 20)
    assert slurm.command("scancel", first.number).rc == 0
    ended = first.wait()
    found, skipped = choose(tmp_path, deep=True)

    assert ended["JobState"] == "CANCELLED", first
    assert skipped == []
    assert 20 <= found.step < STEPS
    assert slurm.submit(script).wait()["JobState"] == "COMPLETED"
    assert outcome(tmp_path) == unbroken(0)


def test_a_job_whose_node_goes_down_is_requeued_and_ends_like_an_unbroken_run(
    second_slurm: Cluster, tmp_path: Path, unbroken: Callable[[int], Outcome]
) -> None:
    slurm = second_slurm
    out = tmp_path / "out"
    script = slurm.script("job.sh", "#SBATCH --requeue\n" + JOB.format(train=" ".join(slurm.train(out))))
    job = slurm.submit(script, nap_s=0.05)
    wait_for_steps(out, 120)
    assert slurm.command("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test").rc == 0
    job.wait_for("PENDING")
    assert slurm.command("scontrol", "update", "NodeName=n1", "State=RESUME").rc == 0
    ended = job.wait()

    assert ended["JobState"] == "COMPLETED", job
    assert ended["Restarts"] == "1", job
    assert "started as number 1" in job.log.read_text()
    assert outcome(out) == unbroken(0)
