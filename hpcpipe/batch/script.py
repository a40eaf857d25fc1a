"""From a request to a script: the introduction, which is the same for all, and the module of its scheduler."""

from __future__ import annotations

from hpcpipe.batch.lsf import lsf_script
from hpcpipe.batch.pbs import pbs_script
from hpcpipe.batch.pieces import comment
from hpcpipe.batch.plain import plain_script
from hpcpipe.batch.request import JobRequest
from hpcpipe.batch.slurm import slurm_script

_WRITERS = {"slurm": slurm_script, "pbs": pbs_script, "lsf": lsf_script, "none": plain_script}
SUBMIT = {"slurm": "sbatch {}", "pbs": "qsub {}", "lsf": "bsub < {}", "none": "bash {}"}
"""How a user starts a script of each scheduler."""


def write_script(request: JobRequest, *, file: str | None = None) -> str:
    """The text of the script; `file` is what it will be called, for the line that says how to start it."""
    return _WRITERS[request.scheduler](request, _introduction(request, file or "THIS_FILE"))


def _introduction(request: JobRequest, file: str) -> str:
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    ranks = f"{request.ranks} rank{'s' if request.ranks > 1 else ''}"
    what = f"{request.name}: {ranks} on {nodes}"
    if request.indices is not None:
        what += f", once for each of the seeds {request.indices.spelled}"
    until = "It stops with a checkpoint before its time is up and goes on by itself until the run is complete."
    if request.time_s is None:
        until = "Stopped with a checkpoint it goes on by itself until the run is complete."
    return "\n".join(
        [
            comment(f"{what}. {until} Written by `hpcpipe job`; change what you like."),
            "#",
            f"#   {SUBMIT[request.scheduler].format(file)}",
        ]
    )
