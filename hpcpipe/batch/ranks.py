"""The command that starts the ranks, as each launcher wants it."""

from __future__ import annotations

import shlex

from hpcpipe.batch.request import JobRequest


def train_words(request: JobRequest) -> list[str]:
    """`hpcpipe train` for one rank. The same command starts the run and goes on with it."""
    words = [shlex.quote(word) for word in (*request.command, "train", request.run_file)]
    words += ['--out "$out"', "--resume auto"]
    if request.indices is not None:
        words.append('--set run.seed="$index"')
    return words + [f"--set {shlex.quote(override)}" for override in request.overrides]


def srun_words(request: JobRequest) -> list[str]:
    """Slurm's own launcher."""
    plugin = [] if request.mpi is None else [f"--mpi={shlex.quote(request.mpi)}"]
    return ["srun", *plugin, "--kill-on-bad-exit=1", '--cpus-per-task="$OMP_NUM_THREADS"']


def mpirun_words(
    request: JobRequest, *, ranks: str, per_node: str, hosts: str | None = None, crowded: bool = False
) -> list[str]:
    """The launcher of the MPI library.

    ranks, per_node: bash for how many there are. hosts: bash for a file that names the hosts; None if the launcher
    knows them. crowded: there may be more ranks than cores.
    """
    mpirun = shlex.quote(request.mpirun)
    if request.family == "openmpi":
        mapping = f"ppr:{per_node}:node" + (":OVERSUBSCRIBE" if crowded else "")
        # It would bind each rank to one core, whatever it was given, and keeps variables from other hosts.
        words = [f"-n {ranks}", f"--map-by {mapping}", "--bind-to none", "-x OMP_NUM_THREADS"]
        return [mpirun, *words, *([] if hosts is None else [f"--hostfile {hosts}"])]
    if request.family == "cray":
        return [mpirun, f"-n {ranks}", f"--ppn {per_node}", '--depth "$OMP_NUM_THREADS"', "--cpu-bind depth"]
    if request.family == "mpich":
        return [mpirun, f"-n {ranks}", f"-ppn {per_node}", *([] if hosts is None else [f"-f {hosts}"])]
    return [mpirun, f"-n {ranks}"]


def stopping_in_time(request: JobRequest) -> list[str]:
    """What stands before the launcher where nobody warns of the limit.

    coreutils' timeout asks for the stop, waits for the end, and passes on the signals that it gets.
    """
    return ["timeout", "--foreground", "--preserve-status", f"--signal={request.signal}", '"$left"']


def time_left() -> list[str]:
    """Lines of bash that tell it how long, by the script's `limit` and `lead`; 0 would be for ever."""
    return ["left=$((limit - lead - SECONDS))", "((left > 0)) || left=1"]
