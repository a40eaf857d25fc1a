"""Checkpoints that could not be written: counted in a row, said loudly, and in the end a reason to stop.

A full disk, a quota or a server that is away costs a checkpoint, not the run, because the older sets still stand
and the next cut tries again. A run whose checkpoints all fail would train for nothing, though.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcpipe.errors import FolderLostError


class WriteFailures:
    """Failed checkpoints below `root`, in a row; after `limit` of them the run ends (0: never).

    `say` takes a line for the user. `last` is why the newest attempt failed, None if it did not.
    """

    def __init__(self, root: Path, *, limit: int, say: Callable[[str], None]) -> None:
        self.last: str | None = None
        self._root = root
        self._limit = limit
        self._say = say
        self._in_a_row = 0

    def note(self, step: int, reason: str, newest: int | None) -> None:
        """The checkpoint of `step` was not written; `newest` is the step of the newest that was.

        Raises:
            FolderLostError: it is the last one that the run may lose.
        """
        self.last = reason
        self._in_a_row += 1
        if self._limit and self._in_a_row >= self._limit:
            count = "1 checkpoint" if self._in_a_row == 1 else f"{self._in_a_row} checkpoints in a row"
            raise FolderLostError(
                f"{self._root}: {count} could not be written, so the run ends (checkpoint.max_failures = "
                f"{self._limit}); the last, of step {step}: {reason}; {_remedy(newest)}"
            )
        of = f" of {self._limit}" if self._limit else ""
        stands = "there is no older one" if newest is None else f"that of step {newest} still stands"
        self._say(
            f"checkpoint of step {step} was NOT WRITTEN: {reason}; failure {self._in_a_row}{of} in a row, "
            f"training goes on, {stands}"
        )

    def clear(self) -> None:
        """A checkpoint was written."""
        self.last = None
        self._in_a_row = 0

    def at_the_end(self, step: int, newest: int | None) -> FolderLostError:
        """What to raise where the last checkpoint of the run, of `step`, is missing."""
        reason = self.last or "it was not committed"
        return FolderLostError(
            f"{self._root}: the last checkpoint, of step {step}, could not be written: {reason}; {_remedy(newest)}"
        )


def reason_of(ranks: Sequence[tuple[int, int]], file_of: Callable[[int], Path]) -> str:
    """Why the files of some ranks, given with each one's errno, are not on disk; `file_of` names a rank's file."""
    alike: dict[int, list[int]] = {}
    for rank, number in sorted(ranks):
        alike.setdefault(number, []).append(rank)
    said = []
    for number, those in alike.items():
        who = f"rank {those[0]}" if len(those) == 1 else f"ranks {', '.join(map(str, those))}"
        said.append(f"{who}: {os.strerror(number)}: {file_of(those[0])}")
    return "; ".join(said)


def in_words(error: Exception) -> str:
    """An error of the file system as what and where, any other as it says itself."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error)


def _remedy(newest: int | None) -> str:
    if newest is None:
        return "mend that and start again, as no checkpoint was written"
    return f"mend that and go on with --resume auto from step {newest}, the newest checkpoint"
