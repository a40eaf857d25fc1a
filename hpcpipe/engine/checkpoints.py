"""Checkpoints of a running job: from the cut at each stage to the committed set.

Each rank copies the state of its stages when they pass the cut, writes its file in the background, and reports it
to rank 0, which commits the set once every rank has reported and then retires old ones. Nobody waits for anybody,
unless a cut comes while the write of the one before is not done. Names and bytes on disk belong to `checkpoint`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.background import BackgroundWriter
from hpcpipe.checkpoint.interval import young_daly
from hpcpipe.checkpoint.layout import FileReport, new_set_directory
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.retention import retire
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import HostCopies, named_state, stage_meta
from hpcpipe.errors import HpcpipeError
from hpcpipe.transport.reports import Reports
from hpcpipe.transport.wait import Condition, Waiter
from hpcpipe.transport.world import World

_WRITTEN = 1
_FAILED = 0
REPORT_LENGTH = 2 + len(FileReport._fields)


@dataclass(kw_only=True)
class _Cut:
    """A cut that some of the rank's stages have passed; the stage of the loss may be at the next one already."""

    copies: HostCopies
    stage_metas: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one rank.

    `places` is how many stages (or replicas of one) the rank owns, `meta` the JSON that describes the run; `say`
    takes a line for the user. `committed` is the step (minibatches applied) of the newest set that rank 0 has
    committed, None before the first.
    """

    def __init__(
        self,
        root: Path,
        *,
        world: World,
        waiter: Waiter,
        places: int,
        meta: dict[str, Any],
        keep_last: int,
        keep_every: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.committed: int | None = None
        self.copy_seconds = 0.0
        self._root = root
        self._world = world
        self._waiter = waiter
        self._places = places
        self._meta = meta
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._say = say
        self._writer = BackgroundWriter()
        self._writing = 0
        self._reports = Reports(world, waiter, length=REPORT_LENGTH)
        self._gathering: dict[int, _Cut] = {}
        self._spare: list[HostCopies] = []
        self._copies: HostCopies | None = None
        self._uncommitted: defaultdict[int, list[FileReport | None]] = defaultdict(list)
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
        return None if self._writer.busy or self._gathering else 0.0

    def take(self, runner: StageRunner) -> bool:
        """Copy the state of a stage that has just passed a cut; True when it was the rank's last stage to do so.

        The write of the whole rank then starts in the background.
        """
        step = runner.weights.newest
        cut = self._gathering.get(step) or self._begin(step)
        began = time.perf_counter()
        for path, tensor in named_state(runner):
            cut.copies.copy(path, tensor)
        cut.stage_metas[str(runner.stage.index)] = stage_meta(runner)
        cut.seconds += time.perf_counter() - began
        if len(cut.stage_metas) < self._places:
            return False
        self._finish_write()
        self._write(step, self._gathering.pop(step))
        return True

    def poll(self) -> None:
        """Report a write that is done, and on rank 0 commit a set that is complete; cheap, never waits."""
        if self._writer.busy:
            self._report()
        if self._world.rank == 0:
            self._collect(self._reports.poll())

    def finish(self) -> int | None:
        """Wait for the last write and the last commit; the step committed last, the same on every rank."""
        with self._waiter.patiently():
            self._finish_write()
            self._collect(self._reports.finish())
            step: int | None = self._world.broadcast_json(self.committed, what="the step of the last checkpoint")
        return step

    def _begin(self, step: int) -> _Cut:
        # One write at a time, so that its memory serves the next cut as well.
        self._finish_write()
        copies = self._spare.pop() if self._spare else HostCopies()
        copies.clear()
        cut = self._gathering[step] = _Cut(copies=copies)
        return cut

    def _write(self, step: int, cut: _Cut) -> None:
        self.copy_seconds = cut.seconds
        self._writing = step
        self._copies = cut.copies
        directory = self._directories[step] = new_set_directory(self._root, step)
        meta = {"step": step, "stages": cut.stage_metas}
        self._writer.submit(directory, self._world.rank, cut.copies.arrays, meta, cut.copies.bf16)

    def _finish_write(self) -> None:
        if self._writer.busy:
            with self._waiter.patiently():
                self._waiter.wait(
                    [Condition(self._report)],
                    f"the checkpoint of step {self._writing} to be written to {self._root}",
                    kind="checkpoint",
                )

    def _report(self) -> bool:
        """Whether the write is done; if so rank 0 is told how it went."""
        try:
            report = self._writer.poll()
        except OSError as error:
            self._say(f"rank {self._world.rank}: checkpoint of step {self._writing} was NOT written: {error}")
            self._reports.send([self._writing, _FAILED, *([0] * len(FileReport._fields))])
        else:
            if report is None:
                return False
            self._reports.send([self._writing, _WRITTEN, *report])
        if self._copies is not None:
            self._spare.append(self._copies)
            self._copies = None
        return True

    def _collect(self, arrived: list[tuple[int, list[int]]]) -> None:
        for _, (step, outcome, *fields) in arrived:
            reports = self._uncommitted[step]
            reports.append(FileReport(*fields) if outcome == _WRITTEN else None)
            if len(reports) == self._world.size:
                self._commit(step, self._uncommitted.pop(step))

    def _commit(self, step: int, reports: list[FileReport | None]) -> None:
        directory = self._directories.pop(step)
        whole = [report for report in reports if report is not None]
        if len(whole) < len(reports):
            self._say(f"checkpoint of step {step} is not committed: {len(reports) - len(whole)} ranks failed")
            return
        try:
            commit(directory, whole, {**self._meta, "step": step})
        except (OSError, HpcpipeError) as error:
            self._say(f"checkpoint of step {step} is not committed: {error}")
            return
        self.committed = step
        try:
            faults = retire(self._root, self._keep_last, self._keep_every).faults
        except HpcpipeError as error:
            faults = [str(error)]
        for fault in faults:
            self._say(f"an old checkpoint is still there: {fault}")
