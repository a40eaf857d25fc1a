"""Runs that are killed again and again, and go on each time from where a set was committed.

A run is killed at random moments and at chosen ones (while a file is written, just after a commit, while a set is
deleted), in one rank, all of them or the launcher, and is started again with `--resume auto` until it ends.
Each of its kills is as specified if the start after it goes on from the newest set that was valid when all was
quiet, or from step 0 without one, and if the run comes to the digest and every loss of an unbroken one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcpipe.checkpoint.layout import COMMIT_NAME

from .jobs import HungError, Job, kill
from .runs import READY, REPLICATED, SMALL, Case, Setting, Unbroken, started_at
from .trials import Task, Trial

KIND = "kills"
KILLS_PER_RUN = 10
ENDS_WITHIN_S = 10.0
"""How soon after a kill every process of the job has to be gone."""
POLL_S = 2e-4

CASES = (
    SMALL,
    REPLICATED,
    Case("vertical_sync", "adamw", (1, 1)),
    Case("none", "sgd", (1, 1)),
    Case("stash", "adamw", (1, 1, 1)),
    Case("spectrain", "sgd", (1, 1), every=2),
    Case("spectrain", "sgd", (1, 2, 1)),
    Case("vertical_sync", "sgd", (1, 1)),
    Case("none", "adamw", (1, 1), width=128),
    Case("spectrain", "sgd", (3, 1)),
    Case("stash", "adamw", (1, 1), every=7),
    Case("vertical_sync", "adamw", (1, 1, 1, 1)),
)

# How often a kill comes at which moment, and what it hits.
MOMENTS = {"start-up": 2, "training": 9, "write": 5, "commit": 2, "retention": 2}
VICTIMS = {"one rank": 6, "all ranks": 2, "the launcher": 2}


@dataclass(frozen=True)
class Draw:
    """One kill as it was drawn: when, how long after that (a share of what there is), and whom."""

    moment: str
    share: float
    victim: str
    pick: float

    @classmethod
    def from_seed(cls, seed: str) -> Draw:
        rng = random.Random(seed)
        (moment,) = rng.choices(list(MOMENTS), list(MOMENTS.values()))
        (victim,) = rng.choices(list(VICTIMS), list(VICTIMS.values()))
        return cls(moment, rng.random(), victim, rng.random())


class SetWatch:
    """Looks at a folder of sets for the moments at which a kill could do harm; cheap to ask again and again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._committed = self._with_record(self._folders())

    def write(self) -> bool:
        """Whether a file of the newest set stands under the name that it has until it is whole."""
        with suppress(FileNotFoundError):
            newest = max(self._folders(), default=None)
            return newest is not None and any(name.endswith(".tmp") for name in os.listdir(newest))
        return False

    def commit(self) -> bool:
        """Whether a commit record has come since the last look."""
        before, self._committed = self._committed, self._with_record(self._folders())
        return bool(self._committed - before)

    def retention(self) -> bool:
        """Whether a set that was committed has lost its record and is still there."""
        folders = self._folders()
        committed = self._with_record(folders)
        being_deleted = (self._committed - committed) & set(folders)
        self._committed |= committed
        return bool(being_deleted)

    def left_behind(self) -> str:
        """What a killed job has left, in words that tell what it was at."""
        folders = sorted(self._folders())
        if not self._committed:
            return "before the first set"
        if self.write():
            return "in the middle of a file"
        if folders[-1] not in self._committed:
            return "before a commit"
        return "between two sets" if len(folders) == len(self._committed) else "in the middle of a deletion"

    def _folders(self) -> list[str]:
        try:
            return [entry.path for entry in os.scandir(self._root) if entry.name.startswith("step-")]
        except FileNotFoundError:
            return []

    @staticmethod
    def _with_record(folders: list[str]) -> set[str]:
        return {folder for folder in folders if os.path.exists(os.path.join(folder, COMMIT_NAME))}


def tasks(count: int, setting: Setting) -> Iterator[Task]:
    """Tasks that together kill `count` times, over all kinds of runs."""
    cases = [case for case in CASES if case.ranks in setting.ranks]
    cases += [replace(SMALL, replicas=(1,) * size) for size in setting.ranks if size > 4]
    for number, done in enumerate(range(0, count, KILLS_PER_RUN)):
        case = cases[(setting.seed * 5 + number) % len(cases)]
        yield _task(case, number, min(KILLS_PER_RUN, count - done), setting)


def _task(case: Case, number: int, quota: int, setting: Setting) -> Task:
    seed, folder = f"{setting.seed}/{KIND}/{number}", setting.work / f"{KIND}-{number}"
    return lambda: Campaign(setting.references.of(case), seed, folder, setting.limit_s).run(quota)


class Campaign:
    """One kind of run, killed a number of times; when it ends before that, another of its kind is begun."""

    def __init__(self, unbroken: Unbroken, seed: str, folder: Path, limit_s: float) -> None:
        self._unbroken = unbroken
        self._case = unbroken.case
        self._seed = seed
        self._parent = folder
        self._limit_s = limit_s
        self._trials: list[Trial] = []
        self._lives = 0
        self._runs = 0
        self._begin()

    def run(self, quota: int) -> list[Trial]:
        """Kill that often, and let the last run come to its end; one trial a kill."""
        while len(self._trials) < quota or self._open:
            draw = Draw.from_seed(f"{self._seed}/{self._lives}") if len(self._trials) < quota else None
            self._live(draw)
        return self._trials

    def _begin(self) -> None:
        """Go over to another run, which starts at step 0."""
        self._folder = self._parent / f"run-{self._runs}"
        self._runs += 1
        self._open: list[Trial] = []
        self._expected = 0

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "out" / "checkpoints"

    def _live(self, draw: Draw | None) -> None:
        """Start the run, or go on with it, until it is killed or ends."""
        self._lives += 1
        with self._case.job(self._folder, f"life-{self._lives}") as job:
            trial = None
            try:
                trial = None if draw is None else self._strike(job, draw)
                since = time.monotonic()
                code = job.end(limit_s=self._limit_s)
            except HungError as hung:
                if trial is not None:
                    self._note(trial)
                self._give_up(str(hung), hung=True)
                return
            seconds = time.monotonic() - since
            said = job.said()
        start = started_at(said)
        if start not in (None, self._expected):
            self._blame(f"the start after it went on from step {start}, not from {self._expected}")
        # A job that was about to end anyway was not killed.
        if code == 0:
            self._judge()
        elif trial is None:
            self._give_up(f"the run ended with exit code {code}; see life-{self._lives}.log")
        else:
            trial.seconds = seconds
            self._note(trial)
            self._look(trial)

    def _strike(self, job: Job, draw: Draw) -> Trial | None:
        """Kill at the moment that was drawn; None if the job ended before."""
        if draw.moment == "start-up":
            came, ranks = job.runs_for(draw.share * self._unbroken.start_s), job.ranks()
        else:
            came = job.until(lambda: READY in job.said(), limit_s=self._limit_s)
            # Looked up in good time: a moment does not last long enough for it.
            ranks = job.ranks()
            came = came and job.runs_for(draw.share * self._unbroken.train_s / (KILLS_PER_RUN - 2))
        if came and draw.moment in ("write", "commit", "retention"):
            holds = getattr(SetWatch(self._checkpoints), draw.moment)
            came = job.until(holds, limit_s=self._limit_s, poll_s=POLL_S)
        if not came:
            return None
        # Before the ranks are there, only the launcher can be hit.
        whom = draw.victim if ranks else "the launcher"
        pids = {"one rank": [], "all ranks": list(ranks.values()), "the launcher": [job.launcher]}[whom]
        which = whom
        if whom == "one rank":
            rank = sorted(ranks)[int(draw.pick * len(ranks))]
            pids, which = [ranks[rank]], f"rank {rank}"
        kill(pids)
        what = f"{self._case.name}, life {self._lives}: SIGKILL to {which} at a moment of {draw.moment}"
        name = f"{self._seed}/{self._lives - 1}"
        return Trial(kind=KIND, name=name, what=what, folder=self._parent, about=(f"of {whom}",))

    def _note(self, trial: Trial) -> None:
        self._trials.append(trial)
        self._open.append(trial)

    def _look(self, trial: Trial) -> None:
        """What is on the disk once all is quiet decides where the next life has to start."""
        if trial.seconds > ENDS_WITHIN_S:
            trial.fail(f"the job was gone {trial.seconds:.1f} s after the kill only")
        self._expected, difference = self._unbroken.newest_differs(self._checkpoints)
        trial.about += (SetWatch(self._checkpoints).left_behind(),)
        if difference is not None:
            trial.fail(difference, wrong=True)

    def _judge(self) -> None:
        """The run has come to its end: all its kills are judged by what it came to."""
        difference = self._unbroken.differs(self._folder / "out")
        if difference is not None:
            for trial in self._open:
                trial.fail(difference, wrong=True)
        self._begin()

    def _give_up(self, words: str, *, hung: bool = False) -> None:
        """Nothing can be said of what this run would have come to, so its other kills failed as well."""
        self._blame(words, hung=hung)
        for trial in self._open[:-1]:
            trial.fail("a later life of the run failed, so it came to nothing")
        self._begin()

    def _blame(self, words: str, *, hung: bool = False) -> None:
        """A fault of the last kill of this run, or, where there was none, a trial of its own."""
        if not self._open:
            what = f"{self._case.name}, life {self._lives}: not killed"
            self._note(Trial(kind=KIND, name=f"{self._seed}/{self._lives - 1}", what=what, folder=self._parent))
        self._open[-1].fail(words, hung=hung)
