"""The script for Slurm's sbatch: warned by --signal, started again by scontrol requeue."""

from __future__ import annotations

from hpcpipe.batch.durations import in_days
from hpcpipe.batch.pieces import (
    FOLDER,
    KEEPS_ITS_NUMBER,
    GoingOn,
    command_lines,
    comment,
    decide,
    environment,
    folder,
    functions,
    paragraphs,
    setting_up,
    start_in_background,
)
from hpcpipe.batch.ranks import mpirun_words, srun_words, train_words
from hpcpipe.batch.request import JobRequest
from hpcpipe.errors import EXIT_REQUEUE


def slurm_script(request: JobRequest, introduction: str) -> str:
    """The whole script."""
    by_srun = request.launcher == "srun"
    array = request.indices is not None
    job = "${SLURM_ARRAY_JOB_ID}" if array else "$SLURM_JOB_ID"
    return paragraphs(
        [
            "#!/bin/bash\n" + introduction + "\n#\n" + _header(request, by_srun),
            setting_up(request, None),
            comment(KEEPS_ITS_NUMBER)
            + "\n"
            + folder(request, job, "$SLURM_ARRAY_TASK_ID" if array else None)
            + f"\nmax_requeues={request.max_requeues}",
            environment(request, "${SLURM_CPUS_PER_TASK:-1}"),
            functions(request),
            _start_by_srun(request) if by_srun else _start_by_mpirun(request),
            decide(_going_on(array), asked=not by_srun),
        ]
    )


def _header(request: JobRequest, by_srun: bool) -> str:
    assert request.time_s is not None
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        f"--cpus-per-task={request.cpus_per_rank}",
        f"--time={in_days(request.time_s)}",
    ]
    for option, value in (
        ("--gpus-per-node", request.gpus_per_node),
        ("--partition", request.queue),
        ("--account", request.account),
        ("--qos", request.qos),
    ):
        if value is not None:
            options.append(f"{option}={value}")
    if request.indices is not None:
        options.append(f"--array={request.indices.spelled}{request.indices.limit}")
    options += request.directives
    options.append(f"--output={request.name}-{'%A_%a' if request.indices is not None else '%j'}.log")
    whom = (
        'To the ranks (with "B:" it would go to this script instead), so many seconds before the limit'
        if by_srun
        else "To this script (B:), which passes it on, as mpirun's helpers on the nodes would not; so many "
        "seconds before the limit"
    )
    to = "" if by_srun else "B:"
    return "\n".join(
        [
            *(f"#SBATCH {option}" for option in options),
            comment("Started again it goes on in the same log; Slurm starts it again itself if a node fails."),
            "#SBATCH --open-mode=append",
            "#SBATCH --requeue",
            comment(f"{whom}, or up to a minute earlier. Time for the last minibatches and one checkpoint."),
            f"#SBATCH --signal={to}{request.signal}@{request.signal_before_s}",
        ]
    )


def _start_by_srun(request: JobRequest) -> str:
    return "\n".join(
        [
            "before=$(newest)",
            comment(
                "srun does not take --cpus-per-task over from sbatch. Once a rank is gone, killed for its memory "
                "for one, the others wait for it: --kill-on-bad-exit ends them, whatever the site's default."
            ),
            command_lines(srun_words(request), train_words(request)),
            "code=$?",
        ]
    )


def _start_by_mpirun(request: JobRequest) -> str:
    words = mpirun_words(request, ranks='"$SLURM_NTASKS"', per_node='"$SLURM_NTASKS_PER_NODE"')
    return start_in_background(request, words, train_words(request))


def _going_on(array: bool) -> GoingOn:
    job, note = "$SLURM_JOB_ID", ""
    continued = "$out"
    if array:
        # One element of an array has the number of the array as its own, by which all would be requeued.
        job, continued = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID", "$base"
        note = "# By this name, as SLURM_JOB_ID of one of them is that of the whole array.\n"
    return GoingOn(
        requeues="${SLURM_RESTART_COUNT:-0}",
        names=[f'chain="{FOLDER}={continued} sbatch --dependency=afternotok:{job}"'],
        unless=[("! command -v scontrol >/dev/null", "there is no scontrol here; chain jobs: $chain SCRIPT")],
        by=f'scontrol requeue "{job}"',
        then=f'{note}say "goes on when its turn comes again"\nexit {EXIT_REQUEUE}',
        failed="scontrol could not requeue it",
    )
