"""Which sets may go: never the newest that counts, and nothing older before something newer is committed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcpipe.checkpoint.layout import COMMIT_NAME, is_ours
from hpcpipe.checkpoint.origin import strangeness
from hpcpipe.checkpoint.sets import SetInfo, find_sets
from hpcpipe.durable import sync_directory


class Retired(NamedTuple):
    """Folders that are gone, and a line for each that could not be removed."""

    removed: list[Path]
    faults: list[str]


def retire(root: Path, keep_last: int, keep_every: int | None = None, *, run: str | None = None) -> Retired:
    """Delete the sets below `root` that are neither among the newest `keep_last` nor kept for good.

    Kept for good is the first set at or past each multiple of `keep_every` updates. Older attempts at a step
    and folders that are no valid set go too, if they are older than the newest valid set; what is newer is not
    touched. A set loses its commit record first, so a crash half-way leaves no set that looks whole. Files that
    hpcpipe did not write stay, with their folder. Sets of another run than `run` (None: of none) do not count and
    are not touched. A failed delete is reported, not raised.

    Raises:
        ValueError: `keep_last` or `keep_every` is less than 1.
        CheckpointError: `root` cannot be listed.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise ValueError(f"keep_last ({keep_last}) and keep_every ({keep_every}) must be at least 1")
    infos = [
        info
        for info in find_sets(root)
        if info.record is None or strangeness(info.path, info.record.meta, run) is None
    ]
    kept = _kept(infos, keep_last, keep_every)
    retired = Retired([], [])
    newest = max((info.order for info in kept), default=None)
    for info in reversed(infos):
        if newest is not None and info.order < newest and info not in kept:
            try:
                _remove(info.path)
                retired.removed.append(info.path)
            except OSError as error:
                retired.faults.append(f"{error.filename or info.path}: cannot be removed ({error.strerror})")
    return retired


def discard(directory: Path) -> None:
    """Take away what there is of a set that will not be one; what cannot go is left to `retire`."""
    with suppress(OSError):
        _remove(directory)


def _kept(infos: Sequence[SetInfo], keep_last: int, keep_every: int | None) -> list[SetInfo]:
    newest_attempt: dict[int, SetInfo] = {}
    for info in infos:
        if info.fault is None:
            newest_attempt.setdefault(info.step, info)
    valid = list(newest_attempt.values())
    kept = valid[:keep_last]
    if keep_every is not None:
        window = 0
        for info in reversed(valid):
            if info.step // keep_every > window:
                window = info.step // keep_every
                kept.append(info)
    return kept


def _remove(path: Path) -> None:
    (path / COMMIT_NAME).unlink(missing_ok=True)
    sync_directory(path)
    for name in os.listdir(path):
        if is_ours(name):
            (path / name).unlink(missing_ok=True)
    path.rmdir()
