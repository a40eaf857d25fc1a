"""Whether the launcher and the MPI library belong together: what the environment promises against what MPI says.

Ranks started by a launcher of another library each see a world of one, and would train N times. All but
`mpirun_path` are pure functions of an environment mapping; no other module of the transport knows such variables.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcpipe.errors import LauncherError

# For each family of libraries, the variables by which its own launchers say how many ranks they started.
_OWN_SIZES = {
    "mpich": ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE",),
}
_SIZES = (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_SIZE",
    "FLUX_JOB_SIZE",
)
_RANKS = (
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)
# Those of MPI's own launchers first: under an mpirun inside a Slurm step, SLURM_LOCALID is that of the mpirun.
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A number of ranks that a launcher says it started, and the variable that says so."""

    ranks: int
    variable: str


@dataclass(frozen=True, kw_only=True)
class LocalClaim:
    """The number that a launcher says a process has among those of its host, and the variable that says so."""

    rank: int
    variable: str


def family_of(library: str) -> str:
    """`mpich`, `openmpi` or `other`, from the name that the library or its launcher gives itself."""
    name = library.lower()
    if "open mpi" in name or "openmpi" in name or "open-mpi" in name or "openrte" in name or "prrte" in name:
        return "openmpi"
    # Intel MPI, MVAPICH and Cray MPICH share MPICH's interface and its launcher variables.
    if any(word in name for word in ("mpich", "hydra", "mvapich", "intel")):
        return "mpich"
    return "other"


def promises(environment: Mapping[str, str]) -> list[Promise]:
    """Every statement about the number of ranks in `environment`, Slurm's only inside a job step."""
    found = [
        Promise(ranks=count, variable=variable)
        for variable in _SIZES
        if (count := _number(environment, variable)) is not None
    ]
    slurm = _number(environment, "SLURM_NTASKS")
    if slurm is not None and _inside_slurm_step(environment):
        found.append(Promise(ranks=slurm, variable="SLURM_NTASKS"))
    return found


def check_launcher_family(environment: Mapping[str, str], *, library: str, mpirun: str | None = None) -> None:
    """Refuse, before MPI_Init, the launcher of Open MPI under a library of the MPICH family, which dies in it.

    The other way round the library starts and sees one rank: `check_launch` finds that.

    Raises LauncherError naming the remedy.
    """
    if family_of(library) != "mpich":
        return
    stated = {promise.variable: promise.ranks for promise in promises(environment)}
    ranks = stated.get("OMPI_COMM_WORLD_SIZE", 1)
    if ranks > 1 and not any(variable in stated for variable in _OWN_SIZES["mpich"]):
        raise LauncherError(
            f"the launcher of Open MPI started {ranks} ranks of a program that uses {library}: start with "
            f"{_remedy('mpich', mpirun)}"
        )


def check_launch(environment: Mapping[str, str], *, size: int, library: str, mpirun: str | None = None) -> None:
    """Refuse a world of one rank where a launcher started several.

    size: ranks of the world communicator.
    library: name and version of the MPI library in use.
    mpirun: the launcher that belongs to it, if known.

    Raises LauncherError naming both sizes and the remedy.
    """
    if size > 1:
        return
    own = _OWN_SIZES.get(family_of(library), ())
    stated = promises(environment)
    # mpirun -n 1 inside a larger Slurm step is a world of one on purpose.
    if any(promise.variable in own and promise.ranks == size for promise in stated):
        return
    for promise in stated:
        if promise.ranks > size:
            raise LauncherError(
                f"the launcher started {promise.ranks} ranks ({promise.variable}={promise.ranks}) but {library} "
                f"sees a world of {size}: the launcher is not of this MPI library; start with "
                f"{_remedy(family_of(library), mpirun)}"
            )


def launcher_rank(environment: Mapping[str, str]) -> int:
    """The rank that the launcher gave this process, 0 when nothing says so: known even where MPI is not."""
    for variable in _RANKS:
        rank = _number(environment, variable)
        if rank is not None:
            return rank
    if _inside_slurm_step(environment):
        return _number(environment, "SLURM_PROCID") or 0
    return 0


def local_claim(environment: Mapping[str, str]) -> LocalClaim | None:
    """What the launcher says of this process's place on its host; None where nothing does.

    It may be inherited from another launcher further up: whoever uses it compares what all ranks of a host heard.
    """
    for variable in _LOCAL_RANKS:
        rank = _number(environment, variable)
        if rank is not None:
            return LocalClaim(rank=rank, variable=variable)
    rank = _number(environment, "SLURM_LOCALID")
    if rank is not None and _inside_slurm_step(environment):
        return LocalClaim(rank=rank, variable="SLURM_LOCALID")
    return None


def cpus_per_task(environment: Mapping[str, str]) -> int | None:
    """How many CPUs Slurm says each task of this step has; None outside a step, or where none were asked for."""
    return _number(environment, "SLURM_CPUS_PER_TASK") if _inside_slurm_step(environment) else None


def mpirun_path() -> str | None:
    """The `mpirun` beside this Python, where an MPI wheel puts it, or else the first on the PATH."""
    beside = Path(sys.prefix) / "bin" / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _remedy(family: str, mpirun: str | None) -> str:
    plugin = {"mpich": "srun --mpi=pmi2", "openmpi": "srun --mpi=pmix"}.get(
        family, "srun --mpi=pmi2 or srun --mpi=pmix (srun --mpi=list shows which there are)"
    )
    return f"{plugin}, or with {mpirun or 'the mpirun of that library'}"


def _inside_slurm_step(environment: Mapping[str, str]) -> bool:
    # A batch script has SLURM_NTASKS and SLURM_PROCID=0 too, but no step.
    process = _number(environment, "SLURM_PROCID")
    if process is None:
        return False
    return process > 0 or "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    text = environment.get(variable, "")
    return int(text) if text.isdecimal() else None
