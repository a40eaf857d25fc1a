"""What the HDF5 library finds in a rank file, believed only as far as it says what the writer wrote.

An HDF5 file can point outside itself (links, external storage, virtual datasets), into itself in circles, or
declare more than it holds. Everything but plain groups and contiguous datasets of plain numbers is refused,
before any of their data is asked for.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5t

from hpcpipe.checkpoint.layout import MAX_DEPTH, STORED, Entry, check_path, stored_shape
from hpcpipe.errors import CheckpointError

_LOCK_ERRNOS = (errno.EAGAIN, errno.ENOLCK, errno.ENOSYS, 524)
"""What flock gives on files that others hold and on file systems without locks; 524 is Linux' own ENOTSUPP."""
_LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "an external link"}
_LAYOUTS = {h5d.VIRTUAL: "virtual", h5d.CHUNKED: "chunked", h5d.COMPACT: "compact"}


class LockedError(CheckpointError):
    """A file that cannot be locked for reading: no verdict on its content, so no reason to take an older set."""


class Stored(NamedTuple):
    """A dataset as HDF5 describes it: on-disk type, shape and where its bytes lie."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def fault(self, entry: Entry) -> str | None:
        """How this differs from what the index says of it."""
        if self.dtype != np.dtype(STORED[entry.dtype]) or self.shape != stored_shape(entry.dtype, entry.shape):
            return f"is {self.dtype} {self.shape}, but the index says {entry.dtype} {entry.shape}"
        if entry.nbytes and self.offset != entry.offset:
            return f"lies at {self.offset}, but the index says {entry.offset}"
        return None


def read_structure(path: Path, length: int) -> dict[str, Stored]:
    """All datasets below `/tree`, by path, of a file of `length` bytes.

    Raises:
        LockedError: another process holds it, or the file system has no locks.
        CheckpointError: it is no HDF5 file, or holds an object that a rank file must not; names it.
    """
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            if file.userblock_size:
                raise CheckpointError(f"{path}: starts with a user block, which no rank file has; it is refused")
            return _Walk(path, length).run(file.id)
    except CheckpointError:
        raise
    except OSError as error:
        raise _open_error(path, error) from error
    except Exception as error:
        # h5py turns faults of the library into nearly every exception that Python has.
        raise CheckpointError(f"{path}: cannot be read as HDF5 ({_one_line(error)})") from error


def _open_error(path: Path, error: OSError) -> CheckpointError:
    text = _one_line(error)
    found = re.search(r"errno = (\d+)", text)
    number = int(found[1]) if found else error.errno
    if number in _LOCK_ERRNOS and ("lock" in text or number != errno.EAGAIN):
        return LockedError(
            f"{path}: cannot be locked for reading (errno {number}): another process has it open for writing, or "
            "the file system has no locks; in the latter case set HDF5_USE_FILE_LOCKING=FALSE"
        )
    return CheckpointError(f"{path}: cannot be read as HDF5 ({text})")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Walk:
    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        self._length = length
        self._types = [(h5t.py_create(np.dtype(name)), np.dtype(name)) for name in sorted(set(STORED.values()))]

    def run(self, root: Any) -> dict[str, Stored]:
        found = dict(self._datasets(root, ()))
        meta = found.pop("meta", None)
        if meta is None:
            raise CheckpointError(f"{self._path}: is not a rank file of hpcpipe (it has no index at /meta)")
        for name in found:
            if not name.startswith("tree/"):
                raise self._refused(name, "is no part of a rank file")
        return {name.removeprefix("tree/"): stored for name, stored in found.items()}

    def _datasets(self, group: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Stored]]:
        for raw in group:
            part = raw.decode("utf-8", "backslashreplace")
            name = "/".join((*above, part))
            try:
                check_path(part)
            except ValueError as error:
                raise self._refused(name, f"has a name that is not allowed ({error})") from error
            link = group.links.get_info(raw)
            if link.type != h5l.TYPE_HARD:
                raise self._refused(name, f"is {_LINKS.get(link.type, 'a user-defined link')}")
            item = h5o.open(group, raw)
            if h5o.get_info(item).rc != 1:
                # A second hard link could lead back to a group above, and round without end.
                raise self._refused(name, "is linked more than once")
            if isinstance(item, h5g.GroupID):
                if len(above) >= MAX_DEPTH:
                    raise self._refused(name, f"is nested deeper than {MAX_DEPTH} parts")
                yield from self._datasets(item, (*above, part))
            elif isinstance(item, h5d.DatasetID):
                yield name, self._dataset(name, item)
            else:
                raise self._refused(name, "is a named type")

    def _dataset(self, name: str, dataset: Any) -> Stored:
        plist = dataset.get_create_plist()
        if (layout := plist.get_layout()) != h5d.CONTIGUOUS:
            raise self._refused(name, f"is {_LAYOUTS.get(layout, 'oddly')} stored, not contiguous")
        if plist.get_external_count():
            raise self._refused(name, "keeps its data in another file (external storage)")
        dtype = self._dtype(name, dataset.get_type())
        shape = dataset.shape
        if shape is None:
            raise self._refused(name, "has no dataspace")
        size = dtype.itemsize
        for extent in shape:
            size *= int(extent)
        if size > self._length:
            raise self._refused(name, f"declares {size} bytes in a file of {self._length}")
        offset = dataset.get_offset()
        if size and (offset is None or offset + size > self._length):
            raise self._refused(name, f"declares {size} bytes that the file does not hold")
        return Stored(dtype, tuple(int(n) for n in shape), int(offset or 0))

    def _dtype(self, name: str, found: Any) -> np.dtype[Any]:
        if found.get_class() == h5t.REFERENCE:
            raise self._refused(name, "holds references")
        if not found.committed():
            for known, dtype in self._types:
                if found.equal(known):
                    return dtype
        raise self._refused(name, "has a type that a checkpoint cannot hold")

    def _refused(self, name: str, why: str) -> CheckpointError:
        shown = name.removeprefix("tree/")
        return CheckpointError(
            f"{self._path}: {shown!r} {why}; hpcpipe did not write this file so and refuses it: use another set"
        )
