"""What the HDF5 library finds in a rank file, believed only as far as it says what the writer wrote.

An HDF5 file can point outside itself (links, external storage, virtual datasets), into itself in circles, or
declare more than it holds. Everything but plain groups and contiguous datasets of plain numbers is refused,
before any of their data is asked for. What the library itself does not survive is the business of `fence`, which
has this run in a process of its own.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

from hpcpipe.checkpoint.layout import (
    MAX_DEPTH,
    MAX_OBJECTS,
    STORED,
    Entry,
    FileReport,
    Index,
    check_path,
    stored_shape,
)
from hpcpipe.errors import CheckpointError
from hpcpipe.untrusted import one_line

REFUSAL = "hpcpipe did not write this file so and refuses it: use another set"
DIFFERENCE = "copy it again from where it was whole, or use another set (`hpcpipe checkpoint list`)"

_LOCK_ERRNOS = (errno.EAGAIN, errno.ENOLCK, errno.ENOSYS, 524)
"""What flock gives on files that others hold and on file systems without locks; 524 is Linux' own ENOTSUPP."""
_LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "an external link"}
_LAYOUTS = {h5d.VIRTUAL: "virtual", h5d.CHUNKED: "chunked", h5d.COMPACT: "compact"}
_MESSAGES = {
    0x07: "keeps its data in another file (external storage)",
    0x0B: "is filtered",
    0x0D: "has a comment",
    0x0F: "shares parts of its header with others",
    0x13: "has parameters of B-trees",
    0x14: "has notes of a file driver",
    0x17: "has notes on free space",
    0x18: "has an image of a metadata cache",
}
"""Parts of an object's header that no rank file needs, by their numbers in the HDF5 format."""
_NEEDED = sum(1 << kind for kind in (0, 1, 2, 3, 4, 5, 6, 8, 0xA, 0xC, 0xE, 0x10, 0x11, 0x12, 0x15, 0x16))
_MAX_ATTRIBUTE = 32


class NoVerdictError(CheckpointError):
    """A file that could not be looked at: nothing is known of its content, so no reason to take an older set."""


class LockedError(NoVerdictError):
    """A file that cannot be locked for reading."""


class Stored(NamedTuple):
    """A dataset as HDF5 describes it: on-disk type, what its numbers stand for, shape and where its bytes lie."""

    dtype: np.dtype[Any]
    stands_for: str | None
    shape: tuple[int, ...]
    offset: int

    def fault(self, entry: Entry) -> str | None:
        """How this differs from what the index says of it."""
        if self.dtype != np.dtype(STORED[entry.dtype]) or self.shape != stored_shape(entry.dtype, entry.shape):
            return f"is {self.dtype} {self.shape}, but the index says {entry.dtype} {entry.shape}"
        if (self.stands_for or self.dtype.name) != entry.dtype:
            return f"says that it holds {self.stands_for or self.dtype}, but the index says {entry.dtype}"
        if entry.nbytes and self.offset != entry.offset:
            return f"lies at {self.offset}, but the index says {entry.offset}"
        return None


def check_structure(path: Path, report: FileReport, index: Index) -> None:
    """See that a file holds what its index says and nothing else. No harm in the index is left to look for.

    Raises:
        LockedError: another process holds it, or the file system has no locks.
        CheckpointError: it is no HDF5 file, holds an object that a rank file must not, or differs; names it.
    """
    wanted = {f"tree/{name}": entry for name, entry in index.entries.items()}
    wanted["meta"] = Entry(dtype="uint8", shape=(report.index_length,), offset=report.index_offset, crc=0)
    found = _read_structure(path, report.length)
    for name in sorted(found.keys() ^ wanted.keys()):
        where = "index" if name in found else "file"
        raise CheckpointError(f"{path}: dataset {_shown(name)} is missing in the {where}; {DIFFERENCE}")
    for name, stored in found.items():
        if fault := stored.fault(wanted[name]):
            raise CheckpointError(f"{path}: dataset {_shown(name)} {fault}; {DIFFERENCE}")


def _read_structure(path: Path, length: int) -> dict[str, Stored]:
    """All datasets by their full names."""
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            if file.userblock_size:
                raise CheckpointError(f"{path}: starts with a user block, which no rank file has; it is refused")
            return _Walk(path, length).run(file.id)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise _open_error(path, error) from error
    except Exception as error:
        # h5py turns faults of the library into nearly every exception that Python has.
        raise CheckpointError(f"{path}: cannot be read as HDF5 ({one_line(error)})") from error


def _shown(name: str) -> str:
    return repr(name.removeprefix("tree/"))


def _open_error(path: Path, error: OSError) -> CheckpointError:
    text = one_line(error)
    found = re.search(r"errno = (\d+)", text)
    number = int(found[1]) if found else error.errno
    if number in _LOCK_ERRNOS and ("lock" in text or number != errno.EAGAIN):
        return LockedError(
            f"{path}: cannot be locked for reading (errno {number}): another process has it open for writing, or "
            "the file system has no locks; in the latter case set HDF5_USE_FILE_LOCKING=FALSE"
        )
    return CheckpointError(f"{path}: cannot be read as HDF5 ({text})")


class _Walk:
    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        self._length = length
        self._types = [(h5t.py_create(np.dtype(name)), np.dtype(name)) for name in sorted(set(STORED.values()))]
        self._objects = 0

    def run(self, root: Any) -> dict[str, Stored]:
        if self._header("/", h5o.open(root, b"/")):
            raise self._refused("/", "has attributes")
        found = dict(self._datasets(root, ()))
        if "meta" not in found:
            raise CheckpointError(f"{self._path}: is not a rank file of hpcpipe (it has no index at /meta)")
        for name in found:
            if name != "meta" and not name.startswith("tree/"):
                raise self._refused(name, "is no part of a rank file")
        return found

    def _datasets(self, group: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Stored]]:
        for raw in group:
            part = raw.decode("utf-8", "backslashreplace")
            name = "/".join((*above, part))
            try:
                if b"/" in raw:
                    raise ValueError("it holds a '/'")
                check_path(raw.decode("utf-8"))
            except ValueError as error:
                raise self._refused(name, f"has a name that is not allowed ({error})") from error
            link = group.links.get_info(raw)
            if link.type != h5l.TYPE_HARD:
                raise self._refused(name, f"is {_LINKS.get(link.type, 'a user-defined link')}")
            self._objects += 1
            if self._objects > MAX_OBJECTS + 2:
                raise self._refused(name, f"is one of more than {MAX_OBJECTS} objects")
            item = h5o.open(group, raw)
            if h5o.get_info(item).rc != 1:
                # A second hard link could lead back to a group above, and round without end.
                raise self._refused(name, "is linked more than once")
            if isinstance(item, h5g.GroupID):
                if len(above) >= MAX_DEPTH:
                    raise self._refused(name, f"is nested deeper than {MAX_DEPTH} parts")
                if self._header(name, item):
                    raise self._refused(name, "has attributes")
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
            raise self._refused(name, _MESSAGES[0x07])
        dtype = self._dtype(name, dataset.get_type())
        if plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
            raise self._refused(name, "has a fill value")
        attributes = self._header(name, dataset)
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
        stands_for = self._attribute(name, dataset) if attributes else None
        return Stored(dtype, stands_for, tuple(int(n) for n in shape), int(offset or 0))

    def _header(self, name: str, item: Any) -> int:
        """How many attributes an object has, whose header holds nothing that a rank file has no use for."""
        info = h5o.get_info(item)
        kinds = info.hdr.mesg.present
        if info.hdr.mesg.shared:
            raise self._refused(name, _MESSAGES[0x0F])
        for kind in range(64):
            if kinds & ~_NEEDED & 1 << kind:
                raise self._refused(name, _MESSAGES.get(kind, f"has a part of kind {kind} in its header"))
        return int(info.num_attrs)

    def _attribute(self, name: str, dataset: Any) -> str:
        """The one attribute that a dataset may have, looked at before it is read."""
        if h5o.get_info(dataset).num_attrs != 1 or not h5a.exists(dataset, b"dtype"):
            raise self._refused(name, "has attributes other than dtype")
        attribute = h5a.open(dataset, b"dtype")
        kind = attribute.get_type()
        plain = (
            kind.get_class() == h5t.STRING
            and not kind.is_variable_str()
            and not kind.committed()
            and kind.get_size() <= _MAX_ATTRIBUTE
            and attribute.get_space().get_simple_extent_type() == h5s.SCALAR
        )
        if not plain:
            raise self._refused(name, "has an attribute dtype that is no short text")
        value = np.empty((), f"S{kind.get_size()}")
        attribute.read(value, mtype=kind)
        return bytes(value[()]).decode("ascii", "backslashreplace")

    def _dtype(self, name: str, found: Any) -> np.dtype[Any]:
        if found.get_class() == h5t.REFERENCE:
            raise self._refused(name, "holds references")
        if not found.committed():
            for known, dtype in self._types:
                if found.equal(known):
                    return dtype
        raise self._refused(name, "has a type that a checkpoint cannot hold")

    def _refused(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {_shown(name)} {why}; {REFUSAL}")
