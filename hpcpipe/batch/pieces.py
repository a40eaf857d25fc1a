"""The bash that scripts of all schedulers share: the folder, what was gained, signals passed on, whether to go on.

Pieces are paragraphs without an empty line at either end; `paragraphs` joins them.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcpipe.batch.request import JobRequest
from hpcpipe.errors import EXIT_REQUEUE

FOLDER = "HPCPIPE_FOLDER"
"""The variable that names the run's folder to a script, to go on with what another job began."""
WIDTH = 110
KEEPS_ITS_NUMBER = (
    "A requeued job keeps its number, and with it its folder, where --resume auto finds its checkpoint."
)


def paragraphs(parts: Iterable[str | None]) -> str:
    """A script of these paragraphs; None is left out."""
    return "\n\n".join(part for part in parts if part is not None) + "\n"


def comment(text: str) -> str:
    """A text of any length as lines of comment."""
    return "\n".join(f"# {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH - 2))


def command_lines(*parts: Sequence[str]) -> str:
    """One command of these parts, each beginning a line; their items, quoted already, stay whole."""
    lines: list[str] = []
    for items in parts:
        indent = "    " if lines else ""
        lines.append(indent + items[0])
        for item in items[1:]:
            if len(lines[-1]) + len(item) > WIDTH - 3:
                lines.append(f"    {item}")
            else:
                lines[-1] += f" {item}"
    return " \\\n".join(lines)


def setting_up(request: JobRequest, directory: str | None) -> str:
    """Where to work and what to load. `directory` is bash for where the job was submitted, None if it is there.

    Scripts of modules and of virtual environments read unset variables, so nounset comes after them.
    """
    lines = []
    if request.directory is not None:
        lines += [f"cd {shlex.quote(request.directory)} || exit"]
    elif directory is not None:
        lines += [f'cd "{directory}" || exit']
    return "\n".join([*lines, *request.setup, "set -uo pipefail"])


def folder(request: JobRequest, job: str, index: str | None) -> str:
    """`out`, and `index` in a job array. `job` and `index` are bash for the numbers of the job and of its part.

    A job array keeps `base`, so that its parts can be told where to go on one by one.
    """
    own = f"{shlex.quote(request.out)}-{job}" if request.out_by_job else shlex.quote(request.out)
    if index is None:
        return f"out=${{{FOLDER}:-{own}}}"
    return f"index={index}\nbase=${{{FOLDER}:-{own}}}\nout=${{base}}_$index"


def functions(request: JobRequest) -> str:
    """`say`, and `newest`: what is compared to see whether a run has gained anything."""
    return f"""\
say() {{ printf '%s: %s\\n' {request.name} "$*" >&2; }}

# The newest committed checkpoint: text that sorts by step and attempt; nothing where there is none.
newest() {{
    local record key best=""
    for record in "$out"/checkpoints/step-*/commit.json; do
        [[ $record =~ /step-([0-9]+)(\\.([0-9]+))?/commit\\.json$ ]] || continue
        printf -v key '%018d.%09d' "$((10#${{BASH_REMATCH[1]}}))" "$((10#${{BASH_REMATCH[3]:-0}}))"
        [[ $key > $best ]] && best=$key
    done
    printf '%s\\n' "$best"
}}"""


def environment(request: JobRequest, threads: str) -> str:
    """Variables that the ranks need; `threads` is bash for the cores of each rank."""
    lines = [
        comment("As many threads as cores were asked for; the host may have more."),
        f"export OMP_NUM_THREADS={threads}",
    ]
    if request.netmod is not None:
        lines += [
            comment(
                "For the mpich package from pip: the addresses of its other network layer, UCX, do not fit into a "
                "message of Slurm's PMI, and ranks would not start."
            ),
            f"export MPIR_CVAR_CH4_NETMOD={request.netmod}",
        ]
    return "\n".join(lines)


def start_in_background(request: JobRequest, *parts: Sequence[str]) -> str:
    """Start the command of `parts`, as `command_lines` takes them, and wait for it; sets `before` and `code`."""
    return "\n".join(["before=$(newest)", command_lines(*parts) + " &", wait_for_ranks(request)])


def wait_for_ranks(request: JobRequest) -> str:
    """Behind a command in the background: pass signals on to it, and get its exit code.

    `asked` then says who asked for a stop: "limit", "end", or nobody.
    """
    on = f'kill -{request.signal} "$ranks"'
    return "\n".join(
        [
            "ranks=$!",
            'asked=""',
            comment(
                "A warning of the time limit asks the ranks for a checkpoint. So does an end from outside, after "
                "which nothing may start again."
            ),
            f"trap 'asked=${{asked:-limit}}; {on}' {request.signal}",
            f"trap 'asked=end; {on}' TERM INT",
            comment("A signal ends `wait` before the ranks have ended."),
            'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done',
            'wait "$ranks"',
            "code=$?",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class GoingOn:
    """How a script goes on after 75.

    requeues: bash for how often it did already.
    names: assignments that `by` and the reasons use.
    unless: more (test, reason) for not going on, in words of bash.
    by: the command that does it, None if there is nothing that could fail; `failed` is the reason if it fails.
    then: what follows its success.
    otherwise: the last line of a script that does not go on.
    """

    requeues: str
    then: str
    by: str | None = None
    failed: str = ""
    names: Sequence[str] = ()
    unless: Sequence[tuple[str, str]] = ()
    otherwise: str = f"exit {EXIT_REQUEUE}"


def decide(going_on: GoingOn, *, asked: bool) -> str:
    """What follows from `code`: exit with it, or go on. `asked`: whether the script has such a variable."""
    cases = [
        *([("[[ $asked == end ]]", "it was asked to end")] if asked else []),
        ("[[ -e $out/STOP ]]", "$out/STOP asked for it; remove that file to go on"),
        ("[[ ! $(newest) > $before ]]", "no step was gained since it started"),
        (f"(({going_on.requeues} >= max_requeues))", "max_requeues=$max_requeues is reached"),
        *going_on.unless,
    ]
    branches = [f'elif {test}; then\n    why="{reason}"' for test, reason in cases]
    return "\n".join(
        [
            *going_on.names,
            comment(
                f"0: the run is complete. {EXIT_REQUEUE}: it stopped on request and has left a checkpoint, so the "
                "same command goes on from there. Anything else wants to be looked at, and is not repeated."
            ),
            f'if ((code != {EXIT_REQUEUE})); then\n    exit "$code"',
            *branches,
            "else" if going_on.by is None else f"elif {going_on.by}; then",
            textwrap.indent(going_on.then, "    "),
            *([] if going_on.by is None else [f'else\n    why="{going_on.failed}"']),
            "fi",
            'say "stopped with a checkpoint in $out and not started again: $why"',
            going_on.otherwise,
        ]
    )
