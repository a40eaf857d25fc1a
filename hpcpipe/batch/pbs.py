"""The script for PBS's qsub (OpenPBS, PBS Professional): it watches the clock itself and submits itself again.

PBS has no warning before the limit: it sends SIGTERM at it, and SIGKILL seconds later. qrerun would start a job
again under its number, but is for operators and managers, so the script submits a job that goes on in its folder.
"""

from __future__ import annotations

import shlex

from hpcpipe.batch.durations import in_hours
from hpcpipe.batch.pieces import (
    FOLDER,
    GoingOn,
    comment,
    decide,
    environment,
    folder,
    functions,
    paragraphs,
    setting_up,
    start_in_background,
)
from hpcpipe.batch.ranks import mpirun_words, stopping_in_time, time_left, train_words
from hpcpipe.batch.request import JobRequest
from hpcpipe.errors import EXIT_REQUEUE


def pbs_script(request: JobRequest, introduction: str) -> str:
    """The whole script."""
    array = request.indices is not None
    return paragraphs(
        [
            "#!/bin/bash\n" + introduction + "\n#\n" + _header(request),
            setting_up(request, "$PBS_O_WORKDIR"),
            _names(request, array),
            environment(request, str(request.cpus_per_rank)),
            functions(request),
            _start(request),
            decide(_going_on(array), asked=True),
        ]
    )


def _header(request: JobRequest) -> str:
    assert request.time_s is not None
    chunk = f"{request.nodes}:ncpus={request.ranks_per_node * request.cpus_per_rank}"
    chunk += f":mpiprocs={request.ranks_per_node}:ompthreads={request.cpus_per_rank}"
    if request.gpus_per_node is not None:
        chunk += f":ngpus={request.gpus_per_node}"
    options = [
        "-S /bin/bash",
        f"-N {request.name}",
        f"-l select={chunk}",
        "-l place=scatter",
        f"-l walltime={in_hours(request.time_s)}",
        "-j oe",
    ]
    for option, value in (("-q", request.queue), ("-A", request.account), ("-l qos=", request.qos)):
        if value is not None:
            options.append(f"{option}{value}" if option.endswith("=") else f"{option} {value}")
    if request.indices is not None:
        options.append(f"-J {request.indices.spelled}{request.indices.limit}")
    options += request.directives
    return "\n".join(f"#PBS {option}" for option in options)


def _names(request: JobRequest, array: bool) -> str:
    index = "${HPCPIPE_INDEX:-$PBS_ARRAY_INDEX}" if array else None
    script = shlex.quote(request.script) if request.script else f"$PBS_O_WORKDIR/{request.name}.pbs"
    return "\n".join(
        [
            comment(
                "A job that goes on with another has a number of its own, but gets the folder of the first, where "
                "--resume auto finds its checkpoint."
            ),
            "job=${PBS_JOBID%%[.[]*}",
            folder(request, "$job", index),
            f"max_requeues={request.max_requeues}",
            comment("Where this file is, to submit it again: what runs is a copy of it."),
            f"script={script}",
        ]
    )


def _start(request: JobRequest) -> str:
    words = mpirun_words(
        request,
        ranks=str(request.ranks),
        per_node=str(request.ranks_per_node),
        hosts='"$PBS_NODEFILE"',
    )
    return "\n".join(
        [
            comment(
                "PBS gives no warning: at the limit it sends SIGTERM, and soon SIGKILL. So the script's own clock "
                "(SECONDS) asks for the last checkpoint, `lead` seconds before: time for the last minibatches and "
                "one checkpoint."
            ),
            f"limit={request.time_s}",
            f"lead={request.signal_before_s}",
            *time_left(),
            start_in_background(request, stopping_in_time(request), words, train_words(request)),
        ]
    )


def _going_on(array: bool) -> GoingOn:
    continued = "$base,HPCPIPE_INDEX=$index" if array else "$out"
    # Of an array only this element goes on: without the line that makes it one.
    source = "sed '/^#PBS -J/d' \"$script\" | " if array else ""
    script = "" if array else ' "$script"'
    return GoingOn(
        requeues="${HPCPIPE_REQUEUES:-0}",
        names=[f'handed="{FOLDER}={continued},HPCPIPE_REQUEUES=$((${{HPCPIPE_REQUEUES:-0}} + 1))"'],
        unless=[
            ("[[ ! -r $script ]]", "script=$script is not there"),
            ("! command -v qsub >/dev/null", "there is no qsub here; on a login node: qsub -v $handed $script"),
        ],
        by=f'next=$({source}qsub -v "$handed"{script})',
        then=f'say "goes on as job $next"\nexit {EXIT_REQUEUE}',
        failed="qsub refused",
    )
