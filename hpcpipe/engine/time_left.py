"""How long the allocation of this job lasts, and a stop in time before its end.

Asked once at the start, of the variables and commands of Slurm; from then on measured on a clock that nobody sets.
A limit that is changed while the run goes on is not heard of.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from hpcpipe.transport.world import World

SQUEUE_TIMEOUT_S = 20.0
"""A busy controller may take seconds; the run starts without an answer as well."""
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_ENDLESS = ("UNLIMITED", "infinite")


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """Seconds left of the allocation, None where nothing tells; `source` is what told, or why nothing does."""

    seconds: float | None
    source: str


def time_left(
    environment: Mapping[str, str],
    *,
    now: Callable[[], float] = time.time,
    squeue: Callable[[str], str] | None = None,
) -> TimeLeft:
    """What the environment of a process says of the end of its allocation, or else Slurm itself.

    now: Unix time in seconds.
    squeue: the answer to `%A %L` for a job's number; raises OSError or SubprocessError where there is none.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and (left := int(end) - now()) > 0:
        return TimeLeft(seconds=left, source="SLURM_JOB_END_TIME")
    # An end that has passed is that of a job whose limit was raised, or of another one.
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return TimeLeft(seconds=None, source="neither SLURM_JOB_END_TIME nor SLURM_JOB_ID is set")
    try:
        answer = (squeue or _ask_squeue)(job)
    except (OSError, subprocess.SubprocessError) as error:
        return TimeLeft(seconds=None, source=f"squeue cannot be asked for the end of job {job} ({_brief(error)})")
    return _from_squeue(job, answer)


def _from_squeue(job: str, answer: str) -> TimeLeft:
    # For the number that is an array's as well as of one of its elements, there is a line for each element.
    lines = [line.split() for line in answer.splitlines()]
    left = next((words[1] for words in lines if len(words) == 2 and words[0] == job), None)
    if left is None:
        return TimeLeft(seconds=None, source=f"squeue does not know job {job}")
    if left in _ENDLESS:
        return TimeLeft(seconds=None, source=f"job {job} has no time limit")
    found = _LEFT.fullmatch(left)
    if found is None:
        return TimeLeft(seconds=None, source=f"squeue does not tell the end of job {job} ({left})")
    days, hours, minutes, seconds = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return TimeLeft(seconds=((days * 24.0 + hours) * 60 + minutes) * 60 + seconds, source="squeue")


def _ask_squeue(job: str) -> str:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%A %L"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_S, check=True)
    return asked.stdout


def _brief(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return " ".join((error.stderr or f"exit code {error.returncode}").split())
    return " ".join(str(error).split())


class Deadline:
    """The moment `before_s` seconds before the end of the allocation, on every rank; None: there is none to keep.

    Every rank makes one at the same time. Rank 0 alone asks; `remark` is what it has to say, elsewhere None.
    """

    def __init__(
        self,
        world: World,
        before_s: float | None,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        mine = asdict(time_left(environment)) if world.rank == 0 else None
        left = TimeLeft(**world.broadcast_json(mine, what="how long the allocation lasts"))
        self.remark = _remark(left, before_s) if world.rank == 0 else None
        self._clock = clock
        self._at = math.inf
        if left.seconds is not None and before_s is not None:
            self._at = clock() + left.seconds - before_s

    def passed(self) -> bool:
        """Whether the run should stop by itself."""
        return self._clock() >= self._at


def _remark(left: TimeLeft, before_s: float | None) -> str | None:
    if left.seconds is None:
        return None if before_s is None else f"run.stop_before has no effect: {left.source}"
    line = f"{in_words(left.seconds)} left of the allocation, says {left.source}"
    if before_s is None:
        return line
    if left.seconds <= before_s:
        return f"{line}: no more than run.stop_before ({in_words(before_s)}), so the run stops at its first cut"
    return f"{line}; the run stops {in_words(before_s)} before its end (run.stop_before)"


def in_words(seconds: float) -> str:
    """A length of time as "3 h 20 min", in its two largest units."""
    whole = round(seconds)
    units = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next((index for index, (count, _) in enumerate(units) if count), 3)
    shown = [f"{count} {unit}" for count, unit in units[first : first + 2] if count]
    return " ".join(shown) or "0 s"
