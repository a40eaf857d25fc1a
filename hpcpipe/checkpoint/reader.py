"""Reads one rank's file: whole-file checksum first, then structure, then arrays, each with its own checksum.

No byte of it reaches the HDF5 library here: a structure that is the one that hpcpipe would have written, byte for
byte, needs no library, and any other is looked at by a process of its own (`fence`).
It never repairs and never guesses; which set to take instead is decided elsewhere.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from hpcpipe.checkpoint.draft import Draft, Extent, Kind
from hpcpipe.checkpoint.fence import inspect_apart
from hpcpipe.checkpoint.layout import MAX_INDEX_BYTES, Array, FileReport, Index
from hpcpipe.checkpoint.structure import NoVerdictError
from hpcpipe.errors import CheckpointError
from hpcpipe.untrusted import one_line, open_plain

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
            self._descriptor = open_plain(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); {_REMEDY}") from error
        self.length = os.fstat(self._descriptor).st_size
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
        if report.index_length > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{self.path}: its index of {report.index_length} bytes is longer than one can be; {_REMEDY}"
            )
        data = bytearray(report.index_length)
        if self.read_into(memoryview(data), report.index_offset) != report.index_crc:
            raise CheckpointError(f"{self.path}: dataset 'meta' fails its CRC-32; {_REMEDY}")
        try:
            index = Index.decode(bytes(data), self.length)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {one_line(error)}; {_REMEDY}") from error
        if index.rank != report.rank:
            raise CheckpointError(f"{self.path}: is of rank {index.rank}, not of rank {report.rank}; {_REMEDY}")
        return index

    def is_as_written(self, report: FileReport, index: Index) -> bool:
        """Whether all but the arrays' content is, byte for byte, what the writer makes of the index."""
        kinds = {path: Kind(entry.dtype, entry.shape) for path, entry in index.entries.items()}
        try:
            draft = Draft(index.rank, kinds, index.meta)
        except Exception:
            # h5py has nearly every exception that Python has for what it cannot lay out, and what it cannot lay
            # out it did not write.
            return False
        index_place = (report.index_offset, report.index_length)
        if draft.length != report.length or (draft.index_offset, draft.index_length) != index_place:
            return False
        # With these right, too, what lies between the arrays is no longer than what was laid out.
        if any(draft.entries[path].offset != entry.offset for path, entry in index.entries.items()):
            return False
        extents = draft.extents(entry.crc for entry in index.entries.values())
        extents.append(Extent(draft.index_offset, draft.index_length, 0))
        return all(self._bytes(offset, len(between)) == between for offset, between, _ in draft.structure(extents))

    def array(self, index: Index, path: str) -> Array:
        """One array, its bytes checked by their own CRC-32."""
        entry = index.entries.get(path)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: has no dataset {path!r}; the checkpoint is of another model or plan"
            )
        try:
            data = np.empty(entry.nbytes, np.uint8)
        except MemoryError as error:
            raise self._too_large(entry.nbytes) from error
        if self.read_into(data.data, entry.offset) != entry.crc:
            raise CheckpointError(f"{self.path}: dataset {path!r} fails its CRC-32; {_REMEDY}")
        return entry.as_array(data)

    def part(self, index: Index, paths: Iterable[str]) -> Part:
        wanted = list(paths)
        together = sum(index.entries[path].nbytes for path in wanted if path in index.entries)
        if together > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            # A file with holes can be larger than any memory and still take no place on a disk.
            raise self._too_large(together)
        tree = {path: self.array(index, path) for path in wanted}
        bf16 = frozenset(path for path in tree if index.entries[path].dtype == "bfloat16")
        return Part(tree, index.meta, bf16)

    def _too_large(self, nbytes: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {nbytes} bytes are to be read from it, more than this machine has memory for; use a "
            "larger one, or another set"
        )

    def _bytes(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return bytes(data)


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
        """Open and check it: length and CRC-32 against `report`, then structure (if `trusted`, they have been).

        Raises:
            CheckpointError: it does not verify; names file, dataset and remedy in one line.
        """
        self._raw = _Raw(path, report)
        self.path = path
        try:
            if not trusted and self._raw.crc(0, report.length) != report.crc:
                raise CheckpointError(_damage(self._raw, report)[0])
            self.index = self._raw.index(report)
            if not trusted:
                _check_structure(self._raw, report, self.index)
        except BaseException:
            self._raw.close()
            raise

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raw.close()

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
        NoVerdictError: the machine, the file system or another process does not let us look at it.
    """
    try:
        raw = _Raw(path, report)
        try:
            if raw.crc(0, report.length) != report.crc:
                return _damage(raw, report)
            _check_structure(raw, report, raw.index(report))
            return []
        finally:
            raw.close()
    except NoVerdictError:
        raise
    except CheckpointError as error:
        return [str(error)]


def _check_structure(raw: _Raw, report: FileReport, index: Index) -> None:
    if not raw.is_as_written(report, index):
        inspect_apart(raw.path, report, len(index.entries))


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
