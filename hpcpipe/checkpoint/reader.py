"""Reads one rank's file: whole-file checksum first, then structure, then arrays, each with its own checksum.

No byte reaches the HDF5 library before length and CRC-32 of the whole file agree with the commit record; whoever
needs few arrays of a file reads them by its index, without that library.
It never repairs and never guesses; which set to take instead is decided elsewhere.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from hpcpipe.checkpoint.layout import Array, FileReport, Index
from hpcpipe.checkpoint.structure import LockedError, read_structure
from hpcpipe.errors import CheckpointError

_CHUNK = 4 << 20
_REMEDY = "copy it again from where it was whole, or use another set (`hpcpipe checkpoint list`)"


class Part(NamedTuple):
    """Arrays by path, the meta of the rank that wrote them, and the paths whose uint16 stand for bfloat16."""

    tree: dict[str, Array]
    meta: dict[str, Any]
    bf16: frozenset[str]


class _Raw:
    """A regular file opened for reading at offsets; errors become `CheckpointError` with its name."""

    def __init__(self, path: Path, report: FileReport) -> None:
        self.path = path
        try:
            # O_NONBLOCK: a FIFO put in the place of the file must not stop us.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); {_REMEDY}") from error
        status = os.fstat(self._descriptor)
        self.length = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: is not a regular file; {_REMEDY}")
        if self.length != report.length:
            self.close()
            raise CheckpointError(
                f"{path}: has {self.length} bytes, the commit record says {report.length}; {_REMEDY}"
            )

    def close(self) -> None:
        os.close(self._descriptor)

    def read_into(self, view: memoryview, offset: int, crc: int = 0) -> int:
        """Fill `view` from `offset`; the CRC-32 of what was read, continued from `crc`."""
        while view.nbytes:
            chunk = view[:_CHUNK]
            try:
                count = os.preadv(self._descriptor, [chunk], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); {_REMEDY}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: became shorter while it was read; {_REMEDY}")
            crc = zlib.crc32(chunk[:count], crc)
            view, offset = view[count:], offset + count
        return crc

    def crc(self, offset: int, length: int) -> int:
        """The CRC-32 of a stretch of the file, in little memory."""
        buffer = memoryview(bytearray(min(_CHUNK, length)))
        crc = 0
        for start in range(offset, offset + length, _CHUNK):
            view = buffer[: min(_CHUNK, offset + length - start)]
            crc = self.read_into(view, start, crc)
        return crc

    def index(self, report: FileReport) -> Index:
        """The JSON document that the report points to."""
        if report.index_offset + report.index_length > self.length:
            raise CheckpointError(f"{self.path}: its index lies outside the file; {_REMEDY}")
        data = memoryview(bytearray(report.index_length))
        if self.read_into(data, report.index_offset) != report.index_crc:
            raise CheckpointError(f"{self.path}: dataset 'meta' fails its CRC-32; {_REMEDY}")
        try:
            index = Index.decode(bytes(data), self.length)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}; {_REMEDY}") from error
        if index.rank != report.rank:
            raise CheckpointError(f"{self.path}: is of rank {index.rank}, not of rank {report.rank}; {_REMEDY}")
        return index

    def array(self, index: Index, path: str) -> Array:
        """One array, its bytes checked by their own CRC-32."""
        entry = index.entries.get(path)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: has no dataset {path!r}; the checkpoint is of another model or plan"
            )
        data = np.empty(entry.nbytes, np.uint8)
        if self.read_into(data.data, entry.offset) != entry.crc:
            raise CheckpointError(f"{self.path}: dataset {path!r} fails its CRC-32; {_REMEDY}")
        return entry.as_array(data)

    def part(self, index: Index, paths: Iterable[str]) -> Part:
        tree = {path: self.array(index, path) for path in paths}
        bf16 = frozenset(path for path in tree if index.entries[path].dtype == "bfloat16")
        return Part(tree, index.meta, bf16)


def read_index(path: Path, report: FileReport) -> Index:
    """Meta and table of arrays of a rank file by its checksum, without reading the rest (nor HDF5).

    Raises:
        CheckpointError: the file is missing, has another length, or its index is damaged.
    """
    raw = _Raw(path, report)
    try:
        return raw.index(report)
    finally:
        raw.close()


def read_part(path: Path, report: FileReport, index: Index, paths: Iterable[str]) -> Part:
    """Some arrays of a rank file, each checked by its own CRC-32, without the rest of the file and without HDF5.

    `index` is what `read_index` gave for this file.

    Raises:
        CheckpointError: the file is missing or has another length, or an array is not there or damaged.
    """
    raw = _Raw(path, report)
    try:
        return raw.part(index, paths)
    finally:
        raw.close()


class RankFile:
    """One verified rank file, open for reading arrays; a context manager."""

    def __init__(self, path: Path, report: FileReport, *, trusted: bool = False) -> None:
        """Open and check it: length and CRC-32 against `report` (if `trusted`, they have been), then structure.

        Raises:
            CheckpointError: it does not verify; names file, dataset and remedy in one line.
        """
        self._raw = _Raw(path, report)
        self.path = path
        try:
            if not trusted and self._raw.crc(0, report.length) != report.crc:
                raise CheckpointError(_damage(self._raw, report)[0])
            self.index = self._check_structure(report)
        except BaseException:
            self._raw.close()
            raise

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raw.close()

    def _check_structure(self, report: FileReport) -> Index:
        index = self._raw.index(report)
        datasets = read_structure(self.path, report.length)
        if strange := sorted(datasets.keys() ^ index.entries.keys()):
            where = "index" if strange[0] in datasets else "file"
            raise CheckpointError(f"{self.path}: dataset {strange[0]!r} is missing in the {where}; {_REMEDY}")
        for path, stored in datasets.items():
            if fault := stored.fault(index.entries[path]):
                raise CheckpointError(f"{self.path}: dataset {path!r} {fault}; {_REMEDY}")
        return index

    def read(self, path: str) -> Array:
        """One array, bit for bit as it was given to the writer (bfloat16 as uint16).

        Raises:
            CheckpointError: there is none of that path, or its bytes do not match its CRC-32.
        """
        return self._raw.array(self.index, path)

    def part(self, paths: Iterable[str] | None = None) -> Part:
        """These arrays (None: all of them) with meta and bfloat16 paths."""
        return self._raw.part(self.index, self.index.entries if paths is None else paths)


def file_faults(path: Path, report: FileReport) -> list[str]:
    """Everything that is wrong with a rank file, a line each; reads all of it, in little memory.

    Raises:
        LockedError: the file system or another process does not let us look, which says nothing about the file.
    """
    try:
        raw = _Raw(path, report)
        try:
            if raw.crc(0, report.length) != report.crc:
                return _damage(raw, report)
        finally:
            raw.close()
        with RankFile(path, report, trusted=True):
            return []
    except LockedError:
        raise
    except CheckpointError as error:
        return [str(error)]


def _damage(raw: _Raw, report: FileReport) -> list[str]:
    """Which datasets of a file that fails its CRC-32 are hit, found by the index alone."""
    prefix = f"{raw.path}: fails its CRC-32"
    try:
        entries = raw.index(report).entries
    except CheckpointError as error:
        return [str(error)]
    hit = [path for path, entry in entries.items() if raw.crc(entry.offset, entry.nbytes) != entry.crc]
    if not hit:
        return [f"{prefix} in the HDF5 structure between the datasets; {_REMEDY}"]
    return [f"{prefix} in dataset {path!r}; {_REMEDY}" for path in hit]
