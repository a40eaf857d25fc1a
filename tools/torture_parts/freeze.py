"""Runs in which one rank is frozen for ever, as by a hung file system or a broken node.

The others cannot know more than that it does not answer. They end the job within the limit that the run file sets
and name the rank; the launcher kills the frozen one, and the run goes on from its newest set to the same bits.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .restart import check_restart
from .runs import REPLICATED, SMALL, Case, Setting, Unbroken, steps_of
from .trials import Task, Trial, noting

KIND = "freeze"
LIMIT_S = 6
"""What the run file allows: run.stall_abort_s. A rank's first passes can take seconds on a busy machine."""
ALLOWANCE_S = 5.0
"""How much later than that all processes may be gone."""

CASES = (
    REPLICATED,
    SMALL,
    Case("stash", "adamw", (1, 1, 1)),
    Case("vertical_sync", "adamw", (1, 1, 1, 1)),
    Case("none", "sgd", (1, 2, 1)),
)


def tasks(count: int, setting: Setting) -> Iterator[Task]:
    """Tasks that together freeze so many ranks."""
    cases = setting.among(CASES, otherwise=SMALL)
    for number in range(count):
        yield _task(cases[(setting.seed + number) % len(cases)], number, setting)


def _task(case: Case, number: int, setting: Setting) -> Task:
    name, folder = f"{setting.seed}/{KIND}/{number}", setting.work / f"{KIND}-{number}"
    return lambda: [_trial(setting.references.of(case), name, folder, setting.limit_s)]


def _trial(unbroken: Unbroken, name: str, folder: Path, limit_s: float) -> Trial:
    case, rng = unbroken.case, random.Random(name)
    rank, at, more_s = rng.randrange(case.ranks), rng.randrange(1, case.steps - 60), rng.uniform(0.0, 0.02)
    what = f"{case.name}: SIGSTOP to rank {rank}, {1e3 * more_s:.0f} ms after step {at}"
    trial = Trial(kind=KIND, name=name, what=what, folder=folder, about=(f"of {case.ranks} ranks",))
    with noting(trial):
        _freeze(trial, unbroken, rank, at, more_s, limit_s)
        check_restart(trial, unbroken, limit_s=limit_s)
    return trial


def _freeze(trial: Trial, unbroken: Unbroken, rank: int, at: int, more_s: float, limit_s: float) -> None:
    case, out = unbroken.case, trial.folder / "out"
    settings = [f"run.stall_abort_s={LIMIT_S}", f"run.stall_warning_s={LIMIT_S / 2}"]
    with case.job(trial.folder, "frozen", *settings) as job:
        ready = job.until(lambda: steps_of(out) >= at, limit_s=limit_s) and job.runs_for(more_s)
        frozen = job.ranks().get(rank)
        if not ready or frozen is None:
            trial.fail("the job ended before a rank was frozen; see frozen.log")
            return
        os.kill(frozen, signal.SIGSTOP)
        since = time.monotonic()
        code = job.end(limit_s=max(limit_s, 2 * (LIMIT_S + ALLOWANCE_S)))
        trial.seconds = time.monotonic() - since
        said = job.said()
    if code == 0:
        trial.fail("the job ended with exit code 0")
    if trial.seconds > LIMIT_S + ALLOWANCE_S:
        trial.fail(f"it ended {trial.seconds:.1f} s after the freeze, not within {LIMIT_S} + {ALLOWANCE_S:g} s")
    if not re.search(rf"\brank {rank}\b[^;,]* on host \S+ does not answer", said):
        trial.fail(f"nothing says that rank {rank} does not answer; see frozen.log")
