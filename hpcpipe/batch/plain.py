"""The script for mpirun without a scheduler: it goes on by itself while a stopped run has gained steps."""

from __future__ import annotations

import shlex
import textwrap

from hpcpipe.batch.pieces import (
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


def plain_script(request: JobRequest, introduction: str) -> str:
    """The whole script."""
    array = request.indices is not None
    return paragraphs(
        [
            "#!/bin/bash\n" + introduction,
            setting_up(request, None),
            _each_in_turn(request) if array else None,
            comment("Called again it goes on there, from the newest checkpoint.")
            + "\n"
            + folder(request, "$$", "$1" if array else None)
            + f"\nmax_requeues={request.max_requeues}"
            + "\nrequeues=0",
            environment(request, str(request.cpus_per_rank)),
            functions(request),
            _loop(request),
        ]
    )


def _each_in_turn(request: JobRequest) -> str:
    assert request.indices is not None
    numbers = " ".join(map(str, request.indices.numbers))
    return "\n".join(
        [
            comment("Without an argument one seed after the other, up to the first that is not completed."),
            "if (($# == 0)); then",
            f"    for index in {numbers}; do",
            '        bash "$0" "$index" || exit',
            "    done",
            "    exit",
            "fi",
        ]
    )


def _loop(request: JobRequest) -> str:
    words = mpirun_words(
        request,
        ranks=str(request.ranks),
        per_node=str(request.ranks_per_node),
        hosts=shlex.quote(request.hostfile) if request.nodes > 1 else None,
        crowded=True,
    )
    going_on = GoingOn(
        requeues="requeues",
        then='requeues=$((requeues + 1))\nsay "goes on from its checkpoint"\ncontinue',
    )
    limit, clock = [], []
    if request.time_s is not None:
        limit = [
            comment(
                "Each start asks for its last checkpoint `lead` seconds before so much time has passed for it."
            ),
            f"limit={request.time_s}",
            f"lead={request.signal_before_s}",
        ]
        clock = [stopping_in_time(request)]
    body = "\n".join(
        [
            *(["SECONDS=0", *time_left()] if clock else []),
            start_in_background(request, *clock, words, train_words(request)),
            "",
            decide(going_on, asked=True),
        ]
    )
    return "\n".join([*limit, "while :; do", textwrap.indent(body, "    "), "done"])
