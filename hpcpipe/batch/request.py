"""What a job script is asked for: the request that every scheduler's module turns into text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcpipe.batch.durations import in_days
from hpcpipe.batch.indices import Indices
from hpcpipe.errors import JobError

SCHEDULERS = ("slurm", "pbs", "lsf", "none")
LAUNCHERS = ("srun", "mpirun")
FAMILIES = ("mpich", "openmpi", "cray", "other")
DEADLY_TO_MPIRUN = ("USR2",)
"""Signals that launchers of ranks die of instead of passing them on."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job.

    command: the words that start hpcpipe, as in ("python", "-m", "hpcpipe").
    run_file, overrides: what it trains, with `section.key=value` to lay over it.
    name: of the job, and the beginning of its log's name.
    scheduler, launcher, family: one of `SCHEDULERS`, `LAUNCHERS`, `FAMILIES` (of the MPI library).
    mpirun: the program that starts the ranks where it is not srun.
    mpi: srun's --mpi; None leaves it to the site.
    netmod: MPICH's MPIR_CVAR_CH4_NETMOD, None to leave it.
    nodes, ranks_per_node, cpus_per_rank, gpus_per_node: what it needs; None for no GPUs.
    time_s: the limit in seconds; None, without a scheduler only, for none.
    signal, signal_before_s: which signal asks the ranks to stop (as USR1), so many seconds before the limit.
    max_requeues: how often the job may go on by itself.
    out: the folder of the run; `out_by_job` has the number of the job appended.
    indices: of a job array over seeds, or None.
    directory: where the script goes first; None for where it was submitted.
    script: under which path the script will be found again; only PBS needs it.
    hostfile: of mpirun without a scheduler on several nodes.
    setup: lines of bash to run first, such as `module load`.
    queue, account, qos: as the scheduler calls them; directives: more of its options, as on its command line.

    Raises JobError: parts of it contradict each other.
    """

    command: tuple[str, ...]
    run_file: str
    name: str
    scheduler: str
    launcher: str
    family: str
    ranks_per_node: int
    out: str
    nodes: int = 1
    time_s: int | None = None
    signal: str = "USR1"
    signal_before_s: int = 300
    mpirun: str = "mpirun"
    mpi: str | None = None
    netmod: str | None = None
    cpus_per_rank: int = 1
    gpus_per_node: int | None = None
    max_requeues: int = 10
    out_by_job: bool = True
    indices: Indices | None = None
    overrides: tuple[str, ...] = ()
    directory: str | None = None
    script: str | None = None
    hostfile: str = "hosts.txt"
    setup: tuple[str, ...] = ()
    queue: str | None = None
    account: str | None = None
    qos: str | None = None
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", self.name):
            raise JobError(f"--name: {self.name!r} must be letters, digits, '_', '.' and '-', a letter first")
        for option, text in (("--setup", self.setup), ("--directive", self.directives)):
            if any("\n" in line for line in text):
                raise JobError(f"{option}: must be one line; repeat the option for several")
        if self.launcher == "srun" and self.scheduler != "slurm":
            raise JobError(f"--launcher srun: belongs to Slurm, not to {self.scheduler}; use --launcher mpirun")
        if self.launcher == "mpirun" and self.signal in DEADLY_TO_MPIRUN:
            raise JobError(
                f"--launcher mpirun: dies of SIG{self.signal}, which run.stop_signals asks for first; put SIGUSR1 "
                "before it, or use --launcher srun"
            )
        if self.time_s is None:
            if self.scheduler != "none":
                raise JobError("--time: is needed, as in --time 4:00:00; only --scheduler none has no limit")
        elif self.signal_before_s >= self.time_s:
            raise JobError(
                f"--signal-before: {self.signal_before_s} s must be less than the limit of {in_days(self.time_s)}"
            )
        if self.indices is not None and self.scheduler == "lsf" and 0 in self.indices.numbers:
            raise JobError("--array: indices of LSF begin with 1, as in --array 1-5")
        if self.indices is not None and self.scheduler == "pbs" and "," in self.indices.spelled:
            raise JobError("--array: PBS knows one range only, as in --array 0-4 or 0-8:2")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node
