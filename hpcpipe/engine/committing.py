"""What becomes of a set once its files are on disk, or are not: committed, and old ones retired, or taken away.

Rank 0 alone does this, however the files were written; a set that cannot be committed costs that set, not the run,
as long as not too many fail in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import FileReport
from hpcpipe.checkpoint.origin import run_of
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.retention import discard, retire
from hpcpipe.engine.failures import WriteFailures, in_words
from hpcpipe.errors import CheckpointError, HpcpipeError


class Committer:
    """Commits sets below `root`.

    `meta` is the JSON that describes the run (`run` in it is its id); the `keep_last` newest sets are kept, and
    the first one at or past each multiple of `keep_every` (None: no others). After `max_failures` failed sets in a
    row the run ends (0: never). `check` raises if the folder is no longer the run's. `say` takes a line for the
    user.

    `committed` is the step (minibatches applied) of the newest set that was committed, None before the first;
    whoever resumes sets it to that of the checkpoint it starts from.
    """

    def __init__(
        self,
        root: Path,
        *,
        meta: Mapping[str, Any],
        keep_last: int,
        keep_every: int | None,
        say: Callable[[str], None],
        max_failures: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.run = run_of(meta)
        self.committed: int | None = None
        self.failures = WriteFailures(root, limit=max_failures, say=say)
        self._check = check
        self._meta = meta
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._say = say

    def commit(self, step: int, directory: Path, reports: Sequence[FileReport]) -> None:
        """Make the files in `directory` the set of `step`, then retire old sets.

        Raises:
            FolderLostError: the folder is no longer the run's, or too many sets in a row have failed.
        """
        try:
            self._check()
            commit(directory, reports, {**self._meta, "step": step})
        except (OSError, CheckpointError) as error:
            self.failed(step, directory, in_words(error))
            return
        self.committed = step
        self.failures.clear()
        try:
            faults = retire(self.root, self._keep_last, self._keep_every, run=self.run).faults
        except HpcpipeError as error:
            faults = [str(error)]
        for fault in faults:
            self._say(f"an old checkpoint is still there: {fault}")

    def demand(self, step: int, committed: int | None) -> None:
        """See that the set of `step`, the last of the run, is the one `committed` last.

        Raises:
            FolderLostError: it is not; one line that says why.
        """
        if committed != step:
            raise self.failures.at_the_end(step, committed)

    def failed(self, step: int, directory: Path, reason: str) -> None:
        """The set of `step` in `directory` is not whole, and nobody is writing there any more.

        What there is of it goes, as it may be what fills the disk.

        Raises:
            FolderLostError: too many sets in a row have failed.
        """
        try:
            self._check()
            discard(directory)
        except OSError as error:
            # Whose folder it is cannot be seen either, so nothing is deleted.
            if (also := in_words(error)) != reason:
                reason = f"{reason} ({also})"
        self.failures.note(step, reason, self.committed)
