"""The folder of a run, shared by all its ranks: whether this run may have it, and which checkpoint in it to take.

Rank 0 alone looks at it, holds its lock and writes; the others hear what it found. How to go on from a checkpoint
is decided in `restore`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hpcpipe.checkpoint.layout import COMMIT_NAME
from hpcpipe.checkpoint.origin import SETS_NAME, Run, read_run, run_of, write_run
from hpcpipe.checkpoint.sets import CheckpointSet, choose, find_sets, newest_valid
from hpcpipe.config import RunConfig
from hpcpipe.durable import replace_file
from hpcpipe.engine.failures import in_words
from hpcpipe.engine.folder_lock import FolderLock
from hpcpipe.engine.lock_holder import Holder
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.restore import Resume, as_json, decide
from hpcpipe.engine.signals import STOP_NAME
from hpcpipe.errors import CheckpointError, FolderError, PlanError
from hpcpipe.observe.progress import say as say_always
from hpcpipe.schedule import Schedule
from hpcpipe.transport.world import World


class RunFolder:
    """The folder at `path` in the hands of one run, from `claim` to the end of a `with` block, where it is let go.

    `resume` is "auto", a path, or None for a fresh start; `overwrite` lets that bury what is there; `say` takes a
    line for the user. `run` is the id of the run, the same on every rank, once `choose_start` has returned.
    """

    def __init__(
        self, path: Path, *, world: World, resume: str | None, overwrite: bool, say: Callable[[str], None]
    ) -> None:
        self.path = path
        self.run: str | None = None
        self._lock: FolderLock | None = None
        self._made = False
        self._lost: list[str] = []
        self._world = world
        self._resume = resume
        self._overwrite = overwrite
        self._say = say

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoint sets are."""
        return self.path / SETS_NAME

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._made:
            # Only where nothing has come into it: a run that was refused leaves nothing behind.
            with suppress(OSError):
                self.path.rmdir()

    def claim(self) -> None:
        """See that this run, and no other, may write here, before anything costly is done; every rank calls it.

        Raises CheckpointError if the folder holds checkpoints that a fresh start would bury, FolderError if
        another run has it, it cannot be written, or a file in it would stop the run again.
        """
        # A lock that another host left may have to be watched for longer than ranks wait for each other.
        with self._world.waiter.patiently(), self._world.together("taking the folder of the run"):
            if self._world.rank == 0:
                self._refuse_to_stop_again()
                self._take()
                self._refuse_to_bury()

    def check(self) -> None:
        """On rank 0, see that the folder is still this run's.

        Raises FolderLostError if it is not, OSError if it cannot be looked at.
        """
        if self._lock is not None:
            self._lock.check()

    def choose_start(self, plan: Plan, schedule: Schedule, config: RunConfig) -> Resume | None:
        """Where the run goes on from, None for step 0; every rank calls it and gets the same.

        Raises CheckpointError, on rank 0, for a checkpoint that cannot be used.
        """
        resume = None
        if self._world.rank == 0:
            known = None if self._resume is None else read_run(self.path)
            found, run = self._start(known)
            if found is not None:
                resume = decide(found, plan, schedule, config)
            elif self._overwrite:
                self._discard_checkpoints()
            if run != known:
                self._write(run)
            self.keep("run.toml", lambda path: replace_file(path, config.to_toml().encode()))
            self.run = run.id
        heard = self._world.broadcast_json([as_json(resume), self.run], what="rank 0 to choose where to start")
        self.run = heard[1]
        return None if heard[0] is None else Resume(**heard[0])

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """On rank 0, have `write` put a file into the folder that the run can do without, as on a full disk.

        That it could not is said at once, and again by `remind`.
        """
        try:
            write(self.path / name)
        except (OSError, PlanError) as error:
            self._lost.append(name)
            say_always(f"{self.path / name} was NOT WRITTEN, the run goes on without: {in_words(error)}")

    def remind(self) -> None:
        """Say which files are missing in the folder, if any."""
        if self._lost:
            say_always(f"{self.path} lacks what could not be written: {', '.join(self._lost)}")

    def _take(self) -> None:
        try:
            self._made = not self.path.exists()
            if not self._made and not self.path.is_dir():
                raise FolderError(f"{self.path}: is no folder: choose another one with --out")
            self.path.mkdir(parents=True, exist_ok=True)
            known = None if self._resume is None else read_run(self.path)
            holder = Holder.here(None if known is None else known.id)
            self._lock = FolderLock.take(self.path, holder, say=self._say)
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, run: Run) -> None:
        try:
            write_run(self.path, run)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> FolderError:
        return FolderError(
            f"{self.path}: cannot be written ({error.strerror}): mend that, or choose another folder with --out"
        )

    def _start(self, known: Run | None) -> tuple[CheckpointSet | None, Run]:
        """The set to go on from (None: step 0), and the run that this is; `known` is what the folder says."""
        if self._resume is None:
            return None, Run.new()
        found: CheckpointSet | None
        if self._resume == "auto":
            run = known or self._adopted() or Run.new()
            found, skipped = newest_valid(self.checkpoints, home=run.id)
        else:
            found, skipped = self._named(Path(self._resume))
            run = self._run_from(found, known)
        for reason in skipped:
            self._say(f"checkpoint passed over: {reason}")
        if found is None:
            self._say("no checkpoint to resume from: starting at step 0")
        return found, run

    def _named(self, path: Path) -> tuple[CheckpointSet, list[str]]:
        found, skipped = choose(path, deep=True)
        # Of a set that is named itself nothing has been read yet, and ranks will read only what they need.
        if not found.verified and (faults := found.faults()):
            raise CheckpointError(faults[0])
        self._refuse_newer(found)
        return found, skipped

    def _adopted(self) -> Run | None:
        """The run of the newest set, for a folder that does not say which run is in it."""
        for info in find_sets(self.checkpoints):
            if info.fault is None and info.record is not None and (run := run_of(info.record.meta)) is not None:
                self._say(f"{self.path} does not say which run is in it: taken for {run}, that of {info.path}")
                return Run(id=run)
        return None

    def _run_from(self, found: CheckpointSet, known: Run | None) -> Run:
        """The run that goes on from a set that was named: the one of this folder, or one of its own."""
        origin = run_of(found.meta)
        if self.checkpoints.resolve() in found.path.resolve().parents:
            if known is not None and origin in (None, known.id):
                return known
            if known is None and origin is not None:
                return Run(id=origin)
        return Run.new(f"step {found.step} of {f'run {origin}' if origin else 'a run'} in {found.path}")

    def _refuse_newer(self, found: CheckpointSet) -> None:
        """Sets of an abandoned future would be what the next --resume auto takes."""
        newer = [
            info.step for info in find_sets(self.checkpoints) if info.fault is None and info.step > found.step
        ]
        if newer:
            raise CheckpointError(
                f"{self.path} holds newer checkpoints (up to step {max(newer)}) than {found.path}: go on from it "
                "in another folder with --out, or remove the newer ones first"
            )

    def _refuse_to_stop_again(self) -> None:
        """A job that continues itself would start and stop for ever."""
        if (self.path / STOP_NAME).exists():
            raise FolderError(
                f"{self.path / STOP_NAME} is there, from a request to stop an earlier run: remove it to let this "
                "one start"
            )

    def _refuse_to_bury(self) -> None:
        if self._resume is not None or self._overwrite:
            return
        if any(info.fault is None for info in find_sets(self.checkpoints)):
            raise CheckpointError(
                f"{self.path} holds checkpoints of an earlier run: go on with --resume auto, start over with "
                "--overwrite, or choose another folder with --out"
            )

    def _discard_checkpoints(self) -> None:
        """Remove all sets, for a run that starts over; the commit records go first."""
        for info in find_sets(self.checkpoints):
            (info.path / COMMIT_NAME).unlink(missing_ok=True)
        for info in find_sets(self.checkpoints):
            shutil.rmtree(info.path)
