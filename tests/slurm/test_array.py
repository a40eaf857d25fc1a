"""A job array over seeds. This comes first, as its jobs begin with the session and are not long."""

from __future__ import annotations

from collections.abc import Callable

from tests.crash.killing import wait_for_steps
from tests.slurm.cluster import Cluster, Job, Outcome, outcome


def test_elements_of_an_array_have_folders_of_their_own_and_only_the_one_that_stops_is_started_again(
    slurm: Cluster, array_job: Job, unbroken: Callable[[int], Outcome]
) -> None:
    outs = {seed: slurm.folder / "runs" / f"run-{array_job.number}_{seed}" for seed in (0, 1)}
    elements = {seed: Job(slurm, f"{array_job.number}_{seed}", array_job.log) for seed in outs}
    wait_for_steps(outs[0], 20)
    assert slurm.command("scancel", "--signal=USR1", elements[0].number).rc == 0
    expected = {seed: unbroken(seed) for seed in outs}
    ended = {seed: element.wait() for seed, element in elements.items()}

    assert {seed: fields["JobState"] for seed, fields in ended.items()} == {0: "COMPLETED", 1: "COMPLETED"}
    assert {seed: fields["Restarts"] for seed, fields in ended.items()} == {0: "1", 1: "0"}
    assert {seed: outcome(out) for seed, out in outs.items()} == expected
