"""The script for LSF's bsub: warned by -wa and -wt, started again by LSF itself where its exit code is in -Q."""

from __future__ import annotations

from hpcpipe.batch.durations import in_minutes
from hpcpipe.batch.pieces import (
    KEEPS_ITS_NUMBER,
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
from hpcpipe.batch.ranks import mpirun_words, train_words
from hpcpipe.batch.request import JobRequest
from hpcpipe.errors import EXIT_FAILURE, EXIT_REQUEUE


def lsf_script(request: JobRequest, introduction: str) -> str:
    """The whole script."""
    array = request.indices is not None
    return paragraphs(
        [
            "#!/bin/bash\n" + introduction + "\n#\n" + _header(request),
            setting_up(request, None),
            comment(KEEPS_ITS_NUMBER)
            + "\n"
            + folder(request, "$LSB_JOBID", "$LSB_JOBINDEX" if array else None)
            + f"\nmax_requeues={request.max_requeues}",
            _log(),
            environment(request, str(request.cpus_per_rank)),
            functions(request),
            _start(request),
            _decide(),
        ]
    )


def _header(request: JobRequest) -> str:
    assert request.time_s is not None
    cpus = request.cpus_per_rank
    array = "" if request.indices is None else f"[{request.indices.spelled}]{request.indices.limit}"
    options = [
        f'-J "{request.name}{array}"',
        f"-n {request.ranks}",
        f'-R "span[ptile={request.ranks_per_node}]"',
        f'-R "affinity[core({cpus})]"',
        f"-W {in_minutes(request.time_s)}",
    ]
    for option, value in (
        ("-q", request.queue),
        ("-P", request.account),
        ("-sla", request.qos),
    ):
        if value is not None:
            options.append(f"{option} {value}")
    if request.gpus_per_node is not None:
        options.append(f'-gpu "num={request.gpus_per_node}/host"')
    options += request.directives
    options.append(f"-o {request.name}-{'%J_%I' if array else '%J'}.report")
    lead = -(-request.signal_before_s // 60)
    return "\n".join(
        [
            *(f"#BSUB {option}" for option in options),
            comment("Minutes before the limit: time for the last minibatches and one checkpoint."),
            f"#BSUB -wt {lead}",
            f"#BSUB -wa {request.signal}",
            comment(f"Started again if it exits with {EXIT_REQUEUE}, and if its host fails."),
            f'#BSUB -Q "{EXIT_REQUEUE}"',
            "#BSUB -r",
        ]
    )


def _log() -> str:
    return "\n".join(
        [
            comment("A log of its own: of a run after which it requeues, LSF does not keep what was printed."),
            'mkdir -p "$out" || exit',
            'exec >>"$out/job.log" 2>&1',
            comment("LSF does not say how often a job was requeued."),
            'requeues=$(cat "$out/requeues" 2>/dev/null || echo 0)',
        ]
    )


def _start(request: JobRequest) -> str:
    # MPICH's launcher knows LSF, and starts its helpers by blaunch.
    hosts = '"$LSB_DJOB_HOSTFILE"' if request.family == "openmpi" else None
    words = mpirun_words(request, ranks=str(request.ranks), per_node=str(request.ranks_per_node), hosts=hosts)
    return start_in_background(request, words, train_words(request))


def _decide() -> str:
    going_on = GoingOn(
        requeues="requeues",
        by='echo "$((requeues + 1))" >"$out/requeues"',
        then=f'say "goes on when its turn comes again"\nexit {EXIT_REQUEUE}',
        failed="cannot write $out/requeues",
        otherwise=comment(f"Not {EXIT_REQUEUE}, by which LSF would start it again.") + f"\nexit {EXIT_FAILURE}",
    )
    return decide(going_on, asked=True)
