from __future__ import annotations

import pytest

from hpcpipe.errors import LauncherError
from hpcpipe.transport.launcher import (
    check_launch,
    check_launcher_family,
    cpus_per_task,
    family_of,
    launcher_rank,
    local_claim,
    promises,
)

MPICH = "MPICH 5.0.2"
OPEN_MPI = "Open MPI 5.0.11"
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "library", "remedy"),
    [
        (STEP, MPICH, "srun --mpi=pmi2"),
        (STEP, OPEN_MPI, "srun --mpi=pmix"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, MPICH, "srun --mpi=pmi2"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, MPICH, "srun --mpi=pmi2"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, OPEN_MPI, "srun --mpi=pmix"),
        ({"PMI_SIZE": "4"}, MPICH, "srun --mpi=pmi2"),
        ({"MPI_LOCALNRANKS": "4"}, OPEN_MPI, "srun --mpi=pmix"),
        ({**STEP, "SLURM_STEP_ID": "3"}, "Some MPI 1.0", "srun --mpi=list"),
    ],
)
def test_n_singletons_are_refused_with_both_sizes_and_the_remedy(
    environment: dict[str, str], library: str, remedy: str
) -> None:
    with pytest.raises(LauncherError, match=rf"started 4 ranks .* but {library} sees a world of 1") as caught:
        check_launch(environment, size=1, library=library, mpirun="/opt/mpi/bin/mpirun")

    assert remedy in str(caught.value)
    assert "/opt/mpi/bin/mpirun" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "17"},
        {**STEP, "PMI_SIZE": "1"},
        {"SLURM_NTASKS": "garbage", "SLURM_PROCID": "1"},
    ],
    ids=["no launcher", "one task", "allocation", "batch script", "mpirun -n 1 in a step", "not a number"],
)
def test_one_rank_on_purpose_still_runs(environment: dict[str, str]) -> None:
    check_launch(environment, size=1, library=MPICH)


def test_the_launcher_of_open_mpi_is_refused_before_mpich_starts() -> None:
    with pytest.raises(LauncherError, match=r"launcher of Open MPI started 4 ranks .* uses MPICH 5.0.2.*pmi2"):
        check_launcher_family({"OMPI_COMM_WORLD_SIZE": "4"}, library=MPICH)


@pytest.mark.parametrize(
    ("environment", "library"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, OPEN_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "4"}, MPICH),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, MPICH),
        ({"PMIX_RANK": "0"}, MPICH),
        ({"PMI_SIZE": "4"}, OPEN_MPI),
    ],
)
def test_other_launchers_are_left_to_mpi_init(environment: dict[str, str], library: str) -> None:
    check_launcher_family(environment, library=library)


def test_mpirun_inside_a_batch_step_still_runs() -> None:
    # hydra starts its proxies by srun, one a node, so that Slurm's figures are those of the proxies.
    check_launch({**STEP, "SLURM_NTASKS": "2", "PMI_SIZE": "4"}, size=4, library=MPICH)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, 0), ({"PMI_RANK": "3"}, 3), ({"OMPI_COMM_WORLD_RANK": "2"}, 2), (STEP, 2), ({"SLURM_PROCID": "0"}, 0)],
)
def test_the_rank_is_known_before_mpi_is(environment: dict[str, str], rank: int) -> None:
    assert launcher_rank(environment) == rank


def test_slurm_promises_nothing_outside_a_step() -> None:
    assert promises({"SLURM_NTASKS": "4"}) == []
    assert [(promise.ranks, promise.variable) for promise in promises(STEP)] == [(4, "SLURM_NTASKS")]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (MPICH, "mpich"),
        ("HYDRA build details: Version: 5.0.2", "mpich"),
        ("Intel MPI 2021.10", "mpich"),
        ("MVAPICH 3.0", "mpich"),
        (OPEN_MPI, "openmpi"),
        ("mpirun (Open MPI) 5.0.11", "openmpi"),
        ("unknown 1.2", "other"),
    ],
)
def test_libraries_and_launchers_belong_to_families(name: str, family: str) -> None:
    assert family_of(name) == family


@pytest.mark.parametrize(
    ("environment", "claim"),
    [
        ({}, None),
        ({**STEP, "SLURM_LOCALID": "2"}, (2, "SLURM_LOCALID")),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, "OMPI_COMM_WORLD_LOCAL_RANK")),
        ({"MPI_LOCALRANKID": "3"}, (3, "MPI_LOCALRANKID")),
        ({"PALS_LOCAL_RANKID": "5"}, (5, "PALS_LOCAL_RANKID")),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, (1, "MV2_COMM_WORLD_LOCAL_RANK")),
        ({"PMI_LOCAL_RANK": "1"}, (1, "PMI_LOCAL_RANK")),
        ({"FLUX_TASK_LOCAL_ID": "7"}, (7, "FLUX_TASK_LOCAL_ID")),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        ({**STEP, "SLURM_LOCALID": "0", "MPI_LOCALRANKID": "1"}, (1, "MPI_LOCALRANKID")),
        ({"MPI_LOCALRANKID": "first"}, None),
    ],
    ids=[
        "no launcher",
        "Slurm",
        "Open MPI",
        "MPICH",
        "PALS",
        "MVAPICH",
        "Cray",
        "Flux",
        "batch script",
        "mpirun in a step",
        "no number",
    ],
)
def test_each_launcher_says_which_rank_of_its_host_this_is(
    environment: dict[str, str], claim: tuple[int, str] | None
) -> None:
    said = local_claim(environment)

    assert (said and (said.rank, said.variable)) == claim


def test_cpus_of_a_task_are_known_inside_a_step_only() -> None:
    assert cpus_per_task({**STEP, "SLURM_CPUS_PER_TASK": "4"}) == 4
    assert cpus_per_task({"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "4"}) is None
    assert cpus_per_task(STEP) is None
