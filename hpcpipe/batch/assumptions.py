"""What a script takes for granted, in lines for whoever is about to submit it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcpipe.batch.durations import in_days
from hpcpipe.batch.pieces import FOLDER
from hpcpipe.batch.request import JobRequest
from hpcpipe.batch.script import SUBMIT

_PLACE = {"slurm": "the job's number", "pbs": "the first job's number", "lsf": "the job's number", "none": ""}


def assumptions(request: JobRequest, *, ranks: str, library: str, stop_bound: int, file: str | None) -> list[str]:
    """One line each.

    ranks: how the run file uses them; library: the MPI library and how it was found; stop_bound: minibatches until
    a stop, at most; file: where the script was written, if anywhere.
    """
    start = file or "FILE"
    return [
        f"ranks: {request.nodes} x {request.ranks_per_node} = {request.ranks}; {ranks}",
        f"launcher: {_launcher(request)}, for {library}",
        f"command: {' '.join(request.command)}, which every node must see there",
        *_places(request),
        f"threads: {request.cpus_per_rank} a rank (--cpus-per-task)",
        _gpus(request),
        _stop(request, stop_bound),
        f"goes on by itself at most {request.max_requeues} times, only while steps are gained and never over a "
        "file STOP in its folder",
        f"not submitted: {SUBMIT[request.scheduler].format(start)}",
    ]


def _launcher(request: JobRequest) -> str:
    if request.launcher == "srun":
        return "srun" if request.mpi is None else f"srun --mpi={request.mpi}"
    return request.mpirun


def _places(request: JobRequest) -> Iterator[str]:
    if request.directory is not None:
        yield f"works in {request.directory}, so relative paths mean that folder on every node"
    by = [_PLACE[request.scheduler]] if request.out_by_job and _PLACE[request.scheduler] else []
    by += ["the seed"] if request.indices is not None else []
    behind = f", followed by {' and '.join(by)}" if by else ""
    yield f"folder of the run: {request.out}{behind}; {FOLDER}=... at submission names another to go on with"
    if request.scheduler == "pbs":
        yield f"submits itself again from {request.script or Path(f'{request.name}.pbs')}: keep the file there"
    if request.scheduler == "none" and request.nodes > 1:
        yield f"names of the hosts: one a line in {request.hostfile}"


def _gpus(request: JobRequest) -> str:
    if request.gpus_per_node is None:
        return "GPUs: none asked for (--gpus-per-node)"
    if request.gpus_per_node < request.ranks_per_node:
        return f"GPUs: {request.ranks_per_node} ranks share {request.gpus_per_node} on each node"
    return f"GPUs: {request.gpus_per_node} a node; each rank takes the one of its number on the node"


def _stop(request: JobRequest, stop_bound: int) -> str:
    if request.time_s is None:
        return f"no time limit; SIG{request.signal} to this script asks for a checkpoint and a new start"
    lead = request.signal_before_s
    if request.scheduler == "lsf":
        lead = -(-lead // 60) * 60
    return (
        f"SIG{request.signal} {lead} s before the limit of {in_days(request.time_s)} (--signal-before): at most "
        f"{stop_bound} minibatches and one checkpoint must fit into that"
    )
