"""Files and folders that are still there after a power cut: written under another name, synced, then renamed."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make renames and new entries in `path` durable. File systems that cannot do so are let be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` with its parents, each made durable in its own parent. Several ranks may do so at once."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write every byte of `data` at `offset`; a short write goes on, an error is raised as it comes."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader, or a crash, finds the old content or the new, never a part.

    Raises:
        OSError: the disk is full or gone; names the file. What stood at `path` before is unharmed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        # What a failing disk says about this is less useful than what it said before.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise named(error, path) from error


def named(error: OSError, path: Path) -> OSError:
    """The same error (same errno, same class) with the file in its message."""
    return OSError(error.errno, error.strerror or str(error), str(path))
