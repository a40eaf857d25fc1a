"""The folder of a run, shared by all its ranks: whether this run may have it, and which checkpoint in it to take.

Rank 0 alone looks at it and writes; the others hear what it found. How to go on from a checkpoint is decided in
`restore`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hpcpipe.checkpoint.layout import COMMIT_NAME
from hpcpipe.checkpoint.sets import CheckpointSet, choose, find_sets, newest_valid
from hpcpipe.config import RunConfig
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.restore import Resume, as_json, decide
from hpcpipe.errors import CheckpointError
from hpcpipe.schedule import Schedule
from hpcpipe.transport.world import World


class RunFolder:
    """The folder at `path` in the hands of one run.

    `resume` is "auto", a path, or None for a fresh start; `overwrite` lets that bury what is there; `say` takes a
    line for the user.
    """

    def __init__(
        self, path: Path, *, world: World, resume: str | None, overwrite: bool, say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._world = world
        self._resume = resume
        self._overwrite = overwrite
        self._say = say

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoint sets are."""
        return self.path / "checkpoints"

    def claim(self) -> None:
        """See that this run may write here, before anything costly is done; every rank calls it.

        Raises CheckpointError if the folder holds checkpoints that a fresh start would bury.
        """
        with self._world.together("looking at the folder of the run"):
            if self._world.rank == 0:
                self._refuse_to_bury()

    def choose_start(self, plan: Plan, schedule: Schedule, config: RunConfig) -> Resume | None:
        """Where the run goes on from, None for step 0; every rank calls it and gets the same.

        Raises CheckpointError, on rank 0, for a checkpoint that cannot be used.
        """
        resume = None
        if self._world.rank == 0:
            found = None if self._resume is None else self._find(self._resume)
            if found is not None:
                resume = decide(found, plan, schedule, config)
            self.path.mkdir(parents=True, exist_ok=True)
            if found is None and self._overwrite:
                self._discard_checkpoints()
            (self.path / "run.toml").write_text(config.to_toml())
        found_json = self._world.broadcast_json(as_json(resume), what="rank 0 to choose where to start")
        return None if found_json is None else Resume(**found_json)

    def _find(self, option: str) -> CheckpointSet | None:
        """The set to resume from; None when "auto" finds none."""
        if option == "auto":
            found, skipped = newest_valid(self.checkpoints)
        else:
            found, skipped = choose(Path(option), deep=True)
            # Of a set that is named itself nothing has been read yet, and ranks will read only what they need.
            if not found.verified and (faults := found.faults()):
                raise CheckpointError(faults[0])
        for reason in skipped:
            self._say(f"checkpoint passed over: {reason}")
        if found is None:
            self._say("no checkpoint to resume from: starting at step 0")
        elif option != "auto":
            self._refuse_newer(found)
        return found

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
