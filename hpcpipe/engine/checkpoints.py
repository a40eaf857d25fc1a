"""Checkpoints of a running job: from the cut at each stage to the committed set.

Each rank copies the state of its stages when they pass the cut, writes its file in the background, and reports it
to rank 0, which commits the set once every rank has reported and then retires old ones. Nobody waits for anybody,
unless a cut comes while the write of the one before is not done. Names and bytes on disk belong to `checkpoint`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from hpcpipe.checkpoint.background import BackgroundWriter
from hpcpipe.checkpoint.interval import young_daly
from hpcpipe.checkpoint.layout import FileReport, new_set_directory, rank_name, set_name
from hpcpipe.engine.committing import Committer
from hpcpipe.engine.cuts import Cut, Cuts
from hpcpipe.engine.failures import reason_of
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import HostCopies
from hpcpipe.transport.reports import Reports
from hpcpipe.transport.wait import Condition, Waiter
from hpcpipe.transport.world import World

_WRITTEN = 1
_FAILED = 0
REPORT_LENGTH = 2 + len(FileReport._fields)


class _Outcome(NamedTuple):
    """How the write of one rank went: its report, or None and the errno."""

    rank: int
    report: FileReport | None
    number: int


class Checkpoints:
    """The checkpoints of one rank; `places` is how many stages (or replicas of one) it owns."""

    def __init__(self, committer: Committer, *, world: World, waiter: Waiter, places: int) -> None:
        self.copy_seconds = 0.0
        self._committer = committer
        self._world = world
        self._waiter = waiter
        self._writer = BackgroundWriter()
        self._writing = 0
        self._reports = Reports(world, waiter, length=REPORT_LENGTH)
        self._cuts = Cuts(places)
        self._copies: HostCopies | None = None
        self._uncommitted: defaultdict[int, list[_Outcome]] = defaultdict(list)
        self._directories: dict[int, Path] = {}

    @property
    def write_seconds(self) -> float:
        """What the last checkpoint cost this rank: copy and write, in seconds."""
        return self.copy_seconds + self._writer.seconds

    def optimal_interval(self, between_failures_s: float) -> float | None:
        """Seconds between checkpoints after Young and Daly, from the measured cost of the last one.

        0 before the first, which is due at once because it tells what one costs; None while that is being written.
        """
        if self._writer.seconds:
            return young_daly(self.write_seconds, between_failures_s)
        return None if self._writer.busy or self._cuts.pending else 0.0

    def take(self, runner: StageRunner) -> bool:
        """Copy the state of a stage that has just passed a cut; True when it was the rank's last stage to do so.

        The write of the whole rank then starts in the background.
        """
        step = runner.weights.newest
        if not self._cuts.knows(step):
            # One write at a time, so that its memory serves the next cut as well.
            self._finish_write()
        cut = self._cuts.take(runner)
        if cut is None:
            return False
        self._finish_write()
        self._write(step, cut)
        return True

    def poll(self) -> None:
        """Report a write that is done, and on rank 0 commit a set that is complete; cheap, never waits.

        Raises:
            FolderLostError: on rank 0, if the folder is no longer the run's, or too many sets in a row failed.
        """
        if self._writer.busy:
            self._report()
        if self._world.rank == 0:
            self._collect(self._reports.poll())

    def finish(self) -> int | None:
        """Wait for the last write and the last commit; the step committed last, the same on every rank.

        Raises:
            FolderLostError: on rank 0, as `poll`.
        """
        with self._waiter.patiently():
            self._finish_write()
            self._collect(self._reports.finish())
            step: int | None = self._world.broadcast_json(
                self._committer.committed, what="the step of the last checkpoint"
            )
        return step

    def _write(self, step: int, cut: Cut) -> None:
        self.copy_seconds = cut.seconds
        self._writing = step
        self._copies = cut.copies
        try:
            directory = self._directories[step] = new_set_directory(self._committer.root, step)
        except OSError as error:
            self._tell(_FAILED, error.errno or 0)
            return
        meta = {"step": step, "run": self._committer.run, "stages": cut.stage_metas}
        self._writer.submit(directory, self._world.rank, cut.copies.arrays, meta, cut.copies.bf16)

    def _finish_write(self) -> None:
        if self._writer.busy:
            with self._waiter.patiently():
                self._waiter.wait(
                    [Condition(self._report)],
                    f"the checkpoint of step {self._writing} to be written to {self._committer.root}",
                    kind="checkpoint",
                )

    def _report(self) -> bool:
        """Whether the write is done; if so rank 0 is told how it went."""
        try:
            report = self._writer.poll()
        except OSError as error:
            self._tell(_FAILED, error.errno or 0)
        else:
            if report is None:
                return False
            self._tell(_WRITTEN, *report)
        return True

    def _tell(self, outcome: int, *values: int) -> None:
        """Tell rank 0 how the write went: the report of the file, or the errno. The copies are free again."""
        fields = [*values, *([0] * (len(FileReport._fields) - len(values)))]
        self._reports.send([self._writing, outcome, *fields])
        if self._copies is not None:
            self._cuts.give_back(self._copies)
            self._copies = None

    def _collect(self, arrived: list[tuple[int, list[int]]]) -> None:
        for rank, (step, outcome, *fields) in arrived:
            outcomes = self._uncommitted[step]
            outcomes.append(_Outcome(rank, FileReport(*fields) if outcome == _WRITTEN else None, fields[0]))
            if len(outcomes) == self._world.size:
                self._commit(step, self._uncommitted.pop(step))

    def _commit(self, step: int, outcomes: list[_Outcome]) -> None:
        directory = self._directories.pop(step, self._committer.root / set_name(step))
        failed = [(outcome.rank, outcome.number) for outcome in outcomes if outcome.report is None]
        if failed:
            reason = reason_of(failed, lambda rank: directory / rank_name(rank))
            self._committer.failed(step, directory, reason)
        else:
            self._committer.commit(step, directory, [o.report for o in outcomes if o.report is not None])
