"""Runs whose checkpoints meet a full disk.

The disk of the checkpoints is a small one of the trial's own, filled at a random moment to less room than a set
needs. Either there is room again later, and the run goes on writing and ends as the unbroken one. Or there is not,
and it ends with exit code 1, after so many failures in a row or at its last checkpoint; with room again, it can be
started again and goes on from its newest set. The sets from before are whole all the time.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcpipe.checkpoint.layout import parse_set_name
from hpcpipe.errors import EXIT_FAILURE

from .jobs import Job
from .restart import check_end, check_restart
from .runs import LARGE, Case, Setting, Unbroken, steps_of
from .trials import Task, Trial, noting

KIND = "disk-full"
LOUD = "was NOT WRITTEN"
"""What a run says of a checkpoint that it has lost."""
LAST_WORDS = {
    "too many failures": "in a row could not be written, so the run ends",
    "full to the end": "the last checkpoint, of step",
}
SETS = 5
"""How many sets the disk has room for: those that are kept, and the one that is written."""
POLL_S = 1e-3

CASES = (
    LARGE,
    Case("stash", "adamw", (2, 1), every=10, width=128),
)
ENDINGS = ("room again", *LAST_WORDS)


class Disk:
    """Where the checkpoints go: a small file system at `path`, or a limit on the length of the job's files.

    `largest_set` and `largest_file` are bytes.
    """

    def __init__(self, path: Path, *, mounted: bool, largest_set: int, largest_file: int) -> None:
        self._ballast = path / "ballast"
        self._mounted = mounted
        self._largest_set = largest_set
        self._largest_file = largest_file
        self._limited: dict[int, tuple[int, int]] = {}

    def fill(self, job: Job, share: float) -> None:
        """Leave less room than a set needs, `share` of it; to be called again, as the run makes room by itself."""
        if not self._mounted:
            # Longer than a metrics file, so that only checkpoints meet it.
            self._limit(job, int((0.5 + share / 3) * self._largest_file))
            return
        status = os.statvfs(self._ballast.parent)
        too_much = status.f_bavail * status.f_frsize - int(share * self._largest_set)
        if too_much > 0:
            # The run may be quicker and take some of it.
            with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
                file.write(bytes(too_much))

    def make_room(self) -> None:
        """Take away what `fill` has put there."""
        self._ballast.unlink(missing_ok=True)
        for pid, before in self._limited.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        self._limited.clear()

    def _limit(self, job: Job, length: int) -> None:
        if not self._limited:
            self._limited = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in job.ranks().values()}
            for pid, (_, hard) in self._limited.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (length, hard))


@contextmanager
def disk_at(path: Path, unbroken: Unbroken, *, mount: bool) -> Iterator[Disk]:
    """A disk for the checkpoints of such a run, for the block: mounted where we may and `mount` allows it."""
    path.mkdir(parents=True)
    sets = [folder for folder in (unbroken.out / "checkpoints").iterdir() if parse_set_name(folder.name)]
    # Files take whole pages there.
    sizes = [[file.stat().st_size + 4096 for file in folder.iterdir()] for folder in sets]
    largest = max(map(sum, sizes))
    words = ["mount", "-t", "tmpfs", "-o", f"size={SETS * largest}", "tmpfs", str(path)]
    permitted = mount and os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = permitted and subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield Disk(path, mounted=mounted, largest_set=largest, largest_file=max(map(max, sizes)))
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], capture_output=True, check=True)


def tasks(count: int, setting: Setting) -> Iterator[Task]:
    """Tasks that together fill so many disks."""
    cases = setting.among(CASES, otherwise=LARGE)
    for number in range(count):
        # One ending after the other, each with every case in turn.
        yield _task(cases[number // len(ENDINGS) % len(cases)], number, setting)


def _task(case: Case, number: int, setting: Setting) -> Task:
    name, folder = f"{setting.seed}/{KIND}/{number}", setting.work / f"{KIND}-{number}"
    ending = ENDINGS[number % len(ENDINGS)]

    def task() -> list[Trial]:
        unbroken = setting.references.of(case)
        trial = Trial(kind=KIND, name=name, what=f"{case.name}: {ending}", folder=folder, about=(ending,))
        checkpoints = folder / "out" / "checkpoints"
        with disk_at(checkpoints, unbroken, mount=setting.mount) as disk:
            with noting(trial):
                _Filling(trial, unbroken, disk, random.Random(name), setting.limit_s).go(ending)
            if not trial.as_specified:
                # The disk goes with the trial.
                shutil.copytree(
                    checkpoints, folder / "checkpoints-as-found", ignore=shutil.ignore_patterns("ballast")
                )
        return [trial]

    return task


class _Filling:
    """One trial: the run until its disk is full, what comes of that, and how it goes on."""

    def __init__(self, trial: Trial, unbroken: Unbroken, disk: Disk, rng: random.Random, limit_s: float) -> None:
        self._trial = trial
        self._unbroken = unbroken
        self._disk = disk
        self._limit_s = limit_s
        self._out = trial.folder / "out"
        self._at = rng.randrange(2 * unbroken.case.every, unbroken.case.steps // 2)
        self._share = rng.uniform(0.0, 0.9)
        self._failures = rng.randrange(2, 5)
        self._later = rng.randrange(1, 40)
        trial.what += f", full from step {self._at} on but for {self._share:.0%} of a set"

    def go(self, ending: str) -> None:
        """Do it; everything that is not as specified is noted in the trial."""
        case, trial = self._unbroken.case, self._trial
        failures = self._failures if ending == "too many failures" else 0
        with case.job(trial.folder, "full", f"checkpoint.max_failures={failures}") as job:
            job.until(lambda: steps_of(self._out) >= self._at, limit_s=self._limit_s)
            since = time.monotonic()
            lost = job.until(lambda: self._is_full(job), limit_s=self._limit_s, poll_s=POLL_S)
            if not lost and ending == "room again":
                trial.fail("no checkpoint was lost, or nothing tells of it")
                return
            self._look()
            if ending == "room again":
                until = steps_of(self._out) + self._later
                job.until(lambda: steps_of(self._out) >= until, limit_s=self._limit_s)
                self._look()
                self._disk.make_room()
                code = job.end(limit_s=self._limit_s)
            else:
                job.until(lambda: self._is_full(job) and False, limit_s=self._limit_s, poll_s=POLL_S)
                code = job.end(limit_s=self._limit_s)
                self._disk.make_room()
            trial.seconds = time.monotonic() - since
            said = job.said()
        if ending == "room again":
            if code:
                trial.fail(f"the run ended with exit code {code} although there was room again")
            check_end(trial, self._unbroken)
        else:
            if code != EXIT_FAILURE:
                trial.fail(f"the run ended with exit code {code}, not with {EXIT_FAILURE}")
            if LAST_WORDS[ending] not in said:
                trial.fail(f"its last words are not {LAST_WORDS[ending]!r}")
            self._look()
            check_restart(trial, self._unbroken, limit_s=self._limit_s)

    def _is_full(self, job: Job) -> bool:
        self._disk.fill(job, self._share)
        return LOUD in job.said()

    def _look(self) -> None:
        """There has to be a newest set, and it has to hold what the unbroken run had at that step."""
        step, difference = self._unbroken.newest_differs(self._out / "checkpoints")
        if step == 0:
            self._trial.fail("no set from before the disk was full is left")
        if difference is not None:
            self._trial.fail(difference, wrong=True)
